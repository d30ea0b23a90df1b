#include <algorithm>
#include <utility>

#include "kernels/aligned_buffer.h"
#include "kernels/cpu/isa.h"
#include "kernels/device.h"
#include "kernels/kernel_table.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels {
namespace {

class CpuBuffer : public Buffer {
 public:
  explicit CpuBuffer(AlignedBuffer memory) : memory_(std::move(memory)) {}
  std::byte* data() override { return memory_.data(); }
  size_t size_bytes() const override { return memory_.size_bytes(); }

 private:
  AlignedBuffer memory_;
};

class CpuStream : public Stream {
 public:
  CpuStream(ThreadPool& pool, const KernelTable& kernels) : pool_(pool), kernels_(kernels) {}
  void Synchronize() override {}
  ThreadPool& pool() override { return pool_; }
  const KernelTable& kernels() const override { return kernels_; }

 private:
  ThreadPool& pool_;  // both of the device, which outlives its streams
  const KernelTable& kernels_;
};

class CpuDevice : public Device {
 public:
  CpuDevice(const ThreadPoolOptions& options, Isa isa) : pool_(options), kernels_(SelectKernels(isa)) {}
  std::string name() const override { return "cpu"; }
  std::string arithmetic() const override { return std::string("CPU ") + Name(kernels_.isa); }
  std::unique_ptr<Stream> CreateStream() override { return std::make_unique<CpuStream>(pool_, kernels_); }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) override {
    DT_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Create(size_bytes));
    return std::make_unique<CpuBuffer>(std::move(memory));
  }

 private:
  ThreadPool pool_;
  const KernelTable kernels_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(const CpuDeviceOptions& options) {
  const std::optional<Isa> isa = DetectIsa();
  if (!isa)
    return FailedPrecondition(
        "this CPU lacks AVX2, FMA, F16C or BMI2: an x86-64-v3 processor (2013 or later) is needed");
  const int threads = options.threads == 0 ? std::min(UsableCores(), ThreadPool::kMaxThreads) : options.threads;
  if (threads < 1 || threads > ThreadPool::kMaxThreads) {
    return InvalidArgument("threads: ", threads, " is outside 1..", ThreadPool::kMaxThreads,
                           "; 0 takes one per usable core");
  }
  if (options.spin_us < 0 || options.spin_us > kMaxSpinUs) {
    return InvalidArgument("spin_us: ", options.spin_us, " is outside 0..", kMaxSpinUs);
  }
  const ThreadPoolOptions pool{.threads = threads, .spin_us = options.spin_us};
  return std::make_unique<CpuDevice>(pool, std::min(*isa, options.max_isa));
}

}  // namespace dovetail::kernels
