#pragma once
#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/cuda/exchange/exchange_args.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "transport/ucx/device_link.h"

namespace dovetail::bench {

// Prints and ends the process if there is an error.
void Must(const absl::Status& status);
template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

// This process forked into two that talk over a pair of sockets; rank 1 is the child. Fork before anything opens CUDA.
class TwoProcesses {
 public:
  TwoProcesses();
  int rank() const { return rank_; }
  pid_t child() const { return child_; }     // of rank 0
  std::string Swap(const std::string& own);  // waits for the other's; ends the process if that is gone
  void Barrier() { Swap(""); }

 private:
  int rank_ = 0, socket_ = -1;
  pid_t child_ = -1;
};

// A GPU of each process (cuda:<rank>), linked: memory of `bytes` that the peer's kernels may store into, which begins
// with `words` ExchangeWords.
class LinkedGpus {
 public:
  LinkedGpus(TwoProcesses& processes, size_t bytes, int words);

  kernels::cuda::CudaDevice& device() { return *device_; }
  std::byte* own() const { return memory_->data() + words_bytes_; }
  std::byte* peer() const { return link_->peer_memory() + words_bytes_; }
  kernels::cuda::ExchangeEnd End(int index, uint64_t deadline_ns = 2'000'000'000) const;
  void ClearWords(kernels::cuda::CudaStream& stream);  // not while the peer may store

 private:
  const size_t words_bytes_;
  std::unique_ptr<kernels::cuda::CudaDevice> device_;
  std::unique_ptr<kernels::Buffer> memory_;
  std::unique_ptr<transport::DeviceLinks> links_;
  std::unique_ptr<transport::DeviceLink> link_;
};

// {number, failure} of a step, on its way to ExchangeWords::step: pinned memory for `count` steps to come.
class StepNumbers {
 public:
  StepNumbers(kernels::cuda::CudaDevice& device, int count);
  void Next(kernels::cuda::CudaStream& stream, kernels::cuda::ExchangeWords* words, uint64_t step);
  static uint64_t Failure(kernels::cuda::CudaStream& stream, const kernels::cuda::ExchangeWords* words);  // waits

 private:
  std::unique_ptr<kernels::Buffer> pinned_;
  int at_ = 0, count_;
};

}  // namespace dovetail::bench
