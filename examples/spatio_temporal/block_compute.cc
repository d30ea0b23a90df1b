#include "examples/spatio_temporal/block_compute.h"

#include <algorithm>
#include <cmath>

#include "kernels/activation.h"
#include "kernels/convert.h"
#include "kernels/gemm.h"
#include "kernels/kv_append.h"
#include "kernels/op_context.h"
#include "kernels/rms_norm.h"

namespace dovetail::spatio_temporal {
namespace {

constexpr int64_t kRowsAtOnce = 512;                     // through the dense operators
constexpr int kQueriesAtOnce = 128;                      // of a sequence
constexpr int kQueriesACall = 512;                       // of all sequences: what the scratch is sized for
constexpr int64_t kBlockBytesAtOnce = int64_t{4} << 20;  // of K and V of sequences that are attended together
constexpr float kNormEps = 1e-6f;

// Calls part(rows, first row among all of them): at most kRowsAtOnce at once.
template <typename Part>
absl::Status ForParts(const BlockCompute::Rows& rows, int64_t channels, Part&& part) {
  const int64_t groups_at_once = std::max<int64_t>(1, kRowsAtOnce / rows.rows);
  for (int64_t group = 0; group < rows.groups; group += groups_at_once) {
    for (int64_t row = 0; row < rows.rows; row += kRowsAtOnce) {
      BlockCompute::Rows some = rows;
      some.first = rows.first + group * rows.step + row * channels;
      some.groups = std::min(groups_at_once, rows.groups - group);
      some.rows = std::min(kRowsAtOnce, rows.rows - row);
      DT_RETURN_IF_ERROR(part(some, group * rows.rows + row));
    }
  }
  return absl::OkStatus();
}

}  // namespace

BlockCompute::BlockCompute(const Config& config, kernels::Device& device)
    : config_(config), stream_(device.CreateStream()) {}

template <typename T>
absl::StatusOr<T*> BlockCompute::Room(kernels::AlignedBuffer& buffer, int64_t count) {
  const size_t bytes = count * sizeof(T);
  if (buffer.size_bytes() < bytes) {
    DT_ASSIGN_OR_RETURN(buffer, kernels::AlignedBuffer::Create(bytes));
  }
  return reinterpret_cast<T*>(buffer.data());
}

absl::Status BlockCompute::Project(const BlockWeights& weights, const Rows& rows, BF16* q, BF16* k, BF16* v) {
  if (config_.exchange_only) return absl::OkStatus();
  const int64_t c = config_.channels;
  const kernels::OpContext context = kernels::ContextOf(*stream_);
  return ForParts(rows, c, [&](const Rows& part, int64_t first) -> absl::Status {
    const int64_t n = part.count();
    DT_ASSIGN_OR_RETURN(float* const x, Room<float>(x_, n * c));
    DT_ASSIGN_OR_RETURN(float* const normed, Room<float>(normed_, n * c));
    DT_ASSIGN_OR_RETURN(float* const wide, Room<float>(wide_, 3 * n * c));
    DT_ASSIGN_OR_RETURN(std::byte* const scratch, Room<std::byte>(gemm_scratch_, kernels::GemmScratchBytes(n, c)));
    kernels::ToFloat(context, DType::kBF16, part.first, x, {part.groups, part.rows * c, part.step, 0});
    DT_RETURN_IF_ERROR(kernels::RmsNorm(context, {.x = x,
                                                  .weight = weights.attention_norm.data(),
                                                  .eps = kNormEps,
                                                  .rows = n,
                                                  .size = static_cast<int>(c),
                                                  .out = normed}));
    const kernels::GemmOutput outputs[] = {{.weights = &weights.query, .y = wide, .y_stride = c},
                                           {.weights = &weights.key, .y = wide + n * c, .y_stride = c},
                                           {.weights = &weights.value, .y = wide + 2 * n * c, .y_stride = c}};
    DT_RETURN_IF_ERROR(kernels::Gemm({normed, c, n, outputs, {scratch, gemm_scratch_.size_bytes()}}, *stream_));
    BF16* const out[] = {q + first * c, k + first * c, v + first * c};
    for (int i = 0; i < 3; ++i) kernels::FromFloat(context, DType::kBF16, wide + i * n * c, out[i], {1, n * c});
    return absl::OkStatus();
  });
}

absl::Status BlockCompute::Finish(const BlockWeights& weights, const BF16* o, const Rows& rows) {
  if (config_.exchange_only) return absl::OkStatus();
  const int64_t c = config_.channels, mlp = config_.mlp();
  const kernels::OpContext context = kernels::ContextOf(*stream_);
  return ForParts(rows, c, [&](const Rows& part, int64_t first) -> absl::Status {
    const int64_t n = part.count();
    DT_ASSIGN_OR_RETURN(float* const x, Room<float>(x_, n * c));
    DT_ASSIGN_OR_RETURN(float* const other, Room<float>(normed_, n * c));
    DT_ASSIGN_OR_RETURN(float* const wide, Room<float>(wide_, 2 * n * mlp));
    DT_ASSIGN_OR_RETURN(std::byte* const scratch, Room<std::byte>(gemm_scratch_, kernels::GemmScratchBytes(n, mlp)));
    const std::span<std::byte> gemm_scratch(scratch, gemm_scratch_.size_bytes());
    kernels::ToFloat(context, DType::kBF16, part.first, x, {part.groups, part.rows * c, part.step, 0});
    kernels::ToFloat(context, DType::kBF16, o + first * c, other, {1, n * c});
    const kernels::GemmOutput out = {.weights = &weights.out, .y = x, .y_stride = c, .accumulate = true};
    DT_RETURN_IF_ERROR(kernels::Gemm({other, c, n, {&out, 1}, gemm_scratch}, *stream_));
    DT_RETURN_IF_ERROR(kernels::RmsNorm(context, {.x = x,
                                                  .weight = weights.mlp_norm.data(),
                                                  .eps = kNormEps,
                                                  .rows = n,
                                                  .size = static_cast<int>(c),
                                                  .out = other}));
    const kernels::GemmOutput gate_up[] = {{.weights = &weights.gate, .y = wide, .y_stride = mlp},
                                           {.weights = &weights.up, .y = wide + n * mlp, .y_stride = mlp}};
    DT_RETURN_IF_ERROR(kernels::Gemm({other, c, n, gate_up, gemm_scratch}, *stream_));
    DT_RETURN_IF_ERROR(kernels::GatedActivation(context, {.activation = kernels::Activation::kGeluTanh,
                                                          .gate = wide,
                                                          .up = wide + n * mlp,
                                                          .out = wide,
                                                          .rows = n,
                                                          .size = mlp}));
    const kernels::GemmOutput down = {.weights = &weights.down, .y = x, .y_stride = c, .accumulate = true};
    DT_RETURN_IF_ERROR(kernels::Gemm({wide, mlp, n, {&down, 1}, gemm_scratch}, *stream_));
    kernels::FromFloat(context, DType::kBF16, x, part.first, {part.groups, part.rows * c, 0, part.step});
    return absl::OkStatus();
  });
}

absl::Status BlockCompute::Attend(const Sequences& sequences) {
  if (config_.exchange_only) return absl::OkStatus();
  const kernels::KvBlockLayout layout{static_cast<int>(config_.head_dim()), static_cast<int>(config_.head_dim()),
                                      DType::kBF16};
  const int64_t segments = (sequences.length + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t at_once =
      std::max<int64_t>(1, kBlockBytesAtOnce / (segments * sequences.heads * static_cast<int64_t>(layout.bytes())));
  for (int64_t first = 0; first < sequences.count; first += at_once)
    DT_RETURN_IF_ERROR(AttendBatch(sequences, first, std::min(at_once, sequences.count - first)));
  return absl::OkStatus();
}

// The kernel is causal: it hides what lies behind a query's position. Queries that stand at the sequence's last token
// or behind it see all of it.
absl::Status BlockCompute::AttendBatch(const Sequences& sequences, int64_t first, int64_t count) {
  const int dim = static_cast<int>(config_.head_dim());
  const auto length = static_cast<int>(sequences.length);
  const kernels::AttentionShape shape{1, dim, dim, 1 / std::sqrt(static_cast<float>(dim)), 0, DType::kBF16};
  const size_t block_bytes = (shape.layout().bytes() + 63) / 64 * 64;
  const int segments = (length + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t blocks = count * sequences.heads * segments;
  DT_ASSIGN_OR_RETURN(std::byte* const memory, Room<std::byte>(blocks_, blocks * block_bytes));
  table_.resize(blocks);
  for (int64_t i = 0; i < blocks; ++i) table_[i] = memory + i * block_bytes;
  std::vector<kernels::KvAppendItem> appends;
  std::vector<kernels::AttentionItem> items;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = (first + i) * sequences.sequence_step;
    const kernels::KvBlockTable table{table_.data() + i * sequences.heads * segments, segments, 0, 0, segments};
    appends.push_back({.k = sequences.k + at,
                       .v = sequences.v + at,
                       .k_row_step = sequences.row_step,
                       .v_row_step = sequences.row_step,
                       .rows = length,
                       .kv_heads = sequences.heads,
                       .first_position = 0,
                       .blocks = table});
    for (int row = 0; row < length; row += kQueriesAtOnce) {
      kernels::AttentionItem item;
      item.q = sequences.q + at + row * sequences.row_step;
      item.q_row_step = item.o_row_step = sequences.row_step;
      item.q_rows = std::min(kQueriesAtOnce, length - row);
      item.kv_heads = sequences.heads;
      item.first_position = length - 1;
      item.token_end = length;
      item.blocks = table;
      item.o = sequences.o + at + row * sequences.row_step;
      items.push_back(item);
    }
  }
  const kernels::OpContext context = kernels::ContextOf(*stream_);
  DT_RETURN_IF_ERROR(kernels::KvAppend(context, shape.layout(), appends));
  const size_t group = std::max<size_t>(1, kQueriesACall / std::min(kQueriesAtOnce, length));
  const kernels::AttentionLimits limits{static_cast<int>(group), static_cast<int64_t>(group) * kQueriesAtOnce,
                                        sequences.heads, length, stream_->pool().threads()};
  DT_ASSIGN_OR_RETURN(std::byte* const scratch,
                      Room<std::byte>(attention_scratch_, kernels::PagedAttentionScratchBytes(shape, limits)));
  for (size_t i = 0; i < items.size(); i += group) {
    const std::span<const kernels::AttentionItem> some(items.data() + i, std::min(group, items.size() - i));
    DT_ASSIGN_OR_RETURN(
        kernels::PagedAttention attention,
        kernels::PagedAttention::Begin(context, shape, some, {scratch, attention_scratch_.size_bytes()}));
    attention.AttendRest();
    attention.Finish();
  }
  return absl::OkStatus();
}

}  // namespace dovetail::spatio_temporal
