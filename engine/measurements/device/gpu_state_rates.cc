#include <algorithm>
#include <memory>
#include <vector>

#include "engine/measurements/device/gpu_rates.h"
#include "engine/measurements/device/gpu_timer.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/state/cuda_state.h"

namespace dovetail::engine {
namespace {

using kernels::LinearStateShape;
using kernels::cuda::CudaDevice;
using kernels::cuda::StateItem;
using kernels::cuda::StateLaunch;
using kernels::cuda::WireType;

constexpr int kHeads = 32;
constexpr int64_t kBefore = 2 * kSegmentTokens + kSegmentTokens / 4;  // tokens of a sequence that decodes
constexpr size_t kMostWorkspace = size_t{512} << 20;
constexpr float kGate = -0.05f;  // of a decay its logarithm; what a rate is does not change how long it takes

// One linear op over sequences that stand at one position and get as many tokens each.
class StateCall {
 public:
  StateCall(CudaDevice& gpu, GpuTimer& timer, const LinearStateShape& shape, int sequences, int64_t rows, int64_t first)
      : gpu_(gpu), timer_(timer), shape_(shape), sequences_(sequences), rows_(rows), first_(first) {}

  absl::StatusOr<double> Decode(double seconds) {
    DT_RETURN_IF_ERROR(Prepare());
    return timer_.Seconds(1, seconds, [&](int) { return AppendStates(timer_.stream(), launch_); });
  }
  absl::StatusOr<double> Prompt(double seconds) {
    DT_RETURN_IF_ERROR(Prepare());
    if (!StatesRunInChunks(gpu_, launch_)) return Decode(seconds);
    const size_t bytes = StateWorkspaceBytes(launch_, kMostWorkspace);
    DT_ASSIGN_OR_RETURN(const auto workspace, gpu_.Allocate(bytes));
    return timer_.Seconds(1, seconds, [&](int) {
      return AppendStatesInChunks(timer_.stream(), launch_, {workspace->data(), bytes});
    });
  }

 private:
  template <typename T>
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Upload(const std::vector<T>& values) {
    DT_ASSIGN_OR_RETURN(auto buffer, gpu_.Allocate(values.size() * sizeof(T)));
    DT_RETURN_IF_ERROR(timer_.stream().Copy(buffer->data(), values.data(), values.size() * sizeof(T)));
    DT_RETURN_IF_ERROR(timer_.stream().SynchronizeStatus());
    return buffer;
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Random(int64_t count, float range) {
    DT_ASSIGN_OR_RETURN(auto buffer, gpu_.Allocate(static_cast<size_t>(count) * kBf16Bytes));
    DT_RETURN_IF_ERROR(FillRandom(timer_.stream(), {.out = buffer->data(), .range = range, .seed = 5, .count = count}));
    return buffer;
  }

  // q, then k of all rows and v behind them, then gates; all blocks of all sequences are kept.
  absl::Status Prepare() {
    const size_t block_bytes = kernels::LinearStateLayout(shape_).bytes();
    DT_ASSIGN_OR_RETURN(launch_, kernels::cuda::StateLaunchFor(shape_, block_bytes, WireType::kBF16));
    launch_.token_decay = 1;
    launch_.token_rate = launch_.delta;
    launch_.gates = (launch_.vector_decay != 0 ? shape_.key_dim : 1) + launch_.token_rate;
    launch_.heads = launch_.model_heads = kHeads;
    launch_.unit_count = sequences_ * kHeads;
    launch_.even = 1;
    launch_.step = static_cast<int64_t>(block_bytes);
    const int64_t before = std::max<int64_t>(0, first_ / kSegmentTokens - 1);
    const int64_t last = (first_ + rows_ - 1) / kSegmentTokens, held = last - before + 1;
    const int64_t all_rows = sequences_ * rows_ * kHeads, dim = shape_.key_dim, vectors = all_rows * dim * 4;
    DT_ASSIGN_OR_RETURN(arena_, Random(sequences_ * held * kHeads * launch_.step / 2, 0.01f));
    DT_ASSIGN_OR_RETURN(query_, Random(all_rows * dim, 0.15f));
    DT_ASSIGN_OR_RETURN(key_value_, Random(vectors / 2 + all_rows * launch_.gates * 2, 0.15f));
    const std::vector<float> gates(static_cast<size_t>(all_rows * launch_.gates), kGate);
    DT_RETURN_IF_ERROR(timer_.stream().Copy(key_value_->data() + vectors, gates.data(), gates.size() * sizeof(float)));
    DT_RETURN_IF_ERROR(timer_.stream().SynchronizeStatus());
    DT_ASSIGN_OR_RETURN(out_, gpu_.Allocate(static_cast<size_t>(all_rows * dim) * kBf16Bytes));
    std::vector<StateItem> items(static_cast<size_t>(sequences_));
    std::vector<const std::byte*> blocks;
    for (size_t i = 0; i < items.size(); ++i) {
      StateItem& item = items[i];
      const int64_t row = static_cast<int64_t>(i) * rows_ * kHeads;
      item.query_offset = item.key_offset = item.out_offset = row * dim * 2;
      item.value_offset = (all_rows + row) * dim * 2;
      item.gate_offset = vectors + row * launch_.gates * 4;
      item.rows = static_cast<int32_t>(rows_);
      item.heads = kHeads;
      item.first_position = first_;
      item.first_block = before;
      item.table = static_cast<int64_t>(blocks.size());
      for (int64_t block = 0; block < held; ++block)
        blocks.push_back(arena_->data() + (static_cast<int64_t>(i) * held + block) * kHeads * launch_.step);
    }
    DT_ASSIGN_OR_RETURN(items_, Upload(items));
    DT_ASSIGN_OR_RETURN(table_, Upload(blocks));
    launch_.items = reinterpret_cast<const StateItem*>(items_->data());
    launch_.blocks = reinterpret_cast<const std::byte* const*>(table_->data());
    launch_.query = query_->data();
    launch_.key_value = key_value_->data();
    launch_.out = out_->data();
    launch_.chunk_end = static_cast<int32_t>(last - first_ / kSegmentTokens + 1);
    return absl::OkStatus();
  }

  CudaDevice& gpu_;
  GpuTimer& timer_;
  const LinearStateShape shape_;
  const int sequences_;
  const int64_t rows_, first_;
  StateLaunch launch_;
  std::unique_ptr<kernels::Buffer> arena_, query_, key_value_, out_, items_, table_;
};

}  // namespace

absl::StatusOr<std::vector<plan::StateRates>> MeasureGpuStates(CudaDevice& gpu, double seconds, const GpuSizes& sizes) {
  using kernels::DecayForm;
  using kernels::StateUpdate;
  DT_ASSIGN_OR_RETURN(GpuTimer timer, GpuTimer::Create(gpu));
  std::vector<plan::StateRates> all;
  for (const int dim : {64, 128})
    for (const bool delta : {false, true})
      for (const bool vector : {false, true}) {
        const LinearStateShape shape{dim, dim, vector ? DecayForm::kVector : DecayForm::kScalar,
                                     delta ? StateUpdate::kDelta : StateUpdate::kAdd, DType::kF32};
        const double values = static_cast<double>(dim) * dim * kHeads;
        StateCall decodes(gpu, timer, shape, sizes.sequences, 1, kBefore),
            prompt(gpu, timer, shape, 1, sizes.prompt, 0);
        DT_ASSIGN_OR_RETURN(const double decode, decodes.Decode(seconds));
        DT_ASSIGN_OR_RETURN(const double read, prompt.Prompt(seconds));
        all.push_back({dim, delta, vector, decode / (values * sizes.sequences),
                       read / (values * static_cast<double>(sizes.prompt))});
      }
  return all;
}

}  // namespace dovetail::engine
