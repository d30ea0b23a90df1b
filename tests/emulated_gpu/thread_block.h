#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "tests/emulated_gpu/stream_work.h"

// A kernel's thread blocks on a CPU: what a GPU does for them (PTX ISA 9). Any misuse is reported and ends the program.

namespace emu {

using Site = std::source_location;
// What the lanes of a warp do together.
enum Op : int { kSync, kShuffle, kAll, kAny, kBallot, kMatrices, kMatricesTransposed, kMmaBF16, kMmaF16, kMmaTF32 };

struct Copy {
  uint32_t to;  // an address of shared memory
  const void* from;
  uint32_t bytes, given;  // the rest is zeros
};
struct Warp;

// A thread of the thread block that runs.
struct Fiber {
  void* sp;
  uint3 thread;
  Warp* warp;
  int lane;
  // What it waits for: a collective of the warp, a barrier of bar.sync, an mbarrier.
  enum { kRuns, kMeets, kBar, kPolls, kExited } state;
  Op op;
  uint32_t mask, from, bar, parity;
  Site at;                      // where it waits, or last did
  void* caller;                 // likewise, as an address of code
  int result;                   // of bar.sync
  alignas(16) uint32_t in[12];  // of a collective: what the lane brings
  alignas(16) uint32_t out[4];  // and gets
  struct Copies* copies;        // cp.async
};

extern Fiber* current;  // which runs; null between fibers

// Runs all thread blocks of a kernel, one after the other, with `shared` bytes of dynamic shared memory each; `thread`
// is what one thread does, `function` whose limit of shared memory counts. A launch that a GPU would refuse runs
// nothing: TakeError() tells. Any host thread; a mutex lets one kernel run at a time.
void RunKernel(const char* name, dim3 grid, dim3 block, size_t shared, const void* function,
               const std::function<void()>& thread);
// kernel<<<grid, block, shared, stream>>>(args): arguments are copied now, the kernel runs when the stream comes to it.
template <typename... P, typename... A>
void LaunchKernel(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                  A&&... args) {
  std::tuple<std::decay_t<P>...> all(args...);
  Do(stream, [=] {
    RunKernel(name, grid, block, shared, reinterpret_cast<const void*>(kernel), [&] { std::apply(kernel, all); });
  });
}
template <typename... P, typename... A>
cudaError_t LaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... args) {
  LaunchKernel("", kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, args...);
  return TakeError();
}
template <typename Kernel>
cudaError_t GetAttributes(cudaFuncAttributes* out, Kernel*) {
  return *out = {}, cudaSuccess;
}
// cudaFuncSetAttribute(MaxDynamicSharedMemorySize); a cudaError_t. Any host thread.
int SetSharedLimit(const void* function, int bytes);

// The rest is called by the fibers of the kernel that runs.

// Reports what was wrong and what every thread does, and ends the program.
[[noreturn]] void Fail(const char* format, ...);
// Fills `out` of the lanes in `mask`, whose `in` is there. lanes: [32] of one warp.
void RunCollective(Op op, Fiber* lanes, uint32_t mask);
void Meet(Op op, uint32_t mask, Site at);  // returns once all lanes of the mask have met here
template <typename T>
T Shuffle(uint32_t mask, T x, int from, Site at) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(current->in, &x, sizeof(T));
  current->from = from;
  Meet(kShuffle, mask, at);
  std::memcpy(&x, current->out, sizeof(T));
  return x;
}
inline int Vote(Op op, uint32_t mask, int x, Site at) {
  current->in[0] = x != 0;
  Meet(op, mask, at);
  return current->out[0];
}
// bar.sync, or bar.arrive unless it waits, of `threads` threads; 0: of all. Returns whether all predicates are true.
int Bar(int id, int threads, bool waits, int predicate, Site at);

// Shared memory: an arena whose offsets are the addresses, full of 0xff bytes for each block.
std::byte* DynamicShared();
struct Slot {  // where a declaration's memory is, in the block that runs
  uint64_t block = 0;
  std::byte* at = nullptr;
};
std::byte* StaticShared(Slot& slot, size_t bytes, size_t alignment);
uint32_t AddressOf(const void* shared);
std::byte* SharedAt(uint32_t address, uint32_t bytes, uint32_t alignment);  // checks all three

// mbarriers by address, as the PTX of those names has them. A test that fails waits first until the barrier changes.
void BarrierInit(uint32_t bar, uint32_t count);
void BarrierArrive(uint32_t bar, uint32_t count = 1);
void BarrierExpect(uint32_t bar, uint32_t bytes, bool arrives);
bool BarrierTest(uint32_t bar, uint32_t parity, Site at);
// Copies read their source, which must stay, when they land: at any time before a thread has waited for them. Until
// then their destination is full of 0xff bytes.
void BulkCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar);
void CopyAsync(uint32_t to, const void* from, uint32_t bytes, uint32_t given);
void CopiesArrive(uint32_t bar);
void CommitCopies();
void WaitForCopies(int groups_left);  // negative: all, committed or not
[[noreturn]] void Unsupported(const char* what);
uint64_t Nanoseconds();  // of a steady clock

}  // namespace emu
