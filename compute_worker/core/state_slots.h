#pragma once
#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace dovetail::compute {

// Which slots of the compute worker's memory hold the linear states of prompts that it computes, so that the next part
// of a prompt goes on from them. A cache: a state that is in no slot is asked for. Touches no byte of a state.
//   Threads: thread-compatible
class StateSlots {
 public:
  static constexpr int kNone = -1;

  explicit StateSlots(int slots) : slots_(slots) {}

  // The slot that holds the state of a sequence before the token at `position`, or kNone.
  int Find(SequenceId sequence, Position position) const;
  // A step of the sequence begins, which reads the slot that Find gave and leaves a state there. It gets the sequence's
  // slot, or the one used longest ago in which no step is; kNone: there is none.
  int Begin(SequenceId sequence);
  // Of a step that went well, the slot holds the state before `end`. Otherwise, or if `last`, nothing of the sequence.
  void End(SequenceId sequence, bool went_well, bool last, Position end);
  void Drop(SequenceId sequence) { End(sequence, /*went_well=*/false, /*last=*/true, 0); }

 private:
  struct Slot {
    SequenceId sequence;
    bool taken = false;
    bool in_step = false;
    Position end = kNowhere;
    uint64_t used = 0;
  };
  static constexpr Position kNowhere = -1;

  std::vector<Slot> slots_;
  uint64_t uses_ = 0;
};

}  // namespace dovetail::compute
