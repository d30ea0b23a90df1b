#include "kernels/cuda/runtime/enqueue.h"

#include <algorithm>

namespace dovetail::kernels::cuda {

bool AllThere(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) { return pointer != nullptr; });
}

bool AllEven(std::initializer_list<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0 && size % 2 == 0; });
}

absl::Status CheckRows(const char* op, int64_t rows, std::initializer_list<int64_t> sizes) {
  const bool positive = std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 0; });
  if (rows >= 0 && rows <= kMaxOpRows && positive) return absl::OkStatus();
  return InvalidArgument(op, " on a GPU: ", rows, " rows, or a size that is not positive; 0..", kMaxOpRows,
                         " rows are supported");
}

absl::Status NullPointer(const char* op) { return InvalidArgument(op, " on a GPU: a pointer is null"); }

}  // namespace dovetail::kernels::cuda
