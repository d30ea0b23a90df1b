#pragma once
#include <map>
#include <span>

#include "absl/functional/function_ref.h"
#include "base/ids.h"
#include "scheduler/core/rate_estimator.h"

// How much of a prompt may be in a step for which running streams wait, so that their next tokens come soon (ADR 61).
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

// How long a stream waits for its next token while no prompt is read, and how much of a prompt hides behind that: of
// each compute worker, from its last steps.
//   Model: a step with `s` seconds of prompts takes pace + max(0, s - hidden). What a few rows cost hides where a step
//          of decodes waits for memory: the weights are read for both.
class StreamPace {
 public:
  // A step of decodes alone took so long, and nothing of a prompt was under way there.
  void Note(WorkerId worker, double seconds) { workers_[worker].steps.Note(1, seconds); }
  // Prompts of so many seconds, as predicted, made a step longer by `added_s` than Of(worker).
  void NoteAdded(WorkerId worker, double prompts_s, double added_s);
  void Forget(WorkerId worker) { workers_.erase(worker); }
  // Seconds; 0: not known.
  double Of(WorkerId worker) const;
  // Seconds, 0 to Of(worker).
  double Hidden(WorkerId worker) const;

 private:
  struct Worker {
    RateEstimator steps, hidden;
  };
  std::map<WorkerId, Worker> workers_;
};

}  // namespace dovetail::scheduler
