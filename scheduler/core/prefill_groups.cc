#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/prefill_plan.h"
#include "scheduler/core/scheduler_impl.h"

// Long prompts that several compute workers prefill together (proto::PrefillPart): one step of one sequence, with a
// step for each rank. It is committed as a whole, or repeated as a whole.

namespace dovetail::scheduler {

// ---- planning ----

int SchedulerCore::Impl::MostPrefillRanks() const {
  if (!options_.enable_chunked_prefill) return 1;
  const int workers = static_cast<int>(compute_workers_.size());
  const int most = options_.prefill_ranks == 0 ? proto::kMaxPrefillRanks : options_.prefill_ranks;
  return std::min({most, workers, kMaxMicroBatches - workers});
}

// Those that are no rank of a group now.
std::vector<WorkerId> SchedulerCore::Impl::FreeRanks() const {
  std::vector<WorkerId> free = compute_workers_;
  std::erase_if(free, [&](WorkerId worker) {
    return std::any_of(micro_batches_.begin(), micro_batches_.end(), [&](const MicroBatch& batch) {
      return batch.group != StepId() && batch.in_flight && batch.compute_worker == worker;
    });
  });
  return free;
}

// Micro-batches that nothing else uses.
std::vector<int> SchedulerCore::Impl::FreeGroupSlots() const {
  std::vector<int> slots;
  for (int i = kMaxMicroBatches - 1; i >= micro_batches_in_use(); --i)
    if (!micro_batches_[i].in_flight && micro_batches_[i].group == StepId()) slots.push_back(i);
  return slots;
}

bool SchedulerCore::Impl::IsLongPrompt(const Sequence& sequence) const {
  return IsRunnable(sequence) && sequence.planned == 0 &&
         sequence.prefill_end() - sequence.ctx_len >= Position{2} * options_.prefill_rank_tokens;
}

// The prompts that wait share the compute workers that are free.
void SchedulerCore::Impl::PlanPrefillGroups() {
  const int most = MostPrefillRanks();
  if (most < 2) return;
  scratch_.clear();
  for (int i = 0; i < micro_batches_in_use(); ++i) {
    const MicroBatch& home = micro_batches_[i];
    if (home.held || home.not_before > now_ || home.failed_attempts > 0) continue;
    for (Sequence* sequence : home.members)
      if (IsLongPrompt(*sequence)) scratch_.push_back(sequence);
  }
  if (scratch_.empty()) return;
  std::sort(scratch_.begin(), scratch_.end(), [](const Sequence* a, const Sequence* b) {
    const Tenant& x = *a->request->tenant;
    const Tenant& y = *b->request->tenant;
    return std::tuple(x.served, x.name, a->age()) < std::tuple(y.served, y.name, b->age());
  });
  std::vector<WorkerId> free = FreeRanks();
  for (size_t i = 0; i < scratch_.size(); ++i) {
    const int share = static_cast<int>(free.size() / (scratch_.size() - i));
    const std::vector<int> slots = FreeGroupSlots();
    const int ranks = std::min({share, most, static_cast<int>(slots.size())});
    if (ranks < 2) continue;
    const int taken = PlanGroup(*scratch_[i], absl::MakeConstSpan(free).first(ranks), slots);
    free.erase(free.begin(), free.begin() + taken);
  }
}

// The number of ranks that it has: no more than there is room for on the attention workers. 0: none was planned.
int SchedulerCore::Impl::PlanGroup(Sequence& sequence, absl::Span<const WorkerId> workers,
                                   const std::vector<int>& slots) {
  const Position base = sequence.ctx_len, whole = sequence.prefill_end();
  const Position tokens = std::min<Position>(whole - base, proto::kMaxStepTokens);
  const int ranks = static_cast<int>(
      std::min<Position>(static_cast<Position>(workers.size()), tokens / options_.prefill_rank_tokens));
  const Position most = Position{ranks} * options_.max_num_batched_tokens;
  Position end = std::min(whole, base + most);
  if (end < whole) end -= end % kSegmentTokens;
  if (ranks < 2 || end <= base) return 0;
  const std::vector<Position> cuts = CutPrefill(base, end, ranks, {.most_tokens = options_.max_num_batched_tokens});
  const int cut_ranks = static_cast<int>(cuts.size()) - 1;
  if (cut_ranks < 2) return 0;
  if (!ChargeGroup(sequence, static_cast<int>(cuts.back() - base)))
    return PlanGroup(sequence, workers.first(static_cast<size_t>(cut_ranks) - 1), slots);
  PrefillRun run{.id = StepId(next_step_), .sequence = &sequence};
  sequence.history_seen = false;  // no rank sees the tokens of the others
  double work = 0;
  for (int r = 0; r < cut_ranks; ++r) work += StepPatience::WorkOf(cuts[r], static_cast<int>(cuts[r + 1] - cuts[r]));
  for (int r = 0; r < cut_ranks; ++r) {
    const proto::PrefillPart part{run.id, base, cuts.back(), r, cut_ranks};
    PlanRank(sequence, part, {cuts[r], cuts[r + 1]}, workers[r], slots[r]);
    SetDeadline(micro_batches_[slots[r]], work);
    if (r > 0) micro_batches_[slots[r]].deadline = absl::InfiniteFuture();  // it waits for the rank before it
    run.slots.push_back(slots[r]);
  }
  runs_.push_back(std::move(run));
  ++stats_.prefill_groups;
  stats_.prefill_group_tokens += static_cast<uint64_t>(cuts.back() - base);
  return cut_ranks;
}

// Layers with windows and linear states take more room while a step has so many tokens of a sequence, and until the
// next one begins. False: there is not as much.
bool SchedulerCore::Impl::ChargeGroup(Sequence& sequence, int tokens) {
  const Charges cost = budget_.CostOf(sequence.placement, {.first_block = sequence.shared_blocks,
                                                           .end = sequence.reserved,
                                                           .ctx_len = sequence.told_ctx_len,
                                                           .chunk = tokens});
  if (budget_.Lacking(cost, sequence.charges)) return false;
  Charge(sequence, cost);
  sequence.group_charged = true;
  return true;
}

void SchedulerCore::Impl::EndChargeOfGroup(Sequence& sequence) {
  if (!std::exchange(sequence.group_charged, false)) return;
  Charge(sequence, budget_.CostOf(sequence.placement, {.first_block = sequence.shared_blocks,
                                                       .end = sequence.reserved,
                                                       .ctx_len = sequence.told_ctx_len}));
}

void SchedulerCore::Impl::PlanRank(Sequence& sequence, const proto::PrefillPart& part, const proto::TokenRange& tokens,
                                   WorkerId worker, int slot) {
  MicroBatch& flight = micro_batches_[slot];
  flight.in_flight = true;
  flight.unreadable = flight.voided = false;
  flight.home = sequence.micro_batch;
  flight.step = StepId(next_step_++);
  flight.follows = StepId();
  flight.group = part.group;
  flight.compute_worker = worker;
  flight.entries.resize(1);
  RunStep run{
      .compute_worker = worker,
      .plan = {
          .step = flight.step, .micro_batch = MicroBatchId(static_cast<uint16_t>(slot)), .entries = {}, .part = part}};
  run.plan.entries.resize(1);
  planned_for_ = worker;
  given_left_ = kMaxBytesGiven;
  sequence.planned = static_cast<int>(tokens.end - tokens.begin);
  FillEntry(sequence, {.ctx_len = tokens.begin, .named_until = part.base}, worker, run.plan.entries[0],
            flight.entries[0]);
  Act(std::move(run));
}

// ---- results ----

SchedulerCore::Impl::PrefillRun& SchedulerCore::Impl::RunOf(const MicroBatch& rank) {
  const auto run = std::find_if(runs_.begin(), runs_.end(), [&](const PrefillRun& r) { return r.id == rank.group; });
  DT_CHECK(run != runs_.end(), "a rank's group has ended");
  return *run;
}

// The other ranks wait for tokens that will not come, or that nobody wants.
void SchedulerCore::Impl::WithdrawGroup(PrefillRun& run) {
  if (std::exchange(run.withdrawn, true)) return;
  for (const int slot : run.slots) {
    MicroBatch& rank = micro_batches_[slot];
    if (!rank.in_flight) continue;
    SetDeadline(rank, rank.work);
    Act(WithdrawStep{rank.compute_worker, rank.step, MicroBatchId(static_cast<uint16_t>(slot))});
  }
}

void SchedulerCore::Impl::WithdrawGroupOf(const Sequence& sequence) {
  for (PrefillRun& run : runs_)
    if (run.sequence == &sequence) WithdrawGroup(run);
}

void SchedulerCore::Impl::FinishRank(MicroBatch& rank, const proto::StepResult& result) {
  PrefillRun& run = RunOf(rank);
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
  if (kept.status != proto::StepStatus::kOk) WithdrawGroup(run);
  if (MicroBatch* const next = FirstInFlight(run); next != nullptr && next->deadline == absl::InfiniteFuture())
    SetDeadline(*next, next->work);
  EndGroupIfDone(run);
}

// Its compute worker was lost; `overdue` says why if the core itself has given it up.
void SchedulerCore::Impl::LoseRank(MicroBatch& rank, const std::string& overdue) {
  PrefillRun& run = RunOf(rank);
  rank.in_flight = false;
  run.lost = true;
  if (!overdue.empty()) run.overdue = overdue;
  WithdrawGroup(run);
  EndGroupIfDone(run);
}

MicroBatch* SchedulerCore::Impl::FirstInFlight(const PrefillRun& run) {
  for (const int slot : run.slots)
    if (micro_batches_[slot].in_flight) return &micro_batches_[slot];
  return nullptr;
}

void SchedulerCore::Impl::EndGroupIfDone(const PrefillRun& run) {
  if (FirstInFlight(run) != nullptr) return;
  const auto at = runs_.begin() + (&run - runs_.data());
  PrefillRun ended = std::move(*at);
  runs_.erase(at);
  EndGroup(ended);
}

// From here on it is one step with all of the group's tokens, in the micro-batch of one of its ranks.
void SchedulerCore::Impl::EndGroup(PrefillRun& run) {
  int kept = run.slots.back();
  PlannedEntry whole = micro_batches_[run.slots[0]].entries[0];
  whole.group = true;
  proto::StepResult result = MergeResults(run);
  for (const int slot : run.slots) {
    MicroBatch& rank = micro_batches_[slot];
    if (slot != run.slots[0]) {
      whole.q_len += rank.entries[0].q_len;
      whole.logits_rows += rank.entries[0].logits_rows;
      whole.sample = rank.entries[0].sample;
    }
    if (rank.step == run.failed) kept = slot;
    rank.entries.clear();
    rank.group = StepId();
    rank.work = 0;  // what it took is not what its tokens take
  }
  run.sequence->in_flight -= static_cast<int>(run.slots.size()) - 1;
  MicroBatch& batch = micro_batches_[kept];
  batch.entries = {whole};
  if (!run.overdue.empty()) return TryElsewhere(batch, run.overdue);
  if (run.failed != StepId() && !run.lost) return FinishStep(batch, run.results.at(run.failed));
  if (run.withdrawn) return RepeatStep(batch);
  FinishStep(batch, result);
}

// What one step with all the tokens would have given.
proto::StepResult SchedulerCore::Impl::MergeResults(const PrefillRun& run) const {
  proto::StepResult merged;
  if (run.withdrawn) return merged;
  proto::EntryResult& entry = merged.entries.emplace_back();
  for (const int slot : run.slots) {
    const MicroBatch& rank = micro_batches_[slot];
    const proto::EntryResult& part = run.results.at(rank.step).entries[0];
    const size_t before =
        static_cast<size_t>(rank.entries[0].ctx_len - micro_batches_[run.slots[0]].entries[0].ctx_len);
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
    const proto::PrefixTraffic& traffic = run.results.at(rank.step).prefix;
    merged.prefix.asked_bytes += traffic.asked_bytes;
    merged.prefix.gathered_bytes += traffic.gathered_bytes;
    merged.prefix.state_bytes += traffic.state_bytes;
  }
  return merged;
}

}  // namespace dovetail::scheduler
