#include "scheduler/core/replacement_wait.h"

#include <algorithm>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

void ReplacementWait::NoteLoss(Position longest, absl::Time now) {
  longest_before_ = now < lost_at_ + kReplacementPatience ? std::max(longest_before_, longest) : longest;
  lost_at_ = now;
}

bool ReplacementWait::MayFitAgain(Position tokens, absl::Time now) const {
  return now < lost_at_ + kReplacementPatience && tokens <= longest_before_;
}

void ReplacementWait::Add(Sequence& sequence, absl::Time now) {
  if (sequence.stranded_until == absl::InfiniteFuture()) sequence.stranded_until = now + kReplacementPatience;
  if (!Holds(sequence)) waiting_.push_back(&sequence);
}

std::vector<Sequence*> ReplacementWait::Expired(absl::Time now) const {
  std::vector<Sequence*> expired;
  for (Sequence* sequence : waiting_)
    if (sequence->stranded_until <= now) expired.push_back(sequence);
  return expired;
}

absl::Time ReplacementWait::NextDeadline() const {
  absl::Time deadline = absl::InfiniteFuture();
  for (const Sequence* sequence : waiting_) deadline = std::min(deadline, sequence->stranded_until);
  return deadline;
}

}  // namespace dovetail::scheduler
