#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// What the ops on a GPU have in common: checks of their arguments, and the launch itself.
// Threads: thread-safe.

inline constexpr int32_t kMaxOpRows = 65535;

bool AllThere(std::initializer_list<const void*> pointers);  // none is null
bool AllEven(std::initializer_list<int64_t> sizes);          // and none is negative

// kInvalidArgument unless 0 <= rows <= kMaxOpRows and all sizes are positive.
absl::Status CheckRows(const char* op, int64_t rows, std::initializer_list<int64_t> sizes);
absl::Status NullPointer(const char* op);  // kInvalidArgument

// Enqueues one kernel on the stream's device. kInternal if the device is lost.
template <typename Args>
absl::Status Enqueue(CudaStream& stream, int (*launch)(const Args*, void*), const Args& args, const char* op) {
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(launch(&args, stream.handle()), stream.device().name() + ": " + op);
}

}  // namespace dovetail::kernels::cuda
