#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>

#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::engine {

inline constexpr size_t kBf16Bytes = 2;  // of what is measured

// Times calls on a GPU that follow each other in a recorded graph, as a step's do.
// Ownership: must not outlive the device.
// Threads: thread-compatible.
class GpuTimer {
 public:
  static absl::StatusOr<GpuTimer> Create(kernels::cuda::CudaDevice& device) {
    GpuTimer timer;
    DT_ASSIGN_OR_RETURN(timer.stream_, device.CreateCudaStream());
    DT_ASSIGN_OR_RETURN(timer.begin_, device.CreateEvent(/*timed=*/true));
    DT_ASSIGN_OR_RETURN(timer.end_, device.CreateEvent(/*timed=*/true));
    return timer;
  }
  kernels::cuda::CudaStream& stream() { return *stream_; }

  // The least seconds of one of enqueue(0), ..., enqueue(calls - 1), each of which gives a status, of at least three
  // runs of all of them and of those that `seconds` hold. enqueue(0) is done once before, for what first calls do.
  template <typename Enqueue>
  absl::StatusOr<double> Seconds(int calls, double seconds, Enqueue&& enqueue) {
    DT_RETURN_IF_ERROR(enqueue(0));
    DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
    DT_RETURN_IF_ERROR(stream_->BeginCapture());
    absl::Status enqueued;
    for (int i = 0; i < calls && enqueued.ok(); ++i) enqueued = enqueue(i);
    DT_ASSIGN_OR_RETURN(const kernels::cuda::CudaGraph graph, stream_->EndCapture());
    DT_RETURN_IF_ERROR(enqueued);
    using Clock = std::chrono::steady_clock;
    const auto since = Clock::now();
    double best = std::numeric_limits<double>::infinity();
    for (int runs = 0; runs < 3 || std::chrono::duration<double>(Clock::now() - since).count() < seconds; ++runs) {
      DT_RETURN_IF_ERROR(stream_->Record(begin_));
      DT_RETURN_IF_ERROR(stream_->Launch(graph));
      DT_RETURN_IF_ERROR(stream_->Record(end_));
      DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
      DT_ASSIGN_OR_RETURN(const float milliseconds, end_.MillisecondsSince(begin_));
      best = std::min(best, static_cast<double>(milliseconds) * 1e-3);
    }
    return best / calls;
  }

 private:
  std::unique_ptr<kernels::cuda::CudaStream> stream_;
  kernels::cuda::CudaEvent begin_, end_;
};

}  // namespace dovetail::engine
