#include "examples/spatio_temporal/gpu/gpu_sequences.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "examples/spatio_temporal/gpu/gpu_weights.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::spatio_temporal {
namespace {

using kernels::Buffer;
using kernels::cuda::CudaAttention;
using kernels::cuda::CudaDevice;
using kernels::cuda::CudaKvLayout;
using kernels::cuda::CudaStream;

template <typename T>
absl::StatusOr<std::unique_ptr<Buffer>> Upload(CudaDevice& device, CudaStream& stream, const std::vector<T>& values) {
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, device.Allocate(values.size() * sizeof(T)));
  DT_RETURN_IF_ERROR(stream.Copy(buffer->data(), values.data(), values.size() * sizeof(T)));
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  return buffer;
}

}  // namespace

GpuSequences::GpuSequences(CudaDevice& device, const SequenceShape& shape)
    : shape_(shape), padded_(PaddedHeadDim(shape.head_dim)), attention_(device, CudaAttention::Kernel::kForManyRows) {
  attention_shape_.layout = {padded_, padded_, kernels::cuda::KvType::kBF16};
  block_bytes_ = (attention_shape_.layout.bytes() + 255) / 256 * 256;
  attention_shape_.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
}

absl::StatusOr<std::unique_ptr<GpuSequences>> GpuSequences::Create(CudaDevice& device, const SequenceShape& shape) {
  auto sequences = std::unique_ptr<GpuSequences>(new GpuSequences(device, shape));
  DT_ASSIGN_OR_RETURN(const auto stream, device.CreateCudaStream());
  const int64_t segments = (shape.length + CudaKvLayout::kTokens - 1) / CudaKvLayout::kTokens;
  const int64_t block_bytes = sequences->block_bytes_;
  const int64_t blocks = shape.count * shape.heads * segments;
  const int64_t bytes = CudaKvLayout::kArenaLead + blocks * block_bytes;
  DT_ASSIGN_OR_RETURN(sequences->blocks_, device.Allocate(bytes));
  sequences->attention_shape_.arena = sequences->blocks_->data();
  sequences->attention_shape_.arena_bytes = bytes;
  std::vector<const std::byte*> table(blocks);
  for (int64_t i = 0; i < blocks; ++i)
    table[i] = sequences->blocks_->data() + CudaKvLayout::kArenaLead + i * block_bytes;
  DT_ASSIGN_OR_RETURN(sequences->table_, Upload(device, *stream, table));
  if (!shape.padded) {
    const int64_t numbers = shape.count * shape.length * shape.heads * sequences->padded_;
    DT_ASSIGN_OR_RETURN(sequences->q_, device.Allocate(numbers * sizeof(BF16)));
  }
  DT_RETURN_IF_ERROR(sequences->Plan(*stream));
  DT_RETURN_IF_ERROR(stream->SynchronizeStatus());
  return sequences;
}

absl::Status GpuSequences::Plan(CudaStream& stream) {
  const int64_t segments = (shape_.length + CudaKvLayout::kTokens - 1) / CudaKvLayout::kTokens;
  const int64_t o_row = int64_t{shape_.heads} * padded_, q_row = shape_.padded ? 3 * o_row : o_row;
  const int64_t token_step = shape_.by_token ? shape_.count : 1, sequence_step = shape_.by_token ? 1 : shape_.length;
  const auto* table = reinterpret_cast<const std::byte* const*>(table_->data());
  std::vector<kernels::cuda::CudaAttentionItem> items(shape_.count);
  for (int64_t i = 0; i < shape_.count; ++i) {
    kernels::cuda::CudaAttentionItem& item = items[i];
    item.q_rows = static_cast<int32_t>(shape_.length);
    item.kv_heads = shape_.heads;
    item.first_position = shape_.length - 1;
    item.token_end = shape_.length;
    item.q_offset = i * sequence_step * q_row;
    item.q_row_step = token_step * q_row;
    item.o_offset = i * sequence_step * o_row;
    item.o_row_step = token_step * o_row;
    item.blocks = table + i * shape_.heads * segments;
    item.head_step = segments;
  }
  return attention_.Plan(stream, attention_shape_, items);
}

absl::Status GpuSequences::Attend(CudaStream& stream, const BF16* query_key_value, BF16* o) {
  kernels::cuda::PackHeadsLaunch pack;
  pack.source = query_key_value;
  pack.q = shape_.padded ? nullptr : q_->data();
  pack.blocks = blocks_->data() + CudaKvLayout::kArenaLead;
  pack.block_step = block_bytes_;
  pack.head_step = shape_.padded ? padded_ : shape_.head_dim;
  pack.row_step = 3 * int64_t{shape_.heads} * pack.head_step;
  pack.dim = shape_.head_dim;
  pack.heads = shape_.heads;
  pack.sequences = static_cast<int32_t>(shape_.count);
  pack.length = static_cast<int32_t>(shape_.length);
  pack.by_token = shape_.by_token ? 1 : 0;
  pack.layout = attention_shape_.layout;
  DT_RETURN_IF_ERROR(kernels::cuda::PackHeads(stream, pack));
  kernels::cuda::CudaAttentionRun run;
  run.q = shape_.padded ? static_cast<const void*>(query_key_value) : q_->data();
  run.o = o;
  return attention_.Run(stream, attention_shape_, run);
}

}  // namespace dovetail::spatio_temporal
