#include "scheduler/core/rotation.h"

#include <algorithm>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {
namespace {

constexpr int kStepsToSettle = kStepsPerRotation / 4;  // of a period, with another number than before
constexpr double kWorthIt = 0.02;                      // of a token's time
constexpr double kSameLoad = 1.25;
constexpr int64_t kPeriodsRemembered = 64;

}  // namespace

void Rotation::Note(const Step& step) {
  Smooth(step.layer);
  ++steps_;
  if (step.decodes && step.sequences > 0 && steps_ > kStepsToSettle) {
    ++decoding_steps_;
    us_per_token_ += step.total_us / step.sequences;
    sequences_ += step.sequences;
  }
  if (steps_ >= kStepsPerRotation) EndPeriod();
}

void Rotation::Smooth(const StageTimes& layer) {
  const double weight = times_ == StageTimes{} ? 1 : kStageTimesWeight;
  const auto smooth = [&](double& value, double measured) { value += weight * (measured - value); };
  smooth(times_.dense_us, layer.dense_us);
  smooth(times_.attention_us, layer.attention_us);
  // With several micro-batches an answer also waits until the compute worker looks.
  if (micro_batches_ == 1 || layer.hop_us < times_.hop_us) smooth(times_.hop_us, layer.hop_us);
}

bool Rotation::Compares(const Trial& trial, const Trial& now) const {
  return trial.us_per_token > 0 && now.us_per_token > 0 && periods_ - trial.period <= kPeriodsRemembered &&
         trial.sequences <= kSameLoad * now.sequences && now.sequences <= kSameLoad * trial.sequences;
}

int Rotation::Best(const Trial& now) const {
  int best = micro_batches_;
  double least = now.us_per_token * (1 - kWorthIt);
  for (int n = 1; n <= most_; ++n)
    if (n != micro_batches_ && Compares(trials_[n], now) && trials_[n].us_per_token < least)
      best = n, least = trials_[n].us_per_token;
  return best;
}

void Rotation::EndPeriod() {
  ++periods_;
  Trial now;
  if (decoding_steps_ > 0) {
    now = {us_per_token_ / decoding_steps_, sequences_ / decoding_steps_, periods_};
    trials_[micro_batches_] = now;
  }
  steps_ = decoding_steps_ = 0;
  us_per_token_ = sequences_ = 0;
  if (const int best = Best(now); best != micro_batches_) {
    micro_batches_ = best;
    return;
  }
  const int wanted = PlanRotation(times_, most_).micro_batches;
  const int next = micro_batches_ + (wanted > micro_batches_ ? 1 : wanted < micro_batches_ ? -1 : 0);
  if (next != micro_batches_ && !Compares(trials_[next], now)) {
    micro_batches_ = next;  // nothing speaks against it
  } else if (micro_batches_ > 1 && now.us_per_token > 0 && !Compares(trials_[micro_batches_ - 1], now)) {
    --micro_batches_;  // it is not known whether all of them are of use
  }
}

}  // namespace dovetail::scheduler
