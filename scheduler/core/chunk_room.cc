#include "scheduler/core/chunk_room.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "scheduler/core/chunk_budget.h"

namespace dovetail::scheduler {
namespace {

bool Waits(const Sequence& sequence) {
  return sequence.phase == Phase::kReady && !sequence.request->paused && !sequence.lost;
}

// It has shown a token and waits for the next one.
bool IsStream(const Sequence& sequence) {
  return Waits(sequence) && sequence.output.size() > 0 && sequence.prefill_end() - sequence.ctx_len == 1;
}

bool IsPrompt(const Sequence& sequence) {
  return Waits(sequence) && sequence.prefill_end() - sequence.ctx_len - sequence.flying > 1;
}

}  // namespace

// Of the micro-batches in use there.
template <typename Visit>
void ChunkRoom::ForEachMember(WorkerId worker, Visit visit) const {
  for (int i = 0; i < pool_.micro_batches_in_use(); ++i) {
    if (pool_.WorkerOf(i) != worker) continue;
    for (Sequence* const sequence : batches_[i].members) visit(*sequence, i);
  }
}

bool ChunkRoom::HasStreams(WorkerId worker) const {
  bool has = false;
  ForEachMember(worker, [&](const Sequence& sequence, int) { has = has || IsStream(sequence); });
  return has;
}

double ChunkRoom::StreamSeconds(WorkerId worker) const { return HasStreams(worker) ? pool_.pace().Of(worker) : 0; }

// Steps of a worker that may have parts of prompts at a time: of micro-batches with prompts, and of prefill groups.
int ChunkRoom::PromptsIn(WorkerId worker) const {
  int steps = 0, last = -1;
  ForEachMember(worker, [&](const Sequence& sequence, int micro_batch) {
    if (micro_batch == last || !IsPrompt(sequence)) return;
    last = micro_batch;
    ++steps;
  });
  for (const MicroBatch& batch : batches_)
    if (batch.in_flight && batch.group != StepId() && batch.compute_worker == worker) ++steps;
  return steps;
}

// What the prompts of these workers need of their time, so that none takes too long.
double ChunkRoom::ShareOf(std::span<const WorkerId> workers) const {
  std::vector<PromptClaim> claims;
  for (const WorkerId worker : workers) {
    ForEachMember(worker, [&](Sequence& sequence, int) {
      if (!IsPrompt(sequence)) return;
      const double left_s =
          pool_.planner().SecondsAlone(worker, sequence.ctx_len + sequence.flying, sequence.prefill_end(),
                                       /*in_pair=*/sequence.pair == worker);
      if (left_s <= 0) return;
      if (sequence.prefill_due == absl::InfiniteFuture())
        sequence.prefill_due = turn_.now() + absl::Seconds(kPromptSlowdown * left_s);
      claims.push_back(
          {left_s / static_cast<double>(workers.size()), absl::ToDoubleSeconds(sequence.prefill_due - turn_.now())});
    });
  }
  std::sort(claims.begin(), claims.end(), [](const PromptClaim& a, const PromptClaim& b) { return a.due_s < b.due_s; });
  return ShareFor(claims);
}

double ChunkRoom::For(std::span<const WorkerId> workers, bool on_plane, bool with_streams) const {
  double room_s = std::numeric_limits<double>::infinity();
  if (!options_.prefill_itl_budget.on() || !options_.enable_chunked_prefill) return room_s;
  const std::span<const WorkerId> waiting = on_plane ? std::span<const WorkerId>(pool_.workers()) : workers;
  int steps = 0;
  for (const WorkerId worker : waiting)
    steps = on_plane ? steps + PromptsIn(worker) : std::max(steps, PromptsIn(worker));
  const double share = options_.prefill_itl_budget.automatic ? ShareOf(workers) : 0;
  for (const WorkerId worker : waiting) {
    if (!HasStreams(worker)) continue;
    const double added_s = ChunkSeconds(options_.prefill_itl_budget, pool_.pace().Of(worker), share);
    room_s = std::min(room_s, added_s / std::max(1, steps) + (with_streams ? pool_.pace().Hidden(worker) : 0));
  }
  return room_s;
}

}  // namespace dovetail::scheduler
