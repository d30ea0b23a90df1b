#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda_device.h"

// What benches on a GPU share. For one thread.

namespace dovetail::bench {

// Prints and ends the process if there is an error.
inline void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}
template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

// Microseconds of one of the calls enqueue(0), enqueue(1), ..., enqueue(calls - 1), which follow each other in a CUDA
// graph: the median of `runs` runs after two that warm up. enqueue(0) runs once before, outside.
template <typename Enqueue>
double MedianUs(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream, int calls, Enqueue&& enqueue,
                int runs = 9) {
  constexpr int kWarmUps = 2;
  enqueue(0);
  Must(stream.SynchronizeStatus());
  Must(stream.BeginCapture());
  for (int i = 0; i < calls; ++i) enqueue(i);
  const kernels::cuda::CudaGraph graph = Must(stream.EndCapture());
  kernels::cuda::CudaEvent begin = Must(device.CreateEvent(true)), end = Must(device.CreateEvent(true));
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + runs; ++i) {
    Must(stream.Record(begin));
    Must(stream.Launch(graph));
    Must(stream.Record(end));
    Must(stream.SynchronizeStatus());
    times.push_back(Must(end.MillisecondsSince(begin)) * 1000.0 / calls);
  }
  std::sort(times.begin() + kWarmUps, times.end());
  return times[kWarmUps + runs / 2];
}

// GB/s at which a plain kernel reads `bytes` of `memory`, which should be several times the L2.
inline double ReadRate(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream, const void* memory,
                       size_t bytes) {
  const auto result = Must(device.Allocate(64));
  const double us = MedianUs(device, stream, 1, [&](int) {
    Must(stream.UseDevice());
    Must(device.library().Check(device.library()->read_all(memory, bytes, result->data(), stream.handle()), "read"));
  });
  return static_cast<double>(bytes) / us / 1e3;
}

}  // namespace dovetail::bench
