#include "scheduler/core/step_patience.h"

#include <algorithm>

namespace dovetail::scheduler {
namespace {

constexpr double kTokensAttendedForOne = 1024;
constexpr double kMargin = 10;

}  // namespace

double StepPatience::WorkOf(Position ctx_len, int new_tokens) {
  return new_tokens * (1 + static_cast<double>(ctx_len + new_tokens) / kTokensAttendedForOne);
}

void StepPatience::Note(WorkerId worker, double work, absl::Duration took) {
  absl::Duration& slowest = slowest_[worker];
  slowest = std::max(slowest, took / std::max(1.0, work));
}

absl::Duration StepPatience::For(WorkerId worker, double work) const {
  const auto known = slowest_.find(worker);
  const absl::Duration unit = known == slowest_.end() ? kSlowest : std::min(kSlowest, kMargin * known->second);
  return least_ + work * unit;
}

}  // namespace dovetail::scheduler
