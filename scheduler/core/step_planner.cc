#include "scheduler/core/step_planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "proto/drawn_token.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {
namespace {

bool MayFollow(const MicroBatch& batch) {
  return std::all_of(batch.entries.begin(), batch.entries.end(), [](const PlannedEntry& e) { return e.may_follow; });
}

// One that is in the step in flight, and is not known to end with it.
bool MayGoAhead(const Sequence& sequence, int max_model_len) {
  return sequence.phase == Phase::kReady && sequence.in_flight == 1 && !sequence.lost && !sequence.request->paused &&
         !sequence.awaits_forks && sequence.ctx_len + sequence.flying == sequence.size() &&
         sequence.output.size() + 1 < sequence.params().max_tokens && sequence.size() + 1 < max_model_len;
}

}  // namespace

void StepPlanner::Plan(bool requests_wait) {
  if (pool_.empty()) return;
  PartTiers();
  batches_.EmptyUnused();
  SendToPairs();
  if (IsOnePair()) return PlanAhead(0, 1);
  // The one that has waited longest first, so that no micro-batch always finds the KV taken.
  idle_.clear();
  groups_.Plan(requests_wait);
  const int workers = static_cast<int>(pool_.workers().size());
  for (int i = 0; i < pool_.micro_batches_in_use(); ++i)
    if (RunsAhead(i, i + workers)) {
      PlanAhead(i, i + workers);
    } else if (batches_[i].MayBePlanned(turn_.now())) {
      idle_.push_back(i);
    }
  std::sort(idle_.begin(), idle_.end(),
            [&](int a, int b) { return std::make_pair(batches_[a].step, a) < std::make_pair(batches_[b].step, b); });
  for (const int index : idle_) PlanStep(index, index, nullptr);
}

// A step takes as long as its slowest attention worker, so sequences on a slower tier have steps of their own.
void StepPlanner::PartTiers() {
  if (options_.placement != PlacementPolicy::kTiers) return;
  const std::vector<int> tiers = TiersOf(accounts_.budget().workers());
  const auto is_slow = [&](const Charge& charge) { return tiers[static_cast<size_t>(charge.worker)] > 0; };
  bool any_fast = false, any_slow = false;
  for (MicroBatch& batch : batches_)
    for (Sequence* sequence : batch.members) {
      const Charges& own = sequence->charges;
      const Charges& shared = sequence->request->shared.charges;
      sequence->on_slow_tier =
          std::any_of(own.begin(), own.end(), is_slow) || std::any_of(shared.begin(), shared.end(), is_slow);
      (sequence->on_slow_tier ? any_slow : any_fast) = true;
    }
  batches_.PartTiers(any_fast && any_slow);
}

// Before any step is planned: a micro-batch that has been passed over is looked at again when a step ends.
void StepPlanner::SendToPairs() {
  const std::vector<KvBudget::Worker>& workers = accounts_.budget().workers();
  const auto in_pair = [](const KvBudget::Worker& worker) { return worker.pair.has_value(); };
  const bool any = std::any_of(workers.begin(), workers.end(), in_pair);
  if (!std::exchange(had_pairs_, any) && !any) return;
  for (MicroBatch& batch : batches_)
    for (Sequence* sequence : batch.members) {
      const WorkerId first = sequence->placement.front().worker;
      const auto there = [&](const proto::Shard& shard) { return shard.worker == first; };
      const bool whole = std::all_of(sequence->placement.begin(), sequence->placement.end(), there);
      const std::optional<int> index = whole ? accounts_.budget().IndexOf(first) : std::nullopt;
      sequence->pair = index ? workers[static_cast<size_t>(*index)].pair : std::nullopt;
    }
  for (int i = 0; i < pool_.micro_batches_in_use(); ++i) batches_.SendHome(i);
}

// All that there is: one compute worker, and the attention worker of its pair.
bool StepPlanner::IsOnePair() const {
  const std::vector<KvBudget::Worker>& attention = accounts_.budget().workers();
  return options_.run_ahead && pool_.workers().size() == 1 && attention.size() == 1 &&
         attention.front().pair == pool_.workers().front();
}

// Of several pairs: a step of a micro-batch may follow another if all members lie on the attention worker of its pair.
// Steps of others cross through the hosts, and tokens that were drawn before are not there.
bool StepPlanner::MayRunAhead(int index) const {
  if (IsOnePair()) return true;
  const MicroBatch& home = batches_[index];
  const WorkerId worker = pool_.WorkerOf(index);
  return home.failed_attempts == 0 &&
         std::all_of(home.members.begin(), home.members.end(), [&](const auto* one) { return one->pair == worker; });
}

bool StepPlanner::RunsAhead(int first, int second) const {
  if (!options_.run_ahead || second >= kMaxMicroBatches) return false;
  if (pool_.micro_batches_in_use() != static_cast<int>(pool_.workers().size())) return false;
  if (batches_[first].group != StepId() || batches_[second].group != StepId()) return false;
  return batches_[second].in_flight || MayRunAhead(first);
}

// It ends with a draw for each of its entries, and the compute worker takes the next step as the one behind it.
bool StepPlanner::MayBeFollowed(const MicroBatch& flight, int home) const {
  return flight.home == home && batches_.IsNewest(flight) && !batches_.draining(home) && MayFollow(flight) &&
         MayRunAhead(home);
}

// Two steps of one set of sequences are in flight, in two slots that take turns, as long as the one that was planned
// last may be followed.
void StepPlanner::PlanAhead(int first, int second) {
  const MicroBatch& home = batches_[first];
  while (!home.held && home.not_before <= turn_.now()) {
    const bool one = batches_[first].in_flight, other = batches_[second].in_flight;
    if (one && other) return;
    const MicroBatch* after = one ? &batches_[first] : other ? &batches_[second] : nullptr;
    if (after == nullptr) batches_.EndDrain(first);
    if (after != nullptr && !MayBeFollowed(*after, first)) return;
    if (!PlanStep(first, one ? second : first, after)) return;
  }
}

// Of the members of `index`, to be in flight as `slot`; `after` is their step in flight, if there is one. Returns
// false if none of them may step.
bool StepPlanner::PlanStep(int index, int slot, const MicroBatch* after) {
  batches_.SendHome(index);
  batches_.Balance(index);
  MicroBatch& batch = batches_[index];
  if (batch.members.empty()) return false;
  chosen_.clear();
  writer_.Begin(pool_.WorkerOf(index, batch.failed_attempts));
  int budget = options_.max_num_batched_tokens;
  batch.prefill_only_last = !options_.enable_chunked_prefill && !batch.prefill_only_last && LongestWaitsForRoom(batch);
  if (!batch.prefill_only_last) ChooseDecodes(batch, after, budget);
  chunks_ = {.room_s = std::numeric_limits<double>::infinity()};
  ChoosePrefills(batch, budget);
  if (chosen_.empty()) return false;

  MicroBatch& flight = batches_[slot];
  flight.in_flight = true;
  flight.unreadable = false;
  flight.home = index;
  flight.step = batches_.NextStep();
  flight.compute_worker = writer_.compute_worker();
  batches_.NoteSent(flight);
  RunStep run{.compute_worker = flight.compute_worker,
              .plan = {.step = flight.step, .micro_batch = MicroBatchId(static_cast<uint16_t>(slot)), .entries = {}}};
  WriteEntries(flight, run.plan);
  double work = 0;
  for (const PlannedEntry& entry : flight.entries) work += StepPatience::WorkOf(entry.ctx_len, entry.q_len);
  batches_.SetDeadline(flight, work, turn_.now());
  flight.follows = after != nullptr && proto::FollowsAnother(run.plan) ? after->step : StepId();
  turn_.Act(std::move(run));
  return true;
}

// Of the chosen sequences, and what is predicted of their prompts.
void StepPlanner::WriteEntries(MicroBatch& flight, proto::StepPlan& plan) {
  flight.entries.resize(chosen_.size());
  plan.entries.resize(chosen_.size());
  flight.forecast = {};
  flight.chunk = {.shortened = chunks_.shortened};
  shortened_chunks_ += chunks_.shortened;
  int prompts = 0;
  bool has_prompt = false;
  for (size_t i = 0; i < chosen_.size(); ++i) {
    Sequence& sequence = *chosen_[i];
    has_prompt = has_prompt || sequence.planned > 1;
    const Position ctx_len = sequence.ctx_len + sequence.flying;
    const PrefillForecast forecast = ForecastOf(sequence, ctx_len, flight.compute_worker);
    flight.chunk.predicted_s += forecast.predicted_s;
    if (forecast.ranks > 0 && ++prompts == 1) {
      flight.forecast = forecast;
      flight.chunk.by = forecast.way();
    }
    writer_.Write(
        sequence,
        {.ctx_len = ctx_len, .named_until = ctx_len, .ahead = sequence.in_flight > 0, .exchange = forecast.exchange},
        plan.entries[i], flight.entries[i]);
  }
  if (prompts > 1) flight.forecast = {};
  if (has_prompt) flight.chunk.streams_s = room_.StreamSeconds(flight.compute_worker);
  batches_.NotePrompt(flight, has_prompt);
}

// How a step sees the earlier tokens of a prompt, and how long that takes.
PrefillForecast StepPlanner::Predicted(const Sequence& sequence, Position ctx_len, WorkerId compute_worker,
                                       int tokens) const {
  const auto attention_workers = AttentionWorkersOf(sequence.placement);
  PromptToPlan prompt{ctx_len, sequence.prefill_end(), attention_workers};
  prompt.pair = sequence.pair;
  return pool_.planner().ChooseExchange(prompt, {compute_worker, sequence.KeptBy(compute_worker)}, tokens);
}

// Of what is planned, and what its compute worker has after it. No ranks: it is no prompt.
PrefillForecast StepPlanner::ForecastOf(Sequence& sequence, Position ctx_len, WorkerId compute_worker) const {
  if (sequence.planned < kLeastPlannedPrompt) return {};
  const auto attention_workers = AttentionWorkersOf(sequence.placement);
  PromptToPlan prompt{ctx_len, sequence.prefill_end(), attention_workers};
  prompt.pair = sequence.pair;
  const FreeRank rank{compute_worker, sequence.KeptBy(compute_worker)};
  const PrefillForecast forecast = Predicted(sequence, ctx_len, compute_worker, sequence.planned);
  sequence.NoteKept(
      compute_worker,
      pool_.planner().HeldAfter(prompt, rank, {ctx_len, ctx_len, ctx_len + sequence.planned}, forecast.exchange));
  return forecast;
}

// Without chunking: does the oldest prompt need more of the step than the decodes leave?
bool StepPlanner::LongestWaitsForRoom(const MicroBatch& batch) const {
  Position decodes = 0;
  const Sequence* oldest = nullptr;
  for (const Sequence* sequence : batch.members) {
    if (!sequence->MayStep(turn_.now())) continue;
    if (sequence->prefill_end() - sequence->ctx_len == 1) {
      ++decodes;
    } else if (oldest == nullptr) {
      oldest = sequence;
    }
  }
  return oldest != nullptr && decodes + oldest->prefill_end() - oldest->ctx_len > options_.max_num_batched_tokens;
}

void StepPlanner::ChooseDecodes(MicroBatch& batch, const MicroBatch* after, int& budget) {
  scratch_.assign(batch.members.begin(), batch.members.end());  // growing one may preempt another
  followed_.clear();
  if (after != nullptr)
    for (const PlannedEntry& entry : after->entries) followed_.push_back(entry.sequence);
  std::sort(followed_.begin(), followed_.end());
  const int index = batches_.IndexOf(batch);
  for (Sequence* sequence : scratch_) {
    if (budget == 0) return;
    if (sequence->micro_batch != index) continue;
    const bool follows = std::binary_search(followed_.begin(), followed_.end(), sequence);
    if (follows && MayGoAhead(*sequence, options_.max_model_len)) {
      if (!writer_.MayGive(*sequence)) continue;
      if (!growth_.GrowAhead(*sequence)) {
        batches_.Drain(index);
        continue;
      }
    } else {
      if (!sequence->MayStep(turn_.now()) || sequence->prefill_end() - sequence->ctx_len != 1 ||
          !writer_.MayGive(*sequence))
        continue;
      if (!growth_.Grow(*sequence, sequence->ctx_len + 1)) {
        batches_.Drain(index);  // others may have to give way, once they are in no step
        continue;
      }
    }
    sequence->planned = 1;
    chosen_.push_back(sequence);
    --budget;
  }
}

void StepPlanner::GivePrefill(Sequence& sequence, int most, int& budget) {
  const Position left = sequence.prefill_end() - sequence.ctx_len - sequence.planned;
  Position given = std::min<Position>(left, most);
  if (!options_.enable_chunked_prefill && given < left) return;
  if (given <= 0 || (sequence.planned == 0 && !writer_.MayGive(sequence))) return;
  if (std::isfinite(chunks_.room_s)) given = Shortened(sequence, given);
  if (given == 0) return;
  chunks_.any = true;
  if (sequence.planned == 0) chosen_.push_back(&sequence);
  sequence.planned += static_cast<int>(given);
  budget -= static_cast<int>(given);
}

double StepPlanner::SecondsOf(const Sequence& sequence, Position tokens) const {
  if (tokens == 0) return 0;
  return Predicted(sequence, sequence.ctx_len, writer_.compute_worker(), static_cast<int>(tokens)).predicted_s;
}

// Attention workers need most of the time of its next part.
bool StepPlanner::IsOnPlane(const Sequence& sequence) const {
  const Position left = std::min<Position>(sequence.prefill_end() - sequence.ctx_len, kLeastChunk);
  const PrefillBound bound =
      Predicted(sequence, sequence.ctx_len, writer_.compute_worker(), static_cast<int>(left)).bound;
  return bound == PrefillBound::kPlane || bound == PrefillBound::kLink;
}

// Of `most` more tokens, those that streams can bear, by chunk_budget.h.
Position StepPlanner::Shortened(const Sequence& sequence, Position most) {
  const Position planned = sequence.planned;
  const double planned_s = SecondsOf(sequence, planned);
  ChunkLimits limits{.ctx_len = sequence.ctx_len,
                     .left = sequence.prefill_end() - sequence.ctx_len,
                     .most = planned + most,
                     .least = chunks_.any ? 0 : kLeastChunk,
                     .seconds = planned_s + std::min(chunks_.part_s, chunks_.room_s)};
  const double most_s = SecondsOf(sequence, planned + most);
  if (most_s == 0) limits.most = std::min(limits.most, std::max(planned, kChunkBeforeRates));
  const Position all =
      std::max(planned, ChunkTokens(limits, [&](Position tokens) { return SecondsOf(sequence, tokens); }));
  if (all < planned + most && (most_s > limits.seconds || most_s == 0)) chunks_.shortened = true;
  const double used_s = SecondsOf(sequence, all) - planned_s;
  chunks_.room_s = std::max(0.0, chunks_.room_s - used_s);
  chunks_.part_s = std::max(0.0, chunks_.part_s - used_s);
  return all - planned;
}

void StepPlanner::ChoosePrefills(MicroBatch& batch, int& budget) {
  scratch_.clear();
  for (Sequence* sequence : batch.members) {
    if (sequence->planned == 0 && sequence->MayStep(turn_.now()) && sequence->prefill_end() - sequence->ctx_len > 1) {
      scratch_.push_back(sequence);
    }
  }
  if (scratch_.empty() || budget == 0) return;
  const WorkerId worker = writer_.compute_worker();
  if (options_.prefill_itl_budget.on()) chunks_.room_s = room_.For({&worker, 1}, IsOnPlane(*scratch_.front()), true);
  // By tenant, the least served first; the oldest first within one, as members are.
  std::stable_sort(scratch_.begin(), scratch_.end(), [](const Sequence* a, const Sequence* b) {
    const Tenant& x = *a->request->tenant;
    const Tenant& y = *b->request->tenant;
    return &x != &y && std::tie(x.served, x.name) < std::tie(y.served, y.name);
  });
  int tenants = 1;
  for (size_t i = 1; i < scratch_.size(); ++i)
    tenants += scratch_[i]->request->tenant != scratch_[i - 1]->request->tenant;
  const double part_s = chunks_.room_s / tenants;
  const int share = std::max(1, budget / tenants);
  for (size_t i = 0; i < scratch_.size() && options_.enable_chunked_prefill && tenants > 1;) {
    chunks_.part_s = part_s;
    int part = share;
    const Tenant* tenant = scratch_[i]->request->tenant;
    for (; i < scratch_.size() && scratch_[i]->request->tenant == tenant; ++i) {
      const int before = budget;
      GivePrefill(*scratch_[i], std::min(part, budget), budget);
      part -= before - budget;
    }
  }
  chunks_.part_s = chunks_.room_s;
  // What no tenant's part used up, or is lost to whole segments: to the least served.
  for (Sequence* sequence : scratch_) GivePrefill(*sequence, budget, budget);
}

}  // namespace dovetail::scheduler
