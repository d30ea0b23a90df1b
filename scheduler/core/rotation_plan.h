#pragma once

namespace dovetail::scheduler {

// What one layer of a micro-batch's step takes, measured.
// Threads: plain values.
struct StageTimes {
  double dense_us = 0;      // the compute worker is busy with it
  double attention_us = 0;  // the attention workers are: the slowest of them
  double hop_us = 0;        // from the one to the other, one way
  bool operator==(const StageTimes&) const = default;
};

// How micro-batches rotate: while one is in dense layers another is in attention.
struct RotationPlan {
  int micro_batches = 1;
  double cycle_us = 0;    // in which each of them passes one layer
  double stagger_us = 0;  // from one micro-batch's turn to the next one's
  bool operator==(const RotationPlan&) const = default;
};

// A cycle takes max(n x busier pool, dense + attention + two hops); n is the smallest number, at most `most`, for which
// the first is not the smaller: from there on the busier pool never waits, and more would only make batches smaller.
// No step has to be told to wait for the stagger: a pool does one thing at a time, so turns spread by themselves.
// Threads: pure.
RotationPlan PlanRotation(const StageTimes& times, int most);

}  // namespace dovetail::scheduler
