#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace dovetail::kernels {

class ThreadPool;    // thread_pool.h
struct KernelTable;  // kernel_table.h

// The instruction sets the CPU kernels are compiled for, weakest first. Every level runs every op.
// kAvx512: F, BW, VL, DQ, VNNI, VBMI and BF16 together. kAmx: TILE, INT8 and BF16 besides; products of matrices use
// them.
enum class Isa : uint8_t { kAvx2 = 0, kAvx512 = 1, kAmx = 2 };
inline constexpr Isa kStrongestIsa = Isa::kAmx;

// An ordered queue of kernels on one device. Ops take a Stream&, check their arguments, enqueue and return; what they
// read and write must stay valid until Synchronize(). On the CPU an op has finished when it returns: it ran on the
// caller and the pool's threads. Streams of one CpuDevice share its pool: while one op has it, an op of another stream
// runs on its caller alone. A stream must not outlive its device.
// Threads: one thread at a time.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void Synchronize() = 0;
  virtual ThreadPool& pool() = 0;                  // of the host side; a CPU op spreads its work over it
  virtual const KernelTable& kernels() const = 0;  // chosen once per (device, ISA)
};

// Memory on a device. Movable, freed on destruction. CPU memory is 64-byte aligned and zeroed.
// Threads: thread-compatible. Ops may use the memory on other threads.
class Buffer {
 public:
  Buffer() = default;
  virtual ~Buffer() = default;
  virtual std::byte* data() = 0;
  virtual size_t size_bytes() const = 0;
};

// A place where kernels run.
// Threads: thread-safe after creation.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu", later "cuda:0"
  // Two devices give the same bits only where this is equal: "CPU avx512", "GPU sm_90 of 132 multiprocessors".
  virtual std::string arithmetic() const { return name(); }
  virtual std::unique_ptr<Stream> CreateStream() = 0;
  // kResourceExhausted when the memory is not there. 0 bytes is allowed.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t size_bytes) = 0;
  // kFailedPrecondition once nothing can run there any more, with the reason and the remedy: the process must go. May
  // take a millisecond: ask after something has failed.
  virtual absl::Status Health() { return absl::OkStatus(); }
};

struct CpuDeviceOptions {
  int threads = 0;              // compute threads including the caller's; 0: one per usable core
  Isa max_isa = kStrongestIsa;  // tests pin a weaker level; never above what the CPU has
  int spin_us = 100;            // how long an idle compute thread watches for work before it sleeps: thread_pool.h
};
inline constexpr int kMaxSpinUs = 1'000'000;

// kInvalidArgument for a thread count outside 1..256 (after defaulting) or spin_us outside 0..kMaxSpinUs,
// kFailedPrecondition on a CPU below x86-64-v3.
// Threads: thread-safe; starts the threads of the device's pool.
absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(const CpuDeviceOptions& options);

}  // namespace dovetail::kernels
