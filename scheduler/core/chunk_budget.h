#pragma once
#include <array>
#include <map>
#include <span>

#include "absl/functional/function_ref.h"
#include "base/ids.h"
#include "scheduler/core/rate_estimator.h"

// How much of a prompt may be in a step for which running streams wait, so that their next tokens come soon (ADR 61),
// and how often such a step may come (ADR 73).
// No clock, and no allocation except StreamPace's; deterministic.
// Threads: plain values and pure functions.

namespace dovetail::scheduler {

// --prefill-itl-budget: how long a stream may wait for its next token while prompts are read.
struct ItlBudget {
  bool automatic = false;  // kItlGrowth times as long as without prompts, as long as prompts keep to kPromptSlowdown
  double seconds = 0;      // else so long; 0: no budget

  bool on() const { return automatic || seconds > 0; }
  bool operator==(const ItlBudget&) const = default;
};

inline constexpr double kItlGrowth = 1.4;
// With an automatic budget a prompt takes at most so many times as long as the compute worker needs for it alone, as
// far as that can be: streams wait longer where prompts come too fast for both.
inline constexpr double kPromptSlowdown = 8;

// A prompt that is being read: how long the compute worker needs for what is left of it, and how long it has for that.
struct PromptClaim {
  double left_s = 0;
  double due_s = 0;  // <= 0: it is overdue
};

// The share of the compute worker's time that prompts need so that each is read in time, one after the other.
//   claims:  the one that is due first comes first
//   Result:  0 or more; from 1 on they cannot all be in time
double ShareFor(std::span<const PromptClaim> claims);

// Seconds that the parts of prompts in a step may add to the time between two tokens of a stream.
//   itl_s:         that time without prompts; 0: not known
//   prompt_share:  ShareFor what waits
//   Result:        0 or more; infinity: there is no bound
double ChunkSeconds(const ItlBudget& budget, double itl_s, double prompt_share);

// The parts of prompts in a step, where a step that has any takes `step_s` longer, however little it has (ADR 73): what
// that leaves of `bear_s`, and at least half of `step_s`. With less, most of the time for which streams wait would be
// spent on nothing.
double PartSeconds(double bear_s, double step_s);

// How long streams may wait for a step with parts of prompts. Seconds.
struct ChunkTime {
  double parts_s = 0;  // for the parts; infinity: there is no bound
  double bear_s = 0;   // that streams may wait longer for a token, on average
  double step_s = 0;   // for which they wait longer in a step that has any part
  // The fixed cost alone is more than they are to bear, so that steps without prompts must come between.
  bool takes_turns() const { return step_s > bear_s; }
};

// A prompt's part in a step.
// Units: tokens; seconds where the name says so.
struct ChunkLimits {
  Position ctx_len = 0;  // where it begins
  Position left = 0;     // of the prompt, from there on
  Position most = 0;     // that the step has room for
  Position least = 0;    // that it gets even if that takes too long
  double seconds = 0;    // that it may take
};

// The largest part that keeps to the limits. It ends on a multiple of 64, or with the prompt; where the step has no
// room for as much as that, it is what there is room for.
//   seconds_of:  predicted for so many tokens, not falling; of no more than min(left, most)
//   Result:      0..min(left, most); 0: it may not have any
Position ChunkTokens(const ChunkLimits& limits, absl::FunctionRef<double(Position)> seconds_of);

// How long a stream waits for its next token while no prompt is read, how much of a prompt hides behind that, and how
// much longer a step takes because it has a prompt: of each compute worker, from its last steps.
//   Model: a step with `s` seconds of prompts takes pace + max(0, s - hidden), or pace + step + s. What a few rows cost
//          hides where a step of decodes waits for memory: the weights are read for both. A step with a prompt may
//          also lack what makes steps of decodes fast, however few tokens it has.
//   Source: a line through the last steps with few tokens of prompts; its slope is the median of those between two
//          steps that differ enough (Theil 1950, Sen 1968), and what the planner predicts where they do not.
class StreamPace {
 public:
  // A step of decodes alone took so long, and nothing of a prompt was under way there.
  void Note(WorkerId worker, double seconds) { workers_[worker].steps.Note(1, seconds); }
  // Prompts of so many seconds, as predicted, made a step longer by `added_s` than Of(worker). `correction` is in the
  // prediction: it is as many times what rates say.
  void NoteAdded(WorkerId worker, double prompts_s, double added_s, double correction = 1);
  void Forget(WorkerId worker) { workers_.erase(worker); }
  // Seconds; 0: not known.
  double Of(WorkerId worker) const;
  // Seconds, 0 to Of(worker).
  double Hidden(WorkerId worker) const;
  // Seconds, 0 or more; 0 until it is known.
  double StepSeconds(WorkerId worker) const;
  // Of what a step took longer than its prompts' prediction, what that says nothing about: StepSeconds, and all of it
  // until that is known.
  double Unexplained(WorkerId worker, double prompts_s, double added_s) const;

  // Whether the next step with streams may have parts of prompts. What earlier ones took longer than streams are to
  // bear on average is paid back by steps without, at most kMostSkipped in a row.
  bool TakesPrompts(WorkerId worker, const ChunkTime& time);
  // It has some, of so many seconds.
  void TookPrompts(WorkerId worker, const ChunkTime& time, double prompts_s);
  static constexpr int kMostSkipped = 8;

 private:
  static constexpr size_t kKept = 15, kLeastKnown = 3;
  struct Step {
    double uncorrected_s = 0, added_s = 0;
  };
  struct Worker {
    RateEstimator steps, hidden;
    std::array<Step, kKept> with_prompts{};
    size_t count = 0;
    double correction = 1;  // of the last of them
    double owed_s = 0;

    size_t known() const { return count < kKept ? count : kKept; }
    double Slope() const;
  };
  std::map<WorkerId, Worker> workers_;
};

}  // namespace dovetail::scheduler
