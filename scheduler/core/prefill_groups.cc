#include "scheduler/core/prefill_groups.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/exact_sums.h"
#include "proto/prefix_traffic.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/tenant_queues.h"

namespace dovetail::scheduler {

// ---- planning ----

// Compute workers that are no rank of a group now.
std::vector<WorkerId> PrefillGroups::FreeRanks() const {
  std::vector<WorkerId> free = pool_.workers();
  std::erase_if(free, [&](WorkerId worker) {
    return std::any_of(batches_.begin(), batches_.end(), [&](const MicroBatch& batch) {
      return batch.group != StepId() && batch.in_flight && batch.compute_worker == worker;
    });
  });
  return free;
}

// Micro-batches that nothing else uses.
std::vector<int> PrefillGroups::FreeSlots() const {
  std::vector<int> slots;
  for (int i = kMaxMicroBatches - 1; i >= pool_.micro_batches_in_use(); --i)
    if (!batches_[i].in_flight && batches_[i].group == StepId()) slots.push_back(i);
  return slots;
}

std::vector<Sequence*> PrefillGroups::LongPrompts() const {
  std::vector<Sequence*> prompts;
  for (int i = 0; i < pool_.micro_batches_in_use(); ++i) {
    const MicroBatch& home = batches_[i];
    if (home.held || home.not_before > turn_.now() || home.failed_attempts > 0) continue;
    for (Sequence* sequence : home.members) {
      const PromptToPlan prompt{sequence->ctx_len, sequence->prefill_end(), {}, sequence->divided};
      const bool is_long = pool_.planner().RanksFor(prompt, 2) == 2;
      if (is_long && sequence->MayStep(turn_.now()) && sequence->planned == 0) prompts.push_back(sequence);
    }
  }
  return prompts;
}

void PrefillGroups::Plan(bool requests_wait) {
  const int most = pool_.most_prefill_ranks();
  if (most < 2 || (requests_wait && options_.prefill_ranks == 0)) return;
  std::vector<Sequence*> prompts = LongPrompts();
  if (prompts.empty()) return;
  std::sort(prompts.begin(), prompts.end(), [](const Sequence* a, const Sequence* b) {
    const Tenant& x = *a->request->tenant;
    const Tenant& y = *b->request->tenant;
    return std::tuple(x.served, x.name, a->age()) < std::tuple(y.served, y.name, b->age());
  });
  std::vector<WorkerId> free = pool_.MostAlike(FreeRanks());
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int share = static_cast<int>(free.size() / (prompts.size() - i));
    const std::vector<int> slots = FreeSlots();
    const int ranks = std::min({share, most, static_cast<int>(slots.size())});
    if (ranks < 2) continue;
    const std::vector<WorkerId> taken = PlanGroup(*prompts[i], free, ranks, slots);
    std::erase_if(free, [&](WorkerId worker) { return std::find(taken.begin(), taken.end(), worker) != taken.end(); });
  }
}

// What the planner chooses, but of each rank no more tokens than the streams of these workers can bear.
PrefillChoice PrefillGroups::Choose(PromptToPlan prompt, const std::vector<FreeRank>& free, int most_ranks,
                                    bool& shortened) const {
  const PrefillPlanner& planner = pool_.planner();
  PrefillChoice choice = planner.Choose(prompt, free, most_ranks);
  shortened = false;
  if (choice.ranks() < 2 || !options_.prefill_itl_budget.on()) return choice;
  std::vector<WorkerId> workers;
  for (const FreeRank& rank : free) workers.push_back(rank.worker);
  const PrefillBound bound = choice.forecast.bound;
  const double room_s = room_.For(workers, bound == PrefillBound::kPlane || bound == PrefillBound::kLink, false);
  if (choice.forecast.predicted_s <= room_s && choice.forecast.predicted_s > 0) return choice;
  if (room_s == std::numeric_limits<double>::infinity()) return choice;
  shortened = true;
  int low = kLeastRankChunk, high = options_.max_num_batched_tokens;
  if (choice.forecast.predicted_s <= 0) high = std::min<int>(high, kChunkBeforeRates);
  while (low + kSegmentTokens <= high) {
    prompt.most_tokens = low + (high - low + kSegmentTokens) / 2 / kSegmentTokens * kSegmentTokens;
    if (planner.Choose(prompt, free, most_ranks).forecast.predicted_s <= room_s)
      low = prompt.most_tokens;
    else
      high = prompt.most_tokens - kSegmentTokens;
  }
  prompt.most_tokens = low;
  return planner.Choose(prompt, free, most_ranks);
}

// Of `workers`, those that are its ranks: at most `most_ranks`, and no more than there is room for on the attention
// workers. None: no group was planned.
std::vector<WorkerId> PrefillGroups::PlanGroup(Sequence& sequence, const std::vector<WorkerId>& workers, int most_ranks,
                                               const std::vector<int>& slots) {
  if (most_ranks < 2) return {};
  const Position base = sequence.ctx_len;
  const auto attention_workers = AttentionWorkersOf(sequence.placement);
  const PromptToPlan prompt{base, sequence.prefill_end(), attention_workers, sequence.divided};
  std::vector<FreeRank> free;
  for (const WorkerId worker : workers) free.push_back({worker, sequence.KeptBy(worker)});
  PrefillPlanner& planner = pool_.planner();
  bool shortened = false;
  const PrefillChoice choice = Choose(prompt, free, most_ranks, shortened);
  const std::vector<Position>& cuts = choice.cuts;
  const int cut_ranks = choice.ranks();
  if (cut_ranks < 2) return {};
  if (!accounts_.ReserveForGroup(sequence, cuts)) return PlanGroup(sequence, workers, cut_ranks - 1, slots);
  sequence.divided = std::max(sequence.divided, prompt.end - base);
  const proto::PrefillWay way = choice.forecast.way();
  Run run{.id = batches_.step_to_come(),
          .sequence = &sequence,
          .forecast = choice.forecast,
          .shortened = shortened,
          .begun = turn_.now()};
  std::vector<WorkerId> ranks;
  sequence.history_seen = false;  // no rank sees the tokens of the others
  double work = 0;
  for (int r = 0; r < cut_ranks; ++r) work += StepPatience::WorkOf(cuts[r], static_cast<int>(cuts[r + 1] - cuts[r]));
  std::vector<proto::RankAddress> addresses;
  for (int r = 0; r < cut_ranks; ++r)
    addresses.push_back({free[choice.free_rank[r]].worker, StepId(run.id.value() + static_cast<uint64_t>(r)),
                         MicroBatchId(static_cast<uint16_t>(slots[r])), cuts[r]});
  for (int r = 0; r < cut_ranks; ++r) {
    const proto::PrefillPart part{run.id, base, cuts.back(), r, cut_ranks};
    const FreeRank& rank = free[choice.free_rank[r]];
    PlanRank(sequence, part, {cuts[r], cuts[r + 1]}, addresses[r], addresses, choice);
    sequence.NoteKept(rank.worker, planner.HeldAfter(prompt, rank, choice.tokens(r), way.softmax));
    ranks.push_back(rank.worker);
    batches_[slots[r]].chunk.predicted_s = choice.forecast.predicted_s;
    batches_.NotePrompt(batches_[slots[r]], /*has_prompt=*/true);
    run.streams_s = std::max(run.streams_s, room_.StreamSeconds(rank.worker));
    batches_.SetDeadline(batches_[slots[r]], work, turn_.now());
    if (r > 0) batches_[slots[r]].deadline = absl::InfiniteFuture();  // it waits for the rank before it
    run.slots.push_back(slots[r]);
  }
  run.direct = IsBetweenRanks(way);
  run.barrier = way.softmax == proto::PrefixExchange::kSwitch || way.softmax == proto::PrefixExchange::kPassQ ||
                way.linear == proto::LinearExchange::kSwitch;
  runs_.push_back(std::move(run));
  ++groups_;
  shortened_ += shortened;
  tokens_ += static_cast<uint64_t>(cuts.back() - base);
  return ranks;
}

void PrefillGroups::PlanRank(Sequence& sequence, const proto::PrefillPart& part, const proto::TokenRange& tokens,
                             const proto::RankAddress& address, const std::vector<proto::RankAddress>& ranks,
                             const PrefillChoice& choice) {
  const proto::PrefillWay way = choice.forecast.way();
  MicroBatch& flight = batches_[address.micro_batch.value()];
  flight.in_flight = true;
  flight.unreadable = flight.voided = false;
  flight.home = sequence.micro_batch;
  flight.step = batches_.NextStep();
  DT_CHECK(flight.step == address.step, "a rank's step has another number than the other ranks were told");
  flight.follows = StepId();
  flight.forecast = {};
  flight.chunk = {};
  flight.group = part.group;
  flight.compute_worker = address.worker;
  batches_.NoteSent(flight);
  flight.entries.resize(1);
  RunStep run{
      .compute_worker = address.worker,
      .plan = {.step = address.step, .micro_batch = address.micro_batch, .entries = {}, .part = part, .ranks = {}}};
  run.plan.entries.resize(1);
  writer_.Begin(address.worker);
  sequence.planned = static_cast<int>(tokens.end - tokens.begin);
  writer_.Write(sequence, {.ctx_len = tokens.begin, .named_until = part.base, .exchange = way.softmax},
                run.plan.entries[0], flight.entries[0]);
  run.plan.entries[0].linear_exchange = way.linear;
  if (IsBetweenRanks(way)) run.plan.ranks = ranks;
  run.plan.gives_back = choice.gives_back;
  turn_.Act(std::move(run));
}

// ---- results ----

PrefillGroups::Run& PrefillGroups::RunOf(const MicroBatch& rank) {
  const auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) { return r.id == rank.group; });
  DT_CHECK(run != runs_.end(), "a rank's group has ended");
  return *run;
}

// The other ranks wait for tokens that will not come, or that are not wanted any more.
void PrefillGroups::Withdraw(Run& run) {
  if (std::exchange(run.withdrawn, true)) return;
  for (const int slot : run.slots) {
    MicroBatch& rank = batches_[slot];
    if (!rank.in_flight) continue;
    batches_.SetDeadline(rank, rank.work, turn_.now());
    turn_.Act(WithdrawStep{rank.compute_worker, rank.step, MicroBatchId(static_cast<uint16_t>(slot))});
  }
}

void PrefillGroups::Withdraw(const Sequence& sequence) {
  for (Run& run : runs_)
    if (run.sequence == &sequence) Withdraw(run);
}

std::optional<PrefillGroups::Ended> PrefillGroups::Finish(MicroBatch& rank, const proto::StepResult& result) {
  Run& run = RunOf(rank);
  rank.in_flight = false;
  proto::StepResult& kept = run.results[rank.step];
  kept = result;
  if (kept.status == proto::StepStatus::kOk &&
      (kept.entries.size() != 1 || kept.entries[0].sequence != rank.entries[0].id)) {
    kept = {.step = rank.step,
            .micro_batch = result.micro_batch,
            .status = proto::StepStatus::kWorkerFailed,
            .error = "the step's result does not list the step's sequences"};
  }
  if (kept.status != proto::StepStatus::kOk && !run.withdrawn) run.failed = rank.step;
  if (kept.status == proto::StepStatus::kOk) {
    LearnFrom(run, rank, kept);
  } else {
    Withdraw(run);
  }
  if (MicroBatch* const next = FirstInFlight(run); next != nullptr && next->deadline == absl::InfiniteFuture())
    batches_.SetDeadline(*next, next->work, turn_.now());
  return EndIfDone(run);
}

void PrefillGroups::LearnFrom(const Run& run, const MicroBatch& rank, const proto::StepResult& result) {
  const bool first = batches_.IndexOf(rank) == run.slots[0];
  pool_.planner().Learn(rank.compute_worker, AttentionWorkersOf(run.sequence->placement), result,
                        /*follows_a_rank=*/!first, run.shortened);
}

std::optional<PrefillGroups::Ended> PrefillGroups::Lose(MicroBatch& rank, const std::string& overdue) {
  Run& run = RunOf(rank);
  rank.in_flight = false;
  run.lost = true;
  if (!overdue.empty()) run.overdue = overdue;
  Withdraw(run);
  return EndIfDone(run);
}

bool PrefillGroups::WithdrawOverdue(const MicroBatch& rank) {
  Run& run = RunOf(rank);
  if (!run.barrier || run.withdrawn) return false;
  run.overdue = absl::StrCat("no result for ", absl::FormatDuration(turn_.now() - rank.sent));
  Withdraw(run);
  return true;
}

void PrefillGroups::LoseEndedRanks(WorkerId worker) {
  for (Run& run : runs_) {
    const bool ended = std::any_of(run.slots.begin(), run.slots.end(), [&](int slot) {
      return !batches_[slot].in_flight && batches_[slot].compute_worker == worker;
    });
    if (!run.direct || !ended) continue;
    run.lost = true;
    Withdraw(run);
  }
}

void PrefillGroups::LoseLink(WorkerId one, WorkerId other) {
  for (Run& run : runs_) {
    const auto is_rank = [&](WorkerId worker) {
      return std::any_of(run.slots.begin(), run.slots.end(),
                         [&](int slot) { return batches_[slot].compute_worker == worker; });
    };
    if (!run.direct || !is_rank(one) || !is_rank(other)) continue;
    run.lost = true;
    Withdraw(run);
  }
}

MicroBatch* PrefillGroups::FirstInFlight(const Run& run) {
  for (const int slot : run.slots)
    if (batches_[slot].in_flight) return &batches_[slot];
  return nullptr;
}

std::optional<PrefillGroups::Ended> PrefillGroups::EndIfDone(const Run& run) {
  if (FirstInFlight(run) != nullptr) return std::nullopt;
  const auto at = runs_.begin() + (&run - runs_.data());
  Run ended = std::move(*at);
  runs_.erase(at);
  return End(ended);
}

PrefillGroups::Ended PrefillGroups::End(Run& run) {
  int kept = run.slots.back();
  PlannedEntry whole = batches_[run.slots[0]].entries[0];
  whole.group = true;
  proto::StepResult result = Merged(run);
  for (const int slot : run.slots) {
    MicroBatch& rank = batches_[slot];
    if (slot != run.slots[0]) {
      whole.q_len += rank.entries[0].q_len;
      whole.logits_rows += rank.entries[0].logits_rows;
      const PlannedEntry& part = rank.entries[0];
      if (part.pool_from < part.pool_to) {  // those of the ranks follow each other
        if (whole.pool_from == whole.pool_to) whole.pool_from = part.pool_from;
        whole.pool_to = part.pool_to;
      }
      whole.sample = rank.entries[0].sample;
    }
    if (rank.step == run.failed) kept = slot;
    rank.entries.clear();
    rank.group = StepId();
    rank.work = 0;  // what it took is not what its tokens take
  }
  run.sequence->in_flight -= static_cast<int>(run.slots.size()) - 1;
  MicroBatch& batch = batches_[kept];
  batch.entries = {whole};
  using Outcome = Ended::Outcome;
  if (!run.overdue.empty()) return {.outcome = Outcome::kTryElsewhere, .batch = &batch, .error = run.overdue};
  if (run.failed != StepId() && !run.lost)
    return {.outcome = Outcome::kFinished, .batch = &batch, .result = run.results.at(run.failed)};
  if (run.withdrawn) return {.outcome = Outcome::kRepeat, .batch = &batch};
  const double took_s = absl::ToDoubleSeconds(turn_.now() - run.begun);
  run.forecast.measured_s = std::max(took_s - run.streams_s, took_s / 2);  // steps of streams ran meanwhile
  pool_.planner().LearnTime(run.forecast);
  return {.outcome = Outcome::kFinished, .batch = &batch, .result = std::move(result)};
}

// What one step with all the tokens would have given.
proto::StepResult PrefillGroups::Merged(const Run& run) const {
  proto::StepResult merged;
  if (run.withdrawn) return merged;
  proto::EntryResult& entry = merged.entries.emplace_back();
  ExactSums pooled;
  bool all_good = true;
  for (const int slot : run.slots) {
    const MicroBatch& rank = batches_[slot];
    const proto::EntryResult& part = run.results.at(rank.step).entries[0];
    const size_t before = static_cast<size_t>(rank.entries[0].ctx_len - batches_[run.slots[0]].entries[0].ctx_len);
    entry.sequence = part.sequence;
    if (entry.status == proto::StepStatus::kOk) entry.status = part.status;
    entry.position = part.position;
    entry.token = part.token;
    entry.has_logprobs = part.has_logprobs;
    entry.logprobs = part.logprobs;
    if (!part.prompt_logprobs.empty()) {  // a rank that was not asked leaves a gap
      entry.prompt_logprobs.resize(before);
      entry.prompt_logprobs.insert(entry.prompt_logprobs.end(), part.prompt_logprobs.begin(),
                                   part.prompt_logprobs.end());
    }
    entry.logits.insert(entry.logits.end(), part.logits.begin(), part.logits.end());
    if (!part.pooled.empty()) all_good &= pooled.AddWords(part.pooled);
    merged.prefix = Sum(merged.prefix, run.results.at(rank.step).prefix);
  }
  if (all_good) entry.pooled = pooled.TakeWords();  // else the result is refused for what it lacks
  return merged;
}

}  // namespace dovetail::scheduler
