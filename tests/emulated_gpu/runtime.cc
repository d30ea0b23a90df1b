// The part of the CUDA runtime that the backend uses: one GPU, or as many as DOVETAIL_EMULATED_GPUS says, whose memory
// is the host's and whose work is done when a call returns. Device memory ends at a guard page and begins as NaNs.
// Pieces of at least 2 MiB may be opened by other processes, also when this one has ended. LoseEmulatedGpu(index): from
// then on calls fail for that GPU, as after a fault. HoldEmulatedGpu(index): until another one is held, or none (-1),
// what that GPU is given from here on has not been done.
#include "kernels/cuda/runtime/runtime.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/emulated_gpu/stream_work.h"

namespace {

constexpr int kMultiprocessors = 4;  // so that some thread blocks have several pieces of work, and some one
constexpr int kShared = 227 << 10;
constexpr size_t kPage = 4096;
std::mutex mutex;
void* PageOf(void* p) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) / kPage * kPage); }

struct Mapping {
  size_t bytes = 0;
  int file = -1;  // which other processes may open; none: -1
};
std::map<void*, Mapping> mapped;  // by the address given
constexpr size_t kLeastShared = size_t{2} << 20;
struct Handle {  // of memory
  pid_t process = 0;
  int file = -1;
  void* memory = nullptr;  // in that process
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

int Gpus() {
  static const char* const text = std::getenv("DOVETAIL_EMULATED_GPUS");
  return text == nullptr ? 1 : std::atoi(text);
}

size_t Memory() {
  static const char* const gib = std::getenv("DOVETAIL_EMULATED_GPU_GIB");
  return (gib == nullptr ? size_t{2} : static_cast<size_t>(std::atoi(gib))) << 30;
}

// Bytes of an address of `mapped`, to the guard page.
size_t BytesAt(void* memory, const Mapping& mapping) {
  return mapping.bytes - kPage - static_cast<size_t>(static_cast<char*>(memory) - static_cast<char*>(PageOf(memory)));
}
size_t used = 0;

thread_local int current = 0;
std::atomic<int> lost = -1, held = -1, holds = 0;
bool IsLost(cudaStream_t stream) { return *reinterpret_cast<const int*>(stream) == lost; }  // a stream has its GPU

using Graph = std::vector<std::function<void()>>;
std::map<cudaStream_t, Graph*> recorded;
std::set<Graph*> is_recorded;

using Clock = std::chrono::steady_clock;
struct Event {
  Clock::time_point at;
  Graph* graph = nullptr;  // whose recording it was part of
  int hold = 0;            // the number of the one during which it was recorded; 0: none
};
Event& EventOf(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }
Graph* GraphOf(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const auto found = recorded.find(stream);
  return found == recorded.end() ? nullptr : found->second;
}

}  // namespace

void emu::Do(cudaStream_t stream, std::function<void()> work) {
  if (Graph* const graph = GraphOf(stream); graph != nullptr) {
    graph->push_back(std::move(work));
  } else {
    work();
  }
}

extern "C" {

cudaError_t cudaGetLastError() { return emu::TakeError(); }
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  std::snprintf(text, sizeof(text), "emulated CUDA error %d", error);
  return text;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = Gpus(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device >= Gpus()) return cudaErrorInvalidDevice;
  return current = device, cudaSuccess;
}
__attribute__((visibility("default"))) void LoseEmulatedGpu(int device) { lost = device; }
__attribute__((visibility("default"))) void HoldEmulatedGpu(int device) {
  held = device;
  ++holds;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorInvalidDevice; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  std::memset(static_cast<void*>(out), 0, sizeof(*out));
  std::strcpy(out->name, "CPU emulation");
  out->major = 9, out->multiProcessorCount = kMultiprocessors, out->sharedMemPerBlockOptin = kShared;
  out->l2CacheSize = 50 << 20, out->totalGlobalMem = Memory();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kShared; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    default: std::fprintf(stderr, "emu: device attribute %d\n", which); return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  // Another one for each copy of this library in a process.
  std::snprintf(text, bytes, "%08zx:%02x:00.0", reinterpret_cast<size_t>(&mutex) / kPage & 0xffffffff, device);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  if (current == lost) return cudaErrorLaunchFailure;
  const std::lock_guard lock(mutex);
  *total = Memory(), *free_bytes = Memory() - used;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** out, size_t bytes) {
  const size_t size = (bytes + 255) / 256 * 256, pages = (size + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(mutex);
  if (size > Memory() - used) return cudaErrorMemoryAllocation;
  const int file = bytes < kLeastShared ? -1 : memfd_create("emulated GPU memory", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(pages + kPage)) != 0) return cudaErrorMemoryAllocation;
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  auto* const base = static_cast<char*>(mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, flags, file, 0));
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(base + pages, kPage, PROT_NONE);
  std::memset(base, 0xff, pages);
  *out = base + pages - size;
  mapped[*out] = {pages + kPage, file};
  used += pages + kPage;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(mutex);
  const auto found = mapped.find(memory);
  if (found == mapped.end()) return memory == nullptr ? cudaSuccess : cudaErrorInvalidValue;
  munmap(PageOf(memory), found->second.bytes);
  if (found->second.file >= 0) close(found->second.file);
  used -= found->second.bytes;
  mapped.erase(found);
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* memory) {
  const std::lock_guard lock(mutex);
  const auto found = mapped.find(memory);
  if (found == mapped.end() || found->second.file < 0) return cudaErrorInvalidValue;
  const Handle handle{getpid(), found->second.file, memory};
  std::memset(out, 0, sizeof(*out));
  std::memcpy(out, &handle, sizeof(handle));
  return cudaSuccess;
}
// A real GPU's are not for the process that they come from; here they are, so that one process has all ranks of a test.
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t of_cuda, unsigned) {
  Handle handle;
  std::memcpy(static_cast<void*>(&handle), &of_cuda, sizeof(handle));
  const std::lock_guard lock(mutex);
  if (handle.process == getpid()) {
    *memory = handle.memory;
    return mapped.contains(handle.memory) ? cudaSuccess : cudaErrorInvalidValue;
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.process, handle.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) return cudaErrorInvalidValue;
  const auto bytes = static_cast<size_t>(status.st_size);
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(static_cast<char*>(base) + bytes - kPage, kPage, PROT_NONE);
  mapped[base] = {bytes, -1};
  used += bytes;
  *memory = base;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  {
    const std::lock_guard lock(mutex);
    const auto found = mapped.find(memory);
    if (found == mapped.end()) return cudaErrorInvalidValue;
    if (found->second.file >= 0) return cudaSuccess;  // this process's own
  }
  return cudaFree(memory);
}
static int AddressRange(void** base, size_t* bytes, void* address) {
  const std::lock_guard lock(mutex);
  *base = address;
  *bytes = BytesAt(address, mapped.at(address));
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuMemGetAddressRange") == 0;
  *function = known ? reinterpret_cast<void*>(AddressRange) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *out != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (IsLost(stream)) return cudaErrorLaunchFailure;
  emu::Do(stream, [=] { std::memmove(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_step, const void* from, size_t from_step, size_t row_bytes,
                              size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  if (to_step < row_bytes || from_step < row_bytes) return cudaErrorInvalidValue;
  emu::Do(stream, [=] {
    for (size_t row = 0; row < rows; ++row)
      std::memmove(static_cast<char*>(to) + row * to_step, static_cast<const char*>(from) + row * from_step, row_bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  emu::Do(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new int(current));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete reinterpret_cast<int*>(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return IsLost(stream) ? cudaErrorLaunchFailure : cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete &EventOf(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const bool of_held = *reinterpret_cast<const int*>(stream) == held;
  EventOf(event) = {Clock::now(), GraphOf(stream), of_held ? holds.load() : 0};
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(mutex);
  if (Graph* const graph = EventOf(event).graph; graph != nullptr && is_recorded.contains(graph))
    recorded[stream] = graph;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return EventOf(event).hold > 0 && EventOf(event).hold == holds ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::yield();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t from, cudaEvent_t to) {
  *out = std::chrono::duration<float, std::milli>(EventOf(to).at - EventOf(from).at).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard lock(mutex);
  recorded[stream] = new Graph;
  is_recorded.insert(recorded[stream]);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(mutex);
  const auto found = recorded.find(stream);
  if (found == recorded.end()) return cudaErrorIllegalState;
  Graph* const ended = found->second;
  is_recorded.erase(ended);
  std::erase_if(recorded, [&](const auto& of) { return of.second == ended; });
  *graph = reinterpret_cast<cudaGraph_t>(ended);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (IsLost(stream)) return cudaErrorLaunchFailure;
  for (const auto& work : *reinterpret_cast<Graph*>(graph)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }

}  // extern "C"

namespace dovetail::kernels::cuda::runtime {
int HasCode(int, bool* has) { return *has = true, 0; }
}  // namespace dovetail::kernels::cuda::runtime
