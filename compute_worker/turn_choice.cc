#include "compute_worker/turn_choice.h"

#include <algorithm>
#include <bit>

namespace dovetail::compute {

TurnChoice::Key TurnChoice::KeyOf(const Load& load) {
  return {load.steps, std::bit_width(static_cast<uint64_t>(load.rows))};
}

bool TurnChoice::Takes(const Load& load) const {
  if (load.steps < 2 || policy_ == Policy::kSideBySide) return false;
  if (policy_ == Policy::kTurns) return true;
  const auto it = trials_.find(KeyOf(load));
  return it != trials_.end() && it->second.turns;
}

void TurnChoice::Note(const Load& load, bool took_turns, double ms) {
  if (load.steps < 2 || policy_ != Policy::kMeasured) return;
  Trial& trial = trials_[KeyOf(load)];
  if (took_turns != trial.turns) return;  // it began before the change
  ++trial.noted;
  if (!trial.measuring) {
    if (trial.noted < kStepsPerChoice) return;
    trial.measuring = true;
    trial.noted = load.steps;  // nothing has changed: all of them count
    trial.median[0] = trial.median[1] = 0;
    return;
  }
  if (trial.noted <= load.steps) return;
  trial.times.push_back(ms);
  if (trial.times.size() == kTrialSteps) EndMeasurement(trial);
}

void TurnChoice::EndMeasurement(Trial& trial) {
  const auto middle = trial.times.begin() + kTrialSteps / 2;
  std::nth_element(trial.times.begin(), middle, trial.times.end());
  trial.median[trial.turns ? 1 : 0] = *middle;
  trial.times.clear();
  trial.noted = 0;
  const double side_by_side = trial.median[0], in_turns = trial.median[1];
  if (side_by_side == 0 || in_turns == 0) {
    trial.turns = !trial.turns;
    return;
  }
  trial.measuring = false;
  trial.turns = in_turns < side_by_side * (1 - kWorthIt);
}

}  // namespace dovetail::compute
