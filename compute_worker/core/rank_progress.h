#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

// How far a step has got that is a rank of a prefill group, in the exchange by which it sees tokens of the others.
// Values of ComputeWorkerCore, whose ring_of_step.cc, switch_of_step.cc and pass_q_of_step.cc change them.
// Threads: thread-compatible.

namespace dovetail::compute {

// Of the softmax op at hand. Bit r of a mask is K and V of rank r.
struct RingProgress {
  int op = -1;         // -1: there was none yet
  int attending = -1;  // AttendShard is under way
  uint32_t attended = 0, sent = 0;
};

// Of the softmax op at hand.
struct SwitchProgress {
  int op = -1;            // -1: there was none yet
  int attending = -1;     // AttendHeads is under way
  int attended = 0;       // tokens of so many ranks
  uint32_t returned = 0;  // bit r: rank r's outputs have come
  bool sent = false;      // the step's own q, k and v
};

// Of a step whose ranks ask each other.
struct PassQProgress {
  struct Kept {
    int op = 0;
    int place = 0;
    bool attended = false;  // for the step's own tokens
    uint32_t answered = 0;  // bit r: rank r has asked, and was answered
  };
  int op = -1;                                   // softmax op at hand; -1: there was none yet
  uint32_t returned = 0;                         // of it; bit r: what rank r gave has come
  std::vector<Kept> kept;                        // ops whose K and V later ranks will ask about, in order
  std::optional<std::pair<int, int>> attending;  // AttendQueries of this op and rank is under way
};

}  // namespace dovetail::compute
