#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/measurements/device/best_time.h"
#include "engine/measurements/device/device_kernels.h"
#include "kernels/aligned_buffer.h"
#include "kernels/op_context.h"
#include "kernels/paged_attention.h"

namespace dovetail::engine {
namespace {

using kernels::AlignedBuffer;
using kernels::AttentionItem;
using kernels::AttentionShape;

constexpr int kKvHeads = 4;
constexpr int64_t kContext = 2048;             // of a sequence that decodes
constexpr size_t kKvBytes = size_t{64} << 20;  // read by one call of decodes: more than caches hold
constexpr int64_t kPromptRows = 256, kPromptEnd = 512;

// One attention op over sequences of one length, their blocks scattered as after long service.
class AttentionCall {
 public:
  AttentionCall(const AttentionShape& shape, int sequences, int64_t rows, int64_t end, kernels::OpContext context)
      : shape_(shape), context_(context), rows_(rows), end_(end), items_(static_cast<size_t>(sequences)) {}

  absl::Status Prepare() {
    const int64_t segments = (end_ + kSegmentTokens - 1) / kSegmentTokens;
    const size_t count = items_.size() * kKvHeads * static_cast<size_t>(segments), bytes = shape_.layout().bytes();
    DT_ASSIGN_OR_RETURN(arena_, AlignedBuffer::Create(count * bytes));
    FillWithNumbers(arena_.data(), arena_.size_bytes());
    blocks_.resize(count);
    for (size_t i = 0; i < count; ++i) blocks_[i] = arena_.data() + i * bytes;
    std::shuffle(blocks_.begin(), blocks_.end(), std::mt19937_64(1));
    const size_t row_bytes = static_cast<size_t>(kKvHeads * shape_.group * shape_.key_dim) * SizeOf(shape_.dtype);
    q_.resize(row_bytes * static_cast<size_t>(rows_));
    FillWithNumbers(q_.data(), q_.size());
    o_.resize(q_.size() * items_.size());
    for (size_t i = 0; i < items_.size(); ++i) {
      AttentionItem& item = items_[i];
      item.q = q_.data();
      item.q_rows = static_cast<int>(rows_);
      item.kv_heads = kKvHeads;
      item.first_position = end_ - rows_;
      item.token_end = end_;
      item.blocks = {.blocks = blocks_.data() + i * kKvHeads * static_cast<size_t>(segments),
                     .head_step = segments,
                     .segments = static_cast<int32_t>(segments)};
      item.o = o_.data() + i * q_.size();
    }
    const kernels::AttentionLimits limits{.items = static_cast<int>(items_.size()),
                                          .rows = rows_ * static_cast<int64_t>(items_.size()),
                                          .kv_heads = kKvHeads,
                                          .tokens = end_,
                                          .threads = context_.pool->threads()};
    DT_ASSIGN_OR_RETURN(scratch_, AlignedBuffer::Create(kernels::PagedAttentionScratchBytes(shape_, limits)));
    return absl::OkStatus();
  }

  absl::Status Run() {
    DT_ASSIGN_OR_RETURN(auto op, kernels::PagedAttention::Begin(context_, shape_, items_, scratch_.bytes()));
    op.AttendRest();
    op.Finish();
    return absl::OkStatus();
  }

 private:
  void FillWithNumbers(std::byte* data, size_t bytes) const {
    std::byte pattern[1024];
    for (size_t i = 0; i < sizeof(pattern); i += SizeOf(shape_.dtype))
      kernels::KvBlockLayout::StoreElement(shape_.dtype, static_cast<float>(i % 37) * 0.01f, pattern + i);
    for (size_t at = 0; at < bytes; at += sizeof(pattern))
      std::memcpy(data + at, pattern, std::min(sizeof(pattern), bytes - at));
  }

  const AttentionShape shape_;
  const kernels::OpContext context_;
  const int64_t rows_, end_;
  AlignedBuffer arena_, scratch_;
  std::vector<std::byte*> blocks_;
  std::vector<std::byte> q_, o_;
  std::vector<AttentionItem> items_;
};

absl::StatusOr<double> SecondsOf(const AttentionShape& shape, int sequences, int64_t rows, int64_t end,
                                 kernels::OpContext context, double seconds) {
  AttentionCall call(shape, sequences, rows, end, context);
  DT_RETURN_IF_ERROR(call.Prepare());
  absl::Status status;
  const double best = BestSeconds(seconds, [&] { status.Update(call.Run()); });
  DT_RETURN_IF_ERROR(status);
  return best;
}

absl::StatusOr<plan::AttentionRates> MeasureShape(DType kv, KvStorage storage, int dim, int group,
                                                  kernels::OpContext context, double seconds) {
  const AttentionShape shape{.group = group,
                             .key_dim = dim,
                             .value_dim = dim,
                             .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                             .dtype = kv,
                             .storage = storage};
  const double token_bytes = kKvHeads * KvTokenBytes(kv, storage, dim, dim);  // without what blocks are padded with
  const int sequences = std::max(1, static_cast<int>(static_cast<double>(kKvBytes) / (token_bytes * kContext)));
  plan::AttentionRates rates{.kv = kv, .head_dim = dim, .group = group, .storage = storage};
  DT_ASSIGN_OR_RETURN(const double decode, SecondsOf(shape, sequences, 1, kContext, context, seconds));
  DT_ASSIGN_OR_RETURN(const double prompt, SecondsOf(shape, 1, kPromptRows, kPromptEnd, context, seconds));
  const double pairs = static_cast<double>(kPromptRows * kPromptEnd) - kPromptRows * (kPromptRows - 1) / 2.0;
  rates.decode_bytes_per_s = sequences * token_bytes * kContext / decode;
  rates.prompt_flops_per_s = 4.0 * dim * group * kKvHeads * pairs / prompt;
  return rates;
}

}  // namespace

absl::StatusOr<std::vector<plan::AttentionRates>> MeasureAttention(kernels::Stream& stream, double seconds) {
  std::vector<plan::AttentionRates> all;
  const auto measure = [&](DType kv, KvStorage storage, std::initializer_list<int> dims) -> absl::Status {
    for (const int dim : dims)
      for (const int group : {1, 4, 8}) {
        DT_ASSIGN_OR_RETURN(plan::AttentionRates rates,
                            MeasureShape(kv, storage, dim, group, kernels::ContextOf(stream), seconds));
        all.push_back(rates);
      }
    return absl::OkStatus();
  };
  for (const DType kv : {DType::kBF16, DType::kF16, DType::kF32})
    DT_RETURN_IF_ERROR(measure(kv, KvStorage::kAsSent, {32, 64, 128, 256}));
  for (const KvStorage storage : {KvStorage::kInt8, KvStorage::kE4M3})
    DT_RETURN_IF_ERROR(measure(DType::kBF16, storage, {64, 128}));
  return all;
}

}  // namespace dovetail::engine
