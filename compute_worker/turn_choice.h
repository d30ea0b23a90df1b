#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace dovetail::compute {

// Whether steps of several micro-batches that share a GPU take turns in its dense layers, or run side by side there.
// Side by side they may find each other's weights in the cache, or take the machine from each other: which of the two
// depends on GPU, model, rows and on how long attention takes, so it is measured. For each load some steps run side by
// side, some take turns, and whichever took a step less time goes on until both are measured again. All steps under way
// go by the same load, so they agree.
// Threads: thread-compatible; deterministic.
class TurnChoice {
 public:
  enum class Policy { kMeasured, kSideBySide, kTurns };

  // Of the GPU when a step begins: the steps under way and their rows, this one's among them.
  struct Load {
    int steps = 1;
    int64_t rows = 0;
  };

  static constexpr int kTrialSteps = 7;         // whose median counts
  static constexpr int kStepsPerChoice = 1000;  // after which it is measured again
  static constexpr double kWorthIt = 0.01;      // of a step's time, for which turns are taken

  // kMeasured unless set.
  void Set(Policy policy) { policy_ = policy; }

  // For a step that begins; false where it is alone.
  bool Takes(const Load& load) const;

  // A step that began under `load` has ended well, `ms` after it began, waiting included; `took_turns` is what Takes
  // said. The first ones after a change ran together with steps of the other kind and do not count.
  void Note(const Load& load, bool took_turns, double ms);

 private:
  // Of one number of steps and about as many rows.
  struct Trial {
    bool turns = false;
    bool measuring = true;
    int noted = 0;              // since the last change
    std::vector<double> times;  // of the measurement
    double median[2] = {};      // side by side, in turns; 0: still to be measured
  };
  using Key = std::pair<int, int>;
  static Key KeyOf(const Load& load);
  static void EndMeasurement(Trial& trial);

  Policy policy_ = Policy::kMeasured;
  std::map<Key, Trial> trials_;
};

}  // namespace dovetail::compute
