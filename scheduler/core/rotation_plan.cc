#include "scheduler/core/rotation_plan.h"

#include <algorithm>
#include <cmath>

namespace dovetail::scheduler {

RotationPlan PlanRotation(const StageTimes& times, int most) {
  const double busier = std::max(times.dense_us, times.attention_us);
  const double alone = times.dense_us + times.attention_us + 2 * times.hop_us;
  RotationPlan plan;
  if (busier > 0) plan.micro_batches = static_cast<int>(std::clamp(std::ceil(alone / busier), 1.0, double(most)));
  plan.cycle_us = std::max(plan.micro_batches * busier, alone);
  plan.stagger_us = plan.cycle_us / plan.micro_batches;
  return plan;
}

}  // namespace dovetail::scheduler
