#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/drawn_token.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/scheduler_impl.h"

// What is in a step: a token of every running sequence, then as much of the prompts as the budget leaves, in equal
// parts for tenants.

namespace dovetail::scheduler {

void SchedulerCore::Impl::On(const ComputeWorkerJoined& event) {
  if (std::find(compute_workers_.begin(), compute_workers_.end(), event.worker) != compute_workers_.end()) {
    ++stats_.late_events;
    return;
  }
  compute_workers_.push_back(event.worker);
}

void SchedulerCore::Impl::Plan() {
  if (compute_workers_.empty()) return;
  if (RunsAhead()) return PlanAhead();
  // The one that has waited longest first, so that no micro-batch always finds the KV taken.
  std::vector<int>& idle = idle_scratch_;
  idle.clear();
  EmptyUnused();
  PlanPrefillGroups();
  for (int i = 0; i < micro_batches_in_use(); ++i) {
    const MicroBatch& batch = micro_batches_[i];
    if (!batch.in_flight && batch.group == StepId() && !batch.held && batch.not_before <= now_) idle.push_back(i);
  }
  std::sort(idle.begin(), idle.end(), [&](int a, int b) {
    return std::make_pair(micro_batches_[a].step, a) < std::make_pair(micro_batches_[b].step, b);
  });
  for (int index : idle) PlanStep(index, index, nullptr);
}

bool SchedulerCore::Impl::RunsAhead() const {
  return options_.run_ahead && compute_workers_.size() == 1 && budget_.workers().size() == 1;
}

// Two steps of one set of sequences are in flight, in two slots that take turns, as long as the one that was planned
// last may be followed.
void SchedulerCore::Impl::PlanAhead() {
  EmptyUnused();
  const MicroBatch& home = micro_batches_[0];
  while (!home.held && home.not_before <= now_) {
    const bool first = micro_batches_[0].in_flight, second = micro_batches_[1].in_flight;
    if (first && second) return;
    const MicroBatch* after = first ? &micro_batches_[0] : second ? &micro_batches_[1] : nullptr;
    if (after == nullptr) drain_ = false;
    if (after != nullptr && (drain_ || !MayFollow(*after))) return;
    if (!PlanStep(0, first ? 1 : 0, after)) return;
  }
}

bool SchedulerCore::Impl::MayFollow(const MicroBatch& batch) const {
  return std::all_of(batch.entries.begin(), batch.entries.end(), [](const PlannedEntry& e) { return e.may_follow; });
}

// One that is in the step in flight, and is not known to end with it.
bool SchedulerCore::Impl::MayGoAhead(const Sequence& sequence) const {
  return sequence.phase == Phase::kReady && sequence.in_flight == 1 && !sequence.lost && !sequence.request->paused &&
         !sequence.awaits_forks && sequence.ctx_len + sequence.flying == sequence.size() &&
         sequence.output.size() + 1 < sequence.params().max_tokens && sequence.size() + 1 < options_.max_model_len;
}

// Nobody gives way for a step ahead: without room, the steps in flight end first.
bool SchedulerCore::Impl::GrowAhead(Sequence& sequence) {
  const Position end = sequence.ctx_len + sequence.flying + 1;
  if (end <= sequence.reserved) return true;
  const Position target = BlocksOf(end) * kSegmentTokens;
  const Charges cost = budget_.CostOf(
      sequence.placement, {.first_block = sequence.shared_blocks, .end = target, .ctx_len = sequence.told_ctx_len});
  if (budget_.Lacking(cost, sequence.charges).has_value()) {
    drain_ = true;
    return false;
  }
  Charge(sequence, cost);
  sequence.reserved = target;
  return true;
}

// Each compute worker has as many; a micro-batch belongs to one of them at a time.
int SchedulerCore::Impl::micro_batches_in_use() const {
  const int workers = std::max(1, static_cast<int>(compute_workers_.size()));
  const int of_each = options_.adapt_micro_batches ? rotation_.micro_batches() : options_.micro_batches;
  const int ranks = MostPrefillRanks();
  return std::min(of_each * workers, kMaxMicroBatches - (ranks > 1 ? ranks : 0));
}

// Fewer are in use than were: the members of the others go on in those.
void SchedulerCore::Impl::EmptyUnused() {
  for (int i = micro_batches_in_use(); i < kMaxMicroBatches; ++i) {
    MicroBatch& unused = micro_batches_[i];
    if (unused.in_flight || unused.members.empty()) continue;
    const std::vector<Sequence*> members = std::exchange(unused.members, {});
    unused.ForgetMembersTroubles();
    for (Sequence* sequence : members) Enlist(*sequence, SmallestFor(*sequence));
  }
}

void SchedulerCore::Impl::NoteTimes(const MicroBatch& batch, const proto::StepTimings& timings) {
  if (timings.total_us <= 0) return;
  const double ops = options_.attention.op_count();
  const auto wire = static_cast<double>(timings.attention_wait_us - timings.attention_us);
  Rotation::Step step;
  step.layer = {.dense_us = static_cast<double>(timings.dense_us + timings.prompt_us) / ops,
                .attention_us = static_cast<double>(timings.attention_us) / ops,
                .hop_us = std::max(0.0, wire) / ops / 2};
  if (!options_.adapt_micro_batches) return rotation_.Smooth(step.layer);
  step.total_us = static_cast<double>(timings.total_us);
  for (const MicroBatch& any : micro_batches_) step.sequences += static_cast<double>(any.members.size());
  step.sequences /= static_cast<double>(std::max<size_t>(1, compute_workers_.size()));
  step.decodes = std::all_of(batch.entries.begin(), batch.entries.end(),
                             [](const PlannedEntry& entry) { return entry.q_len == 1; });
  rotation_.Note(step);
}

void SchedulerCore::Impl::Balance(int index) {
  auto& members = micro_batches_[index].members;
  for (;;) {
    int least = index;
    for (int i = 0; i < micro_batches_in_use(); ++i) {
      if (micro_batches_[i].members.size() < micro_batches_[least].members.size()) least = i;
    }
    if (members.size() <= micro_batches_[least].members.size() + 1) return;
    const auto moved = std::find_if(members.rbegin(), members.rend(),
                                    [&](const Sequence* sequence) { return MayStepIn(*sequence, least); });
    if (moved == members.rend()) return;
    Sequence& sequence = **moved;
    members.erase(std::next(moved).base());
    Enlist(sequence, least);
  }
}

// A compute worker joined or went: those that run on one alone go where it is now.
void SchedulerCore::Impl::SendHome(int index) {
  const std::vector<Sequence*> members = micro_batches_[index].members;
  for (Sequence* sequence : members) {
    if (MayStepIn(*sequence, index)) continue;
    std::erase(micro_batches_[index].members, sequence);
    Enlist(*sequence, SmallestFor(*sequence));
  }
}

// Of the members of `index`, to be in flight as `slot`; `after` is their step in flight, if there is one. False: nobody
// is to step.
bool SchedulerCore::Impl::PlanStep(int index, int slot, const MicroBatch* after) {
  SendHome(index);
  Balance(index);
  MicroBatch& batch = micro_batches_[index];
  if (batch.members.empty()) return false;
  chosen_.clear();
  planned_for_ = compute_workers_[(index + batch.failed_attempts) % compute_workers_.size()];
  given_left_ = kMaxBytesGiven;
  int budget = options_.max_num_batched_tokens;
  batch.prefill_only_last = !options_.enable_chunked_prefill && !batch.prefill_only_last && LongestWaitsForRoom(batch);
  if (!batch.prefill_only_last) ChooseDecodes(batch, after != nullptr, budget);
  ChoosePrefills(batch, budget);
  if (chosen_.empty()) return false;

  MicroBatch& flight = micro_batches_[slot];
  flight.in_flight = true;
  flight.unreadable = false;
  flight.home = index;
  flight.step = StepId(next_step_++);
  flight.compute_worker = planned_for_;
  flight.entries.resize(chosen_.size());
  RunStep run{.compute_worker = flight.compute_worker,
              .plan = {.step = flight.step, .micro_batch = MicroBatchId(static_cast<uint16_t>(slot)), .entries = {}}};
  run.plan.entries.resize(chosen_.size());
  for (size_t i = 0; i < chosen_.size(); ++i) {
    const Sequence& sequence = *chosen_[i];
    const Position ctx_len = sequence.ctx_len + sequence.flying;
    FillEntry(*chosen_[i], {.ctx_len = ctx_len, .named_until = ctx_len, .ahead = sequence.in_flight > 0},
              flight.compute_worker, run.plan.entries[i], flight.entries[i]);
  }
  double work = 0;
  for (const PlannedEntry& entry : flight.entries) work += StepPatience::WorkOf(entry.ctx_len, entry.q_len);
  SetDeadline(flight, work);
  flight.follows = after != nullptr && proto::FollowsAnother(run.plan) ? after->step : StepId();
  Act(std::move(run));
  return true;
}

// A compute worker does its steps in turn, as far as anybody can rely on.
void SchedulerCore::Impl::SetDeadline(MicroBatch& flight, double work) {
  flight.work = work;
  double all = 0;
  for (const MicroBatch& batch : micro_batches_)
    if (batch.in_flight && batch.compute_worker == flight.compute_worker) all += batch.work;
  flight.sent = now_;
  flight.deadline = now_ + patience_.For(flight.compute_worker, all);
}

// Without chunking: does the oldest prompt need more of the step than the decodes leave?
bool SchedulerCore::Impl::LongestWaitsForRoom(const MicroBatch& batch) const {
  Position decodes = 0;
  const Sequence* oldest = nullptr;
  for (const Sequence* sequence : batch.members) {
    if (!IsRunnable(*sequence)) continue;
    if (sequence->prefill_end() - sequence->ctx_len == 1) {
      ++decodes;
    } else if (oldest == nullptr) {
      oldest = sequence;
    }
  }
  return oldest != nullptr && decodes + oldest->prefill_end() - oldest->ctx_len > options_.max_num_batched_tokens;
}

void SchedulerCore::Impl::ChooseDecodes(MicroBatch& batch, bool ahead, int& budget) {
  scratch_.assign(batch.members.begin(), batch.members.end());  // growing one may preempt another
  const int index = static_cast<int>(&batch - micro_batches_.data());
  for (Sequence* sequence : scratch_) {
    if (budget == 0) return;
    if (sequence->micro_batch != index) continue;
    if (ahead && MayGoAhead(*sequence)) {
      if (!MayGive(*sequence) || !GrowAhead(*sequence)) continue;
    } else {
      if (!IsRunnable(*sequence) || sequence->prefill_end() - sequence->ctx_len != 1 || !MayGive(*sequence)) continue;
      if (!Grow(*sequence, sequence->ctx_len + 1)) {
        drain_ = true;  // others may have to give way, once they are in no step
        continue;
      }
    }
    sequence->planned = 1;
    chosen_.push_back(sequence);
    --budget;
  }
}

void SchedulerCore::Impl::GivePrefill(Sequence& sequence, int most, int& budget) {
  const Position left = sequence.prefill_end() - sequence.ctx_len - sequence.planned;
  Position given = std::min<Position>(left, most);
  if (!options_.enable_chunked_prefill && given < left) return;
  if (given <= 0 || (sequence.planned == 0 && !MayGive(sequence))) return;
  if (sequence.planned == 0) chosen_.push_back(&sequence);
  sequence.planned += static_cast<int>(given);
  budget -= static_cast<int>(given);
}

void SchedulerCore::Impl::ChoosePrefills(MicroBatch& batch, int& budget) {
  scratch_.clear();
  for (Sequence* sequence : batch.members) {
    if (sequence->planned == 0 && IsRunnable(*sequence) && sequence->prefill_end() - sequence->ctx_len > 1) {
      scratch_.push_back(sequence);
    }
  }
  if (scratch_.empty() || budget == 0) return;
  // By tenant, the least served first; the oldest first within one, as members are.
  std::stable_sort(scratch_.begin(), scratch_.end(), [](const Sequence* a, const Sequence* b) {
    const Tenant& x = *a->request->tenant;
    const Tenant& y = *b->request->tenant;
    return &x != &y && std::tie(x.served, x.name) < std::tie(y.served, y.name);
  });
  int tenants = 1;
  for (size_t i = 1; i < scratch_.size(); ++i)
    tenants += scratch_[i]->request->tenant != scratch_[i - 1]->request->tenant;
  for (size_t i = 0; i < scratch_.size() && options_.enable_chunked_prefill && tenants > 1;) {
    int part = std::max(1, budget / tenants--);
    const Tenant* tenant = scratch_[i]->request->tenant;
    for (; i < scratch_.size() && scratch_[i]->request->tenant == tenant; ++i) {
      const int before = budget;
      GivePrefill(*scratch_[i], std::min(part, budget), budget);
      part -= before - budget;
    }
    tenants = std::max(tenants, 1);
  }
  for (Sequence* sequence : scratch_) GivePrefill(*sequence, budget, budget);  // what nobody's part used up
}

bool SchedulerCore::Impl::IsRunnable(const Sequence& sequence) const {
  return sequence.phase == Phase::kReady && sequence.in_flight == 0 && !sequence.request->paused &&
         !sequence.awaits_forks && sequence.not_before <= now_;
}

bool SchedulerCore::Impl::IsEvictable(const Sequence& sequence) const {
  const bool holds = sequence.phase >= Phase::kOpening && sequence.phase <= Phase::kReady;
  return holds && sequence.in_flight == 0 && sequence.planned == 0;
}

bool SchedulerCore::Impl::HoldsOn(const Sequence& sequence, int worker) const {
  return BlocksOn(sequence.charges, worker) > 0 ||
         (sequence.shares_prefix && BlocksOn(sequence.request->shared.charges, worker) > 0);
}

const Sequence* SchedulerCore::Impl::Oldest() const {
  const Sequence* oldest = nullptr;
  for (const Sequence* sequence : active_) {
    if (sequence->phase < Phase::kOpening || sequence->phase > Phase::kReady || sequence->request->paused) continue;
    if (oldest == nullptr || sequence->age() < oldest->age()) oldest = sequence;
  }
  return oldest;
}

// Paused ones first, then the newest of the tenant served most; never the oldest of all, which therefore always ends.
Sequence* SchedulerCore::Impl::PickVictim(std::optional<int> worker,
                                          absl::FunctionRef<bool(const Tenant&)> allowed) const {
  const Sequence* oldest = Oldest();
  Sequence* victim = nullptr;
  const auto rank = [](const Sequence& s) {
    return std::make_tuple(s.request->paused, s.request->tenant->served, s.request->tenant, s.age());
  };
  const auto comes_before = [&](const Sequence& a, const Sequence& b) {
    const auto [a_paused, a_served, a_tenant, a_age] = rank(a);
    const auto [b_paused, b_served, b_tenant, b_age] = rank(b);
    if (a_paused != b_paused) return a_paused;
    if (a_served != b_served) return a_served > b_served;
    if (a_tenant != b_tenant) return a_tenant->name < b_tenant->name;
    return a_age > b_age;
  };
  for (Sequence* sequence : active_) {
    if (sequence == oldest || !IsEvictable(*sequence) || !allowed(*sequence->request->tenant)) continue;
    if (worker.has_value() && !HoldsOn(*sequence, *worker)) continue;
    if (victim == nullptr || comes_before(*sequence, *victim)) victim = sequence;
  }
  return victim;
}

bool SchedulerCore::Impl::Grow(Sequence& sequence, Position end) {
  if (end <= sequence.reserved) return true;
  const Position target = BlocksOf(end) * kSegmentTokens;
  const Charges cost = budget_.CostOf(
      sequence.placement, {.first_block = sequence.shared_blocks, .end = target, .ctx_len = sequence.told_ctx_len});
  while (const std::optional<int> lacking = budget_.Lacking(cost, sequence.charges)) {
    Sequence* victim = PickVictim(lacking, [](const Tenant&) { return true; });
    if (victim == nullptr) {
      const bool others = std::any_of(active_.begin(), active_.end(), [&](const Sequence* other) {
        return other != &sequence && HoldsOn(*other, *lacking);
      });
      if (!others) OutgrewItsWorker(sequence, end);
      return false;  // others are in flight: when they return
    }
    Preempt(*victim);
    if (victim == &sequence) return false;
  }
  Charge(sequence, cost);
  sequence.reserved = target;
  return true;
}

// Alone on its worker, and too long for it. Where another can hold it, it begins again there from the token log.
void SchedulerCore::Impl::OutgrewItsWorker(Sequence& sequence, Position end) {
  if (OnlyAttentionWorker(sequence))
    return EndChoice(sequence, FinishReason::kError,
                     absl::UnavailableError("kv cache: the request outgrew the only attention worker that it may use"));
  if (FitsNowhere(end) && !MayFitAgain(end)) return EndChoice(sequence, FinishReason::kLength);
  Preempt(sequence);
}

void SchedulerCore::Impl::FillEntry(Sequence& sequence, const Chunk& chunk, WorkerId compute_worker,
                                    proto::StepEntry& entry, PlannedEntry& planned) {
  const GenerationRequest& params = sequence.params();
  const bool ahead = chunk.ahead;
  const Position ctx_len = chunk.ctx_len;
  const Position end = ctx_len + sequence.planned;
  entry.sequence = sequence.id;
  entry.ctx_len = ctx_len;
  entry.tokens.reserve(sequence.planned);
  for (Position at = ctx_len; at < end; ++at) entry.tokens.push_back(ahead ? proto::kDrawnBefore : sequence.token(at));
  entry.rope_length = static_cast<int32_t>(sequence.prompt_size());
  entry.sample = ahead || (end == sequence.size() && params.max_tokens > 0);
  entry.placement = sequence.placement;
  if (options_.enable_prefix_caching) {
    const int64_t named = ahead ? sequence.ctx_len / kSegmentTokens : sequence.named_blocks;  // by the step in flight
    AppendHashes(sequence, named, chunk.named_until / kSegmentTokens, entry.block_hashes);
  }
  const RequestState& request = *sequence.request;
  if (sequence.choice == 0 && ctx_len < sequence.prompt_size()) {
    const Position next = request.prompt_logprobs_next;
    if (params.prompt_logprobs >= 0 && next < sequence.prompt_size() && next <= end &&
        ctx_len + 1 < sequence.prompt_size()) {
      entry.prompt_logprobs = params.prompt_logprobs;
      entry.next_prompt_token = end < sequence.prompt_size() ? sequence.token(end) : -1;
    }
    if (params.logits_last > 0 && !request.prompt_logits_done) {
      const Position first = std::max(ctx_len, sequence.prompt_size() - params.logits_last);
      entry.logits_rows = static_cast<int32_t>(std::max<Position>(0, end - first));
    }
  }
  if (entry.sample) FillSampling(sequence, ahead, compute_worker, entry);
  const Position given_from = entry.history_given ? 0 : ctx_len;
  entry.prompt_tokens = static_cast<int32_t>(std::max<Position>(0, std::min(sequence.prompt_size(), end) - given_from));

  planned = {.sequence = &sequence,
             .id = sequence.id,
             .ctx_len = ctx_len,
             .q_len = sequence.planned,
             .logits_rows = entry.logits_rows,
             .sample = entry.sample,
             .may_follow = entry.sample && entry.logits_rows == 0 && entry.prompt_logprobs < 0 &&
                           entry.sampling.logprobs <= 0 && !entry.sampling.needs_history()};
  Sequence::RanOn(sequence.compute_workers, compute_worker);
  request.tenant->served += static_cast<uint64_t>(sequence.planned);
  ++sequence.in_flight;
  sequence.flying += sequence.planned;
  sequence.planned = 0;
}

// What `compute_worker` must be given before it can choose a token of this sequence.
size_t SchedulerCore::Impl::BytesToGive(const Sequence& sequence, WorkerId compute_worker) const {
  if (sequence.history_seen && sequence.history_worker == compute_worker) return 0;
  const proto::SharedLists& lists = sequence.request->lists;
  const bool history = sequence.params().sampling.needs_history();
  return (lists.lists != nullptr ? lists.lists->bytes() : 0) +
         (history ? static_cast<size_t>(sequence.size()) * sizeof(TokenId) : 0);
}

bool SchedulerCore::Impl::MayGive(const Sequence& sequence) {
  const size_t bytes = BytesToGive(sequence, planned_for_);
  if (bytes > given_left_ && given_left_ < kMaxBytesGiven) return false;  // in a step to come
  given_left_ -= std::min(bytes, given_left_);
  return true;
}

void SchedulerCore::Impl::FillSampling(Sequence& sequence, bool ahead, WorkerId compute_worker,
                                       proto::StepEntry& entry) {
  const GenerationRequest& params = sequence.params();
  entry.sampling = proto::WithoutLists(params.sampling);
  entry.sampling.seed += static_cast<uint64_t>(sequence.choice);
  entry.has_lists = sequence.request->lists.lists != nullptr;
  entry.ban_early = entry.has_lists && sequence.output.size() + (ahead ? sequence.in_flight : 0) < params.min_tokens;
  if (params.logits_of_output) entry.logits_rows = std::max(entry.logits_rows, 1);
  if (BytesToGive(sequence, compute_worker) == 0) return;
  if (entry.has_lists) entry.given = sequence.request->lists;
  sequence.history_seen = true;
  sequence.history_worker = compute_worker;
  if (!params.sampling.needs_history()) return;
  entry.history_given = true;
  entry.history.reserve(entry.ctx_len);
  for (Position at = 0; at < entry.ctx_len; ++at) entry.history.push_back(sequence.token(at));
}

}  // namespace dovetail::scheduler
