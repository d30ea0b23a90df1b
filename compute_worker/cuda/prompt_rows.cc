#include "compute_worker/cuda/prompt_rows.h"

#include <algorithm>

#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::compute {

absl::Status AppendRows(const proto::SoftmaxSpec& spec, const RowTables& tables, const std::byte* k, const std::byte* v,
                        int heads, int64_t rows, int64_t table_row, int64_t kv_offset,
                        kernels::cuda::CudaStream& stream) {
  kernels::cuda::KvAppendLaunch append;
  append.type = RowTypeOf(spec);
  append.kv_heads = heads;
  append.qkv_step = int64_t{heads} * spec.key_dim;
  append.v_step = int64_t{heads} * spec.value_dim;
  append.items = tables.items;
  append.kv_offset = kv_offset;
  append.layout = BlockLayoutOf(spec);
  for (int64_t row = 0; row < rows; row += append.rows) {
    append.rows = static_cast<int32_t>(std::min<int64_t>(rows - row, kernels::cuda::kMaxOpRows));
    append.qkv = k + KeyBytes(spec, row, heads);
    append.v = v + ValueBytes(spec, row, heads);
    append.positions = tables.positions + table_row + row;
    append.row_items = tables.row_items + table_row + row;
    DT_RETURN_IF_ERROR(kernels::cuda::KvAppend(stream, append));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
