#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/backend_abi.h"

// The functions behind backend_abi.h that need the CUDA runtime alone. Inside libdovetail_cuda.so only.
// Threads: thread-safe; UseDevice() acts on the calling thread.

namespace dovetail::kernels::cuda::runtime {

const char* ErrorText(int error);
bool IsOutOfMemory(int error);
int Versions(int* driver, int* runtime);
int DeviceCount(int* count);
int GetDeviceInfo(int device, DeviceInfo* info);
int HasCode(int device, bool* has);
int MemoryInfo(int device, size_t* free_bytes, size_t* total_bytes);
int UseDevice(int device);
int ReachPeer(int device, int peer, bool* reaches);
int Allocate(int device, size_t bytes, void** memory);
int Release(int device, void* memory);
int ExportMemory(int device, void* memory, MemoryHandle* handle);
int OpenMemory(int device, const MemoryHandle* handle, void** memory, size_t* bytes);
int CloseMemory(int device, void* memory);
int AllocatePinned(int device, size_t bytes, void** memory);
int ReleasePinned(void* memory);
int StreamCreate(int device, void** stream);
int StreamDestroy(int device, void* stream);
int StreamSynchronize(void* stream);
int EventCreate(int device, bool timed, void** event);
int EventDestroy(void* event);
int EventRecord(void* event, void* stream);
int EventDone(void* event, bool* done);
int EventSynchronize(void* event);
int EventWait(void* event, void* stream);
int EventMilliseconds(void* from, void* to, float* milliseconds);
int Copy(void* to, const void* from, size_t bytes, void* stream);
int CopyRows(void* to, size_t to_step, const void* from, size_t from_step, size_t row_bytes, size_t rows, void* stream);
int Fill(void* memory, uint8_t value, size_t bytes, void* stream);
int CaptureBegin(void* stream);
int CaptureEnd(void* stream, void** graph);
int GraphLaunch(void* graph, void* stream);
int GraphDestroy(void* graph);

}  // namespace dovetail::kernels::cuda::runtime
