#include "compute_worker/core/state_slots.h"

#include <algorithm>

namespace dovetail::compute {

int StateSlots::Find(SequenceId sequence, Position position) const {
  for (size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].taken && slots_[i].sequence == sequence && slots_[i].end == position) return static_cast<int>(i);
  return kNone;
}

int StateSlots::Begin(SequenceId sequence) {
  int best = kNone;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.taken && slot.sequence == sequence) {
      best = static_cast<int>(i);
      break;
    }
    if (slot.in_step) continue;
    const bool better = best == kNone || (slots_[best].taken && (!slot.taken || slot.used < slots_[best].used));
    if (better) best = static_cast<int>(i);
  }
  if (best == kNone) return kNone;
  slots_[best] = {.sequence = sequence, .taken = true, .in_step = true, .end = kNowhere, .used = ++uses_};
  return best;
}

void StateSlots::End(SequenceId sequence, bool went_well, bool last, Position end) {
  const auto slot =
      std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.taken && s.sequence == sequence; });
  if (slot == slots_.end()) return;
  if (!went_well || last) {
    *slot = Slot();
    return;
  }
  slot->in_step = false;
  slot->end = end;
}

}  // namespace dovetail::compute
