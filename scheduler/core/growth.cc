#include "scheduler/core/growth.h"

#include <algorithm>

namespace dovetail::scheduler {

bool Growth::Grow(Sequence& sequence, Position end) {
  while (const std::optional<int> lacking = accounts_.Reserve(sequence, end)) {
    Sequence* victim = slots_.PickVictim(lacking, [](const Tenant&) { return true; });
    if (victim == nullptr) {
      const bool others = std::any_of(slots_.active().begin(), slots_.active().end(), [&](const Sequence* other) {
        return other != &sequence && KvAccounts::HoldsOn(*other, *lacking);
      });
      if (!others) OutgrewItsWorker(sequence, end);
      return false;  // others are in flight: when they return
    }
    if (tiering_.MakesRoom(*victim, *lacking)) return false;
    choices_.Preempt(*victim);
    if (victim == &sequence) return false;
  }
  return true;
}

bool Growth::GrowAhead(Sequence& sequence) {
  return !accounts_.Reserve(sequence, sequence.ctx_len + sequence.flying + 1).has_value();
}

// Alone on its worker, and too long for it. Where another can hold it, it begins again there from the token log.
void Growth::OutgrewItsWorker(Sequence& sequence, Position end) {
  if (placer_.OnlyAttentionWorker(sequence))
    return choices_.End(
        sequence, FinishReason::kError,
        absl::UnavailableError("kv cache: the request outgrew the only attention worker that it may use"));
  if (placer_.FitsNowhere(end) && !stranded_.MayFitAgain(end, turn_.now()))
    return choices_.End(sequence, FinishReason::kLength);
  choices_.Preempt(sequence);
}

}  // namespace dovetail::scheduler
