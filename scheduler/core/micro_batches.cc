#include "scheduler/core/micro_batches.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

bool MicroBatch::IsAnsweredBy(const proto::StepResult& result) const {
  return std::equal(result.entries.begin(), result.entries.end(), entries.begin(), entries.end(),
                    [](const proto::EntryResult& got, const PlannedEntry& asked) { return got.sequence == asked.id; });
}

MicroBatches::MicroBatches(ComputePool& pool) : pool_(pool), batches_(kMaxMicroBatches), draining_(kMaxMicroBatches) {}

// ---- members ----

void MicroBatches::Leave(Sequence& sequence) {
  if (sequence.micro_batch < 0) return;
  MicroBatch& batch = (*this)[sequence.micro_batch];
  std::erase(batch.members, &sequence);
  if (batch.members.empty()) batch.ForgetMembersTroubles();
  sequence.micro_batch = -1;
}

bool MicroBatches::MayStepIn(const Sequence& sequence, int index) const {
  if (!pool_.MayStepIn(sequence, index)) return false;
  return !pool_.tiers_apart() || pool_.HasOneOfEach() || pool_.IsLastOfItsWorker(index) == sequence.on_slow_tier;
}

int MicroBatches::SmallestFor(const Sequence& sequence) const {
  int least = -1;
  for (int i = 0; i < pool_.micro_batches_in_use(); ++i) {
    if (!MayStepIn(sequence, i)) continue;
    if (least < 0 || (*this)[i].members.size() < (*this)[least].members.size()) least = i;
  }
  return std::max(least, 0);
}

void MicroBatches::Enlist(Sequence& sequence, int index) {
  sequence.micro_batch = index;
  auto& members = (*this)[index].members;
  members.insert(std::upper_bound(members.begin(), members.end(), &sequence,
                                  [](const Sequence* a, const Sequence* b) { return a->age() < b->age(); }),
                 &sequence);
}

void MicroBatches::EmptyUnused() {
  for (int i = pool_.micro_batches_in_use(); i < kMaxMicroBatches; ++i) {
    MicroBatch& unused = (*this)[i];
    if (unused.in_flight || unused.members.empty()) continue;
    const std::vector<Sequence*> members = std::exchange(unused.members, {});
    unused.ForgetMembersTroubles();
    for (Sequence* sequence : members) Enlist(*sequence);
  }
}

void MicroBatches::SendHome(int index) {
  const std::vector<Sequence*> members = (*this)[index].members;
  for (Sequence* sequence : members) {
    if (MayStepIn(*sequence, index)) continue;
    std::erase((*this)[index].members, sequence);
    Enlist(*sequence);
  }
}

void MicroBatches::Balance(int index) {
  auto& members = (*this)[index].members;
  for (;;) {
    int least = index;
    for (int i = 0; i < pool_.micro_batches_in_use(); ++i) {
      if (pool_.tiers_apart() && pool_.IsLastOfItsWorker(i) != pool_.IsLastOfItsWorker(index)) continue;
      if ((*this)[i].members.size() < (*this)[least].members.size()) least = i;
    }
    if (members.size() <= (*this)[least].members.size() + 1) return;
    const auto moved = std::find_if(members.rbegin(), members.rend(),
                                    [&](const Sequence* sequence) { return MayStepIn(*sequence, least); });
    if (moved == members.rend()) return;
    Sequence& sequence = **moved;
    members.erase(std::next(moved).base());
    Enlist(sequence, least);
  }
}

size_t MicroBatches::members() const {
  size_t members = 0;
  for (const MicroBatch& batch : batches_) members += batch.members.size();
  return members;
}

// ---- steps ----

StepId MicroBatches::NextStep(uint64_t count) { return StepId(std::exchange(next_step_, next_step_ + count)); }

MicroBatch* MicroBatches::InFlight(MicroBatchId id, StepId step, WorkerId compute_worker) {
  MicroBatch* const batch = id.value() < batches_.size() ? &batches_[id.value()] : nullptr;
  const bool expected =
      batch != nullptr && batch->in_flight && batch->step == step && batch->compute_worker == compute_worker;
  return expected ? batch : nullptr;
}

MicroBatch* MicroBatches::FollowerOf(const MicroBatch& batch) {
  for (MicroBatch& other : batches_)
    if (other.in_flight && other.follows != StepId() && other.follows == batch.step) return &other;
  return nullptr;
}

MicroBatch* MicroBatches::FollowedBy(const MicroBatch& batch) {
  for (MicroBatch& other : batches_)
    if (other.in_flight && batch.follows != StepId() && batch.follows == other.step) return &other;
  return nullptr;
}

bool MicroBatches::any_in_flight() const {
  return std::any_of(batches_.begin(), batches_.end(), [](const MicroBatch& batch) { return batch.in_flight; });
}

void MicroBatches::SetDeadline(MicroBatch& flight, double work, absl::Time now) {
  flight.work = work;
  double all = 0;
  for (const MicroBatch& batch : batches_)
    if (batch.in_flight && batch.compute_worker == flight.compute_worker) all += batch.work;
  flight.sent = now;
  flight.deadline = now + pool_.patience().For(flight.compute_worker, all);
}

void MicroBatches::NotePrompt(MicroBatch& flight, bool has_prompt) {
  flight.has_prompt = flight.beside_prompt = has_prompt;
  flight.chunk.others_s = 0;
  for (MicroBatch& other : batches_) {
    if (!other.in_flight || &other == &flight || other.compute_worker != flight.compute_worker) continue;
    flight.beside_prompt = flight.beside_prompt || other.has_prompt;
    other.beside_prompt = other.beside_prompt || has_prompt;
    flight.chunk.others_s += other.chunk.predicted_s;
  }
}

absl::Time MicroBatches::NextDeadline(absl::Time now) const {
  absl::Time deadline = absl::InfiniteFuture();
  for (const MicroBatch& batch : batches_) {
    if (batch.in_flight) deadline = std::min(deadline, batch.deadline);
    if (!batch.in_flight && !batch.members.empty() && batch.not_before > now)
      deadline = std::min(deadline, batch.not_before);
  }
  return deadline;
}

}  // namespace dovetail::scheduler
