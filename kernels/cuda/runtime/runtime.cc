#include "kernels/cuda/runtime/runtime.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

namespace dovetail::kernels::cuda::runtime {
namespace {

int Code(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // a failed call must not show up at the next launch
  return static_cast<int>(error);
}

cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(void* event) { return static_cast<cudaEvent_t>(event); }

int OnDevice(int device, cudaError_t (*call)(void*), void* argument) {
  const cudaError_t error = cudaSetDevice(device);
  return Code(error != cudaSuccess ? error : call(argument));
}

}  // namespace

const char* ErrorText(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
bool IsOutOfMemory(int error) { return error == static_cast<int>(cudaErrorMemoryAllocation); }

int Versions(int* driver, int* runtime) {
  *driver = *runtime = 0;
  const cudaError_t error = cudaDriverGetVersion(driver);
  return Code(error != cudaSuccess ? error : cudaRuntimeGetVersion(runtime));
}

int DeviceCount(int* count) {
  *count = 0;
  return Code(cudaGetDeviceCount(count));
}

int GetDeviceInfo(int device, DeviceInfo* info) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return Code(error);
  std::memset(info, 0, sizeof(*info));
  std::snprintf(info->name, sizeof(info->name), "%s", properties.name);
  info->major = properties.major;
  info->minor = properties.minor;
  info->multiprocessors = properties.multiProcessorCount;
  info->shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  info->l2_bytes = properties.l2CacheSize;
  info->memory_bytes = properties.totalGlobalMem;
  return Code(cudaDeviceGetPCIBusId(info->pci, sizeof(info->pci), device));
}

int MemoryInfo(int device, size_t* free_bytes, size_t* total_bytes) {
  const cudaError_t error = cudaSetDevice(device);
  return Code(error != cudaSuccess ? error : cudaMemGetInfo(free_bytes, total_bytes));
}

int UseDevice(int device) { return Code(cudaSetDevice(device)); }

int ReachPeer(int device, int peer, bool* reaches) {
  int can = 0;
  cudaError_t error = cudaDeviceCanAccessPeer(&can, device, peer);
  *reaches = error == cudaSuccess && can != 0;
  if (!*reaches) return Code(error);
  error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    error = cudaSuccess;
  }
  *reaches = error == cudaSuccess;
  return Code(error);
}

int Allocate(int device, size_t bytes, void** memory) {
  const cudaError_t error = cudaSetDevice(device);
  return Code(error != cudaSuccess ? error : cudaMalloc(memory, bytes));
}

int Release(int device, void* memory) {
  return OnDevice(
      device, [](void* p) { return cudaFree(p); }, memory);
}

int ExportMemory(int device, void* memory, MemoryHandle* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(MemoryHandle));
  cudaError_t error = cudaSetDevice(device);
  cudaIpcMemHandle_t of_cuda;
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&of_cuda, memory);
  if (error == cudaSuccess) std::memcpy(handle, &of_cuda, sizeof(*handle));
  return Code(error);
}

namespace {

// The runtime does not say how long memory is; the driver does.
cudaError_t BytesOf(void* memory, size_t* bytes) {
  using AddressRange = int (*)(void** base, size_t* bytes, void* address);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kCuda12 = 12000;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, kCuda12, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  void* base = nullptr;
  return static_cast<cudaError_t>(reinterpret_cast<AddressRange>(function)(&base, bytes, memory));
}

}  // namespace

int OpenMemory(int device, const MemoryHandle* handle, void** memory, size_t* bytes) {
  cudaError_t error = cudaSetDevice(device);
  cudaIpcMemHandle_t of_cuda;
  std::memcpy(&of_cuda, handle, sizeof(of_cuda));
  if (error == cudaSuccess) error = cudaIpcOpenMemHandle(memory, of_cuda, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return Code(error);
  error = BytesOf(*memory, bytes);
  if (error != cudaSuccess) cudaIpcCloseMemHandle(*memory);
  return Code(error);
}

int CloseMemory(int device, void* memory) {
  return OnDevice(
      device, [](void* p) { return cudaIpcCloseMemHandle(p); }, memory);
}

int AllocatePinned(int device, size_t bytes, void** memory) {
  const cudaError_t error = cudaSetDevice(device);
  return Code(error != cudaSuccess ? error : cudaHostAlloc(memory, bytes, cudaHostAllocPortable));
}

int ReleasePinned(void* memory) { return Code(cudaFreeHost(memory)); }

int StreamCreate(int device, void** stream) {
  const cudaError_t error = cudaSetDevice(device);
  return Code(error != cudaSuccess
                  ? error
                  : cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
}

int StreamDestroy(int device, void* stream) {
  return OnDevice(
      device, [](void* s) { return cudaStreamDestroy(AsStream(s)); }, stream);
}

int StreamSynchronize(void* stream) { return Code(cudaStreamSynchronize(AsStream(stream))); }

int EventCreate(int device, bool timed, void** event) {
  const cudaError_t error = cudaSetDevice(device);
  return Code(error != cudaSuccess ? error
                                   : cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                                              timed ? cudaEventDefault : cudaEventDisableTiming));
}

int EventDestroy(void* event) { return Code(cudaEventDestroy(AsEvent(event))); }
int EventRecord(void* event, void* stream) { return Code(cudaEventRecord(AsEvent(event), AsStream(stream))); }

int EventDone(void* event, bool* done) {
  const cudaError_t error = cudaEventQuery(AsEvent(event));
  *done = error == cudaSuccess;
  return error == cudaErrorNotReady ? Code(error), 0 : Code(error);
}

int EventSynchronize(void* event) { return Code(cudaEventSynchronize(AsEvent(event))); }

int EventWait(void* event, void* stream) { return Code(cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0)); }

int EventMilliseconds(void* from, void* to, float* milliseconds) {
  return Code(cudaEventElapsedTime(milliseconds, AsEvent(from), AsEvent(to)));
}

int Copy(void* to, const void* from, size_t bytes, void* stream) {
  return Code(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, AsStream(stream)));
}

int CopyRows(void* to, size_t to_step, const void* from, size_t from_step, size_t row_bytes, size_t rows,
             void* stream) {
  return Code(cudaMemcpy2DAsync(to, to_step, from, from_step, row_bytes, rows, cudaMemcpyDefault, AsStream(stream)));
}

int Fill(void* memory, uint8_t value, size_t bytes, void* stream) {
  return Code(cudaMemsetAsync(memory, value, bytes, AsStream(stream)));
}

int CaptureBegin(void* stream) {
  return Code(cudaStreamBeginCapture(AsStream(stream), cudaStreamCaptureModeThreadLocal));
}

int CaptureEnd(void* stream, void** graph) {
  cudaGraph_t recorded = nullptr;
  cudaError_t error = cudaStreamEndCapture(AsStream(stream), &recorded);
  if (error != cudaSuccess) return Code(error);
  error = cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(graph), recorded, 0);
  cudaGraphDestroy(recorded);
  return Code(error);
}

int GraphLaunch(void* graph, void* stream) {
  return Code(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), AsStream(stream)));
}

int GraphDestroy(void* graph) { return Code(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph))); }

}  // namespace dovetail::kernels::cuda::runtime
