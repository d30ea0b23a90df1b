#include "compute_worker/cuda/launch_list.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "kernels/cuda/runtime/step_work.h"

namespace dovetail::compute {

LaunchProgram::LaunchProgram(LaunchList list, size_t steps) : list_(std::move(list)) {
  size_t next = 0;
  for (size_t step = 0; step < steps; ++step) {
    launch_begin_.push_back(next);
    key_begin_.push_back(key_.size());
    for (; next < list_.size() && list_[next].step == static_cast<int32_t>(step); ++next)
      AppendKey(list_[next].record, key_);
  }
  DT_CHECK(next == list_.size(), "launches are in the order of the model's steps");
  launch_begin_.push_back(next);
  key_begin_.push_back(key_.size());
}

std::span<const Launch> LaunchProgram::StepLaunches(size_t step) const {
  return std::span(list_).subspan(launch_begin_[step], launch_begin_[step + 1] - launch_begin_[step]);
}

std::span<const uint64_t> LaunchProgram::StepKey(size_t step) const {
  return std::span(key_).subspan(key_begin_[step], key_begin_[step + 1] - key_begin_[step]);
}

void AppendKey(const LaunchRecord& record, std::vector<uint64_t>& key) {
  key.push_back(record.index());
  std::visit([&](const auto& value) { kernels::cuda::AppendWords(value, key); }, record);
}

}  // namespace dovetail::compute
