#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "engine/measurements/device/gpu_rates.h"
#include "engine/measurements/device/gpu_timer.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::engine {
namespace {

using kernels::cuda::CudaAttention;
using kernels::cuda::CudaAttentionItem;
using kernels::cuda::CudaAttentionShape;
using kernels::cuda::CudaDevice;
using kernels::cuda::CudaKvLayout;
using kernels::cuda::KvType;

constexpr int kKvHeads = 8;
constexpr int kDecodesInARun = 2;  // of one layer: what it reads is more than the L2 holds

// One attention op over sequences of one length, whose blocks lie scattered in one arena, as after long service.
class AttentionCall {
 public:
  AttentionCall(CudaDevice& gpu, GpuTimer& timer, const CudaKvLayout& layout, int group)
      : gpu_(gpu), timer_(timer), group_(group), attention_(gpu) {
    shape_.group = group;
    shape_.layout = layout;
    shape_.scale = 1.0f / std::sqrt(static_cast<float>(layout.key_dim));
  }

  absl::StatusOr<double> Seconds(int sequences, int64_t rows, int64_t end, int calls, double seconds) {
    DT_RETURN_IF_ERROR(MakeBlocks(sequences, end));
    const int64_t row = int64_t{kKvHeads} * group_ * shape_.layout.key_dim;
    const int64_t elements = sequences * rows * row;
    DT_ASSIGN_OR_RETURN(const auto q, gpu_.Allocate(static_cast<size_t>(elements) * kBf16Bytes));
    DT_ASSIGN_OR_RETURN(const auto o, gpu_.Allocate(static_cast<size_t>(elements) * kBf16Bytes));
    DT_RETURN_IF_ERROR(FillRandom(timer_.stream(), {.out = q->data(), .range = 1, .seed = 2, .count = elements}));
    const int64_t segments = (end + kSegmentTokens - 1) / kSegmentTokens;
    std::vector<CudaAttentionItem> items(static_cast<size_t>(sequences));
    for (size_t i = 0; i < items.size(); ++i) {
      CudaAttentionItem& item = items[i];
      item.q_rows = static_cast<int32_t>(rows);
      item.kv_heads = kKvHeads;
      item.first_position = end - rows;
      item.token_end = end;
      item.q_offset = item.o_offset = static_cast<int64_t>(i) * rows * row;
      item.q_row_step = item.o_row_step = row;
      item.blocks =
          reinterpret_cast<const std::byte* const*>(table_->data()) + static_cast<int64_t>(i) * segments * kKvHeads;
      item.head_step = segments;
    }
    DT_RETURN_IF_ERROR(attention_.Plan(timer_.stream(), shape_, items));
    return timer_.Seconds(
        calls, seconds, [&](int) { return attention_.Run(timer_.stream(), shape_, {.q = q->data(), .o = o->data()}); });
  }

 private:
  absl::Status MakeBlocks(int sequences, int64_t end) {
    const size_t bytes = shape_.layout.bytes();
    const auto count = static_cast<size_t>(sequences * kKvHeads * ((end + kSegmentTokens - 1) / kSegmentTokens));
    const size_t arena_bytes = CudaKvLayout::kArenaLead + count * bytes;
    DT_ASSIGN_OR_RETURN(arena_, gpu_.Allocate(arena_bytes));
    // Small positive numbers in 16 bits, and in 8.
    DT_RETURN_IF_ERROR(timer_.stream().Fill(arena_->data(), 0x21, arena_bytes));
    shape_.arena = arena_->data();
    shape_.arena_bytes = arena_bytes;
    std::vector<const std::byte*> blocks(count);
    for (size_t i = 0; i < count; ++i) blocks[i] = arena_->data() + CudaKvLayout::kArenaLead + i * bytes;
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(1));
    DT_ASSIGN_OR_RETURN(table_, gpu_.Allocate(count * sizeof(blocks[0])));
    DT_RETURN_IF_ERROR(timer_.stream().Copy(table_->data(), blocks.data(), count * sizeof(blocks[0])));
    return timer_.stream().SynchronizeStatus();
  }

  CudaDevice& gpu_;
  GpuTimer& timer_;
  const int group_;
  CudaAttentionShape shape_;
  CudaAttention attention_;
  std::unique_ptr<kernels::Buffer> arena_, table_;
};

absl::StatusOr<plan::AttentionRates> MeasureShape(CudaDevice& gpu, GpuTimer& timer, KvStorage storage, int dim,
                                                  int group, double seconds, const GpuSizes& sizes) {
  const KvType type = storage == KvStorage::kE4M3 ? KvType::kE4M3 : KvType::kBF16;
  AttentionCall call(gpu, timer, CudaKvLayout{dim, dim, type}, group);
  plan::AttentionRates rates{.kv = DType::kBF16, .head_dim = dim, .group = group, .storage = storage};
  DT_ASSIGN_OR_RETURN(const double decode, call.Seconds(sizes.sequences, 1, sizes.context, kDecodesInARun, seconds));
  rates.decode_bytes_per_s = static_cast<double>(sizes.sequences) * kKvHeads * static_cast<double>(sizes.context) *
                             KvTokenBytes(rates.kv, storage, dim, dim) / decode;
  const int64_t rows = sizes.prompt;
  DT_ASSIGN_OR_RETURN(const double prompt, call.Seconds(1, rows, rows, /*calls=*/1, seconds));
  const double pairs = static_cast<double>(rows) * static_cast<double>(rows + 1) / 2;
  rates.prompt_flops_per_s = 4.0 * dim * group * kKvHeads * pairs / prompt;
  return rates;
}

}  // namespace

absl::StatusOr<std::vector<plan::AttentionRates>> MeasureGpuAttention(CudaDevice& gpu, double seconds,
                                                                      const GpuSizes& sizes) {
  DT_ASSIGN_OR_RETURN(GpuTimer timer, GpuTimer::Create(gpu));
  std::vector<plan::AttentionRates> all;
  for (const KvStorage storage : {KvStorage::kAsSent, KvStorage::kE4M3})
    for (const int dim : {64, 128, 256})
      for (const int group : {1, 4, 8}) {
        DT_ASSIGN_OR_RETURN(const plan::AttentionRates rates,
                            MeasureShape(gpu, timer, storage, dim, group, seconds, sizes));
        all.push_back(rates);
      }
  return all;
}

}  // namespace dovetail::engine
