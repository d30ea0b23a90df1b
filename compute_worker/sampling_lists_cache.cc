#include "compute_worker/sampling_lists_cache.h"

namespace dovetail::compute {

absl::Status SamplingListsCache::Complete(proto::StepPlan& plan) {
  for (proto::StepEntry& entry : plan.entries) {
    if (!entry.has_lists) continue;
    if (entry.given.lists != nullptr) {
      Keep(entry.sequence, entry.given);
      continue;
    }
    const auto kept = kept_.find(entry.sequence);
    if (kept == kept_.end())
      return NotFound("sequence ", entry.sequence.value(), ": the lists of its sampling are not known here");
    used_.splice(used_.begin(), used_, kept->second.used);
    entry.given = kept->second.lists;
  }
  return absl::OkStatus();
}

void SamplingListsCache::Keep(SequenceId sequence, const proto::SharedLists& lists) {
  Drop(sequence);
  used_.push_front(sequence);
  kept_[sequence] = {lists, used_.begin()};
  bytes_ += lists.lists->bytes();
  while (bytes_ > max_bytes_) Drop(used_.back());
}

void SamplingListsCache::Drop(SequenceId sequence) {
  const auto kept = kept_.find(sequence);
  if (kept == kept_.end()) return;
  bytes_ -= kept->second.lists.lists->bytes();
  used_.erase(kept->second.used);
  kept_.erase(kept);
}

}  // namespace dovetail::compute
