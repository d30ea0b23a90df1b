#pragma once
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/attention/kv_layout.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/wire_type.h"
#include "proto/attention_spec.h"

// K and V of prompts on a compute worker's GPU: as rows in the wire type, and in the blocks that are attended.

namespace dovetail::compute {

inline constexpr int64_t kRowElement = 2;  // bytes of the wire types of a GPU

// Threads: pure, all of these.
inline kernels::cuda::WireType RowTypeOf(const proto::SoftmaxSpec& spec) {
  return spec.kv == DType::kBF16 ? kernels::cuda::WireType::kBF16 : kernels::cuda::WireType::kF16;
}
// Of blocks, which have the wire type whatever attention workers store.
inline kernels::cuda::CudaKvLayout BlockLayoutOf(const proto::SoftmaxSpec& spec) {
  return {spec.key_dim, spec.value_dim,
          spec.kv == DType::kBF16 ? kernels::cuda::KvType::kBF16 : kernels::cuda::KvType::kF16};
}
inline int64_t KeyBytes(const proto::SoftmaxSpec& spec, int64_t rows, int heads) {
  return rows * heads * spec.key_dim * kRowElement;
}
inline int64_t ValueBytes(const proto::SoftmaxSpec& spec, int64_t rows, int heads) {
  return rows * heads * spec.value_dim * kRowElement;
}

// Which blocks rows belong to: items with their blocks, and by row its position and its item. On the device.
// Threads: plain values.
struct RowTables {
  const kernels::cuda::DeviceAttentionItem* items = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* row_items = nullptr;
};

// Enqueues: rows of `heads` KV heads, k [rows, heads, key_dim] and v [rows, heads, value_dim], to the blocks that the
// tables name from `table_row` on, each block `kv_offset` bytes behind where they say.
//   Errors:  kInternal: the device is lost
//   Threads: one thread at a time for a stream
absl::Status AppendRows(const proto::SoftmaxSpec& spec, const RowTables& tables, const std::byte* k, const std::byte* v,
                        int heads, int64_t rows, int64_t table_row, int64_t kv_offset,
                        kernels::cuda::CudaStream& stream);

// Rows of KV heads that lie among others: k and v of the first head, and how far apart rows begin.
//   Units:   steps in elements
//   Threads: plain values
struct KvRows {
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  int64_t k_step = 0, v_step = 0;
  int64_t rows = 0;
};
// The same for those, of `heads` KV heads.
absl::Status AppendRows(const proto::SoftmaxSpec& spec, const RowTables& tables, const KvRows& from, int heads,
                        int64_t table_row, kernels::cuda::CudaStream& stream);

// While one lives, uploads come in the order of launches: what they overwrite may be read by launches of the step
// before.
// Ownership: `stream` outlives it.
// Threads: thread-compatible, as the stream.
class UploadsInOrder {
 public:
  explicit UploadsInOrder(kernels::cuda::CudaStream& stream) : stream_(stream) { stream_.HoldUploads(); }
  ~UploadsInOrder() { stream_.ReleaseUploads(); }
  UploadsInOrder(const UploadsInOrder&) = delete;
  UploadsInOrder& operator=(const UploadsInOrder&) = delete;

 private:
  kernels::cuda::CudaStream& stream_;
};

}  // namespace dovetail::compute
