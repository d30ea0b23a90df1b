#include "scheduler/core/grammar_pauses.h"

#include <algorithm>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

bool GrammarPauses::Pause(Sequence& sequence, absl::Time now) {
  sequence.grammar_asked = std::min(sequence.grammar_asked, now);
  if (now - sequence.grammar_asked >= kGrammarPatience) return false;
  sequence.grammar_pause = std::clamp(2 * sequence.grammar_pause, kGrammarPause, kLongestGrammarPause);
  sequence.not_before = now + sequence.grammar_pause;
  next_ = std::min(next_, sequence.not_before);
  return true;
}

void GrammarPauses::Forget(Sequence& sequence) {
  sequence.grammar_asked = absl::InfiniteFuture();
  sequence.grammar_pause = absl::ZeroDuration();
}

void GrammarPauses::Renew(const std::vector<Sequence*>& active, absl::Time now) {
  if (next_ > now) return;
  next_ = absl::InfiniteFuture();
  for (const Sequence* sequence : active)
    if (sequence->not_before > now) next_ = std::min(next_, sequence->not_before);
}

}  // namespace dovetail::scheduler
