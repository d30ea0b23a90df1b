#pragma once
#include <cstdint>
#include <vector>

#include "scheduler/core/rotation_plan.h"

namespace dovetail::scheduler {

// How many micro-batches a compute worker has under way: what PlanRotation asks for from smoothed times, one step at a
// time, unless a token took longer when that was tried. The plan takes it that the halves of a batch take half as long,
// which holds where a pool computes, and not where it reads weights that are as many for each half.
// Threads: thread-compatible; deterministic.
class Rotation {
 public:
  // At most `most` micro-batches; begins with one.
  explicit Rotation(int most) : most_(most), trials_(most + 1) {}

  struct Step {
    StageTimes layer;      // of one layer
    double total_us = 0;   // from its beginning to its end, together with other steps
    bool decodes = false;  // none of its sequences reads a prompt
    double sequences = 0;  // of all micro-batches of the compute worker
  };
  // Of a step that ended: its times alone.
  void Smooth(const StageTimes& layer);
  // And whether another number is to be had. Every kStepsPerRotation of them the number may change.
  void Note(const Step& step);

  int micro_batches() const { return micro_batches_; }
  const StageTimes& times() const { return times_; }  // smoothed

 private:
  struct Trial {
    double us_per_token = 0;  // 0: none
    double sequences = 0;     // of all micro-batches
    int64_t period = 0;       // when
  };
  void EndPeriod();
  // A trial under about the same load, not long ago.
  bool Compares(const Trial& trial, const Trial& now) const;
  int Best(const Trial& now) const;

  const int most_;
  int micro_batches_ = 1;
  StageTimes times_;
  std::vector<Trial> trials_;  // by number of micro-batches
  int64_t periods_ = 0;
  int steps_ = 0, decoding_steps_ = 0;       // of the period
  double us_per_token_ = 0, sequences_ = 0;  // summed over decoding_steps_
};

}  // namespace dovetail::scheduler
