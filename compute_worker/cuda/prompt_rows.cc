#include "compute_worker/cuda/prompt_rows.h"

#include <algorithm>

#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::compute {
namespace {

absl::Status Append(const proto::SoftmaxSpec& spec, const RowTables& tables, const KvRows& from, int heads,
                    int64_t table_row, int64_t kv_offset, kernels::cuda::CudaStream& stream) {
  kernels::cuda::KvAppendLaunch append;
  append.type = RowTypeOf(spec);
  append.kv_heads = heads;
  append.qkv_step = from.k_step;
  append.v_step = from.v_step;
  append.items = tables.items;
  append.kv_offset = kv_offset;
  append.layout = BlockLayoutOf(spec);
  for (int64_t row = 0; row < from.rows; row += append.rows) {
    append.rows = static_cast<int32_t>(std::min<int64_t>(from.rows - row, kernels::cuda::kMaxOpRows));
    append.qkv = from.k + row * from.k_step * kRowElement;
    append.v = from.v + row * from.v_step * kRowElement;
    append.positions = tables.positions + table_row + row;
    append.row_items = tables.row_items + table_row + row;
    DT_RETURN_IF_ERROR(kernels::cuda::KvAppend(stream, append));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AppendRows(const proto::SoftmaxSpec& spec, const RowTables& tables, const std::byte* k, const std::byte* v,
                        int heads, int64_t rows, int64_t table_row, int64_t kv_offset,
                        kernels::cuda::CudaStream& stream) {
  return Append(spec, tables, {k, v, int64_t{heads} * spec.key_dim, int64_t{heads} * spec.value_dim, rows}, heads,
                table_row, kv_offset, stream);
}

absl::Status AppendRows(const proto::SoftmaxSpec& spec, const RowTables& tables, const KvRows& from, int heads,
                        int64_t table_row, kernels::cuda::CudaStream& stream) {
  return Append(spec, tables, from, heads, table_row, /*kv_offset=*/0, stream);
}

}  // namespace dovetail::compute
