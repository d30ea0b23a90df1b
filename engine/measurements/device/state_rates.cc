#include <algorithm>
#include <vector>

#include "engine/measurements/device/best_time.h"
#include "engine/measurements/device/device_kernels.h"
#include "kernels/aligned_buffer.h"
#include "kernels/linear_state.h"
#include "kernels/op_context.h"

namespace dovetail::engine {
namespace {

using kernels::AlignedBuffer;

// Heads of one linear op with the blocks that a run of tokens needs.
class StateCall {
 public:
  StateCall(const kernels::LinearStateShape& shape, int heads, int rows, int64_t position, kernels::OpContext context)
      : shape_(shape), context_(context), rows_(rows), position_(position), items_(static_cast<size_t>(heads)) {}

  absl::Status Prepare() {
    const kernels::LinearStateLayout layout(shape_);
    const int64_t first = std::max<int64_t>(0, position_ / kSegmentTokens - 1);
    const int64_t blocks = (position_ + rows_ - 1) / kSegmentTokens - first + 1;
    DT_ASSIGN_OR_RETURN(arena_, AlignedBuffer::Create(items_.size() * static_cast<size_t>(blocks) * layout.bytes()));
    const size_t width = static_cast<size_t>(rows_) * static_cast<size_t>(shape_.key_dim);
    input_.assign(width, 0.01f);
    decay_.assign(width, -0.1f);
    beta_.assign(static_cast<size_t>(rows_), 0.5f);
    o_.resize(width * items_.size());
    for (size_t i = 0; i < items_.size() * static_cast<size_t>(blocks); ++i)
      pieces_.push_back(arena_.data() + i * layout.bytes());
    const bool delta = shape_.update == kernels::StateUpdate::kDelta;
    for (size_t i = 0; i < items_.size(); ++i) {
      kernels::LinearStateItem& item = items_[i];
      item.q = item.k = item.v = input_.data();
      item.log_decay = decay_.data();
      item.beta = delta ? beta_.data() : nullptr;
      item.o = o_.data() + i * width;
      item.q_step = item.k_step = item.v_step = item.o_step = shape_.key_dim;
      item.decay_step = shape_.decay == kernels::DecayForm::kVector ? shape_.key_dim : 1;
      item.beta_step = delta ? 1 : 0;
      item.rows = rows_;
      item.first_position = position_;
      item.pieces = pieces_.data() + i * static_cast<size_t>(blocks);
      item.piece_bytes = layout.bytes();
      item.first_block = first;
      item.blocks = blocks;
    }
    DT_ASSIGN_OR_RETURN(scratch_, AlignedBuffer::Create(kernels::LinearStateScratchBytes(shape_, items_) + 64));
    return absl::OkStatus();
  }
  absl::Status Run() { return kernels::LinearState(context_, shape_, items_, scratch_.bytes()); }

 private:
  const kernels::LinearStateShape shape_;
  const kernels::OpContext context_;
  const int rows_;
  const int64_t position_;
  AlignedBuffer arena_, scratch_;
  std::vector<float> input_, decay_, beta_, o_;
  std::vector<std::byte*> pieces_;
  std::vector<kernels::LinearStateItem> items_;
};

// Seconds of a head's token.
absl::StatusOr<double> SecondsOf(const kernels::LinearStateShape& shape, int heads, int rows, int64_t position,
                                 kernels::OpContext context, double seconds) {
  StateCall call(shape, heads, rows, position, context);
  DT_RETURN_IF_ERROR(call.Prepare());
  absl::Status status;
  const double best = BestSeconds(seconds, [&] { status.Update(call.Run()); });
  DT_RETURN_IF_ERROR(status);
  return best / heads / rows;
}

}  // namespace

absl::StatusOr<std::vector<plan::StateRates>> MeasureStates(kernels::Stream& stream, double seconds) {
  using kernels::DecayForm;
  using kernels::StateUpdate;
  constexpr int64_t kMiddle = 96;  // of a block, after a full one
  constexpr double kStateBytes = 64 << 20;
  std::vector<plan::StateRates> all;
  for (const int dim : {32, 64, 128})
    for (const bool delta : {false, true})
      for (const bool vector : {false, true}) {
        const kernels::LinearStateShape shape{dim, dim, vector ? DecayForm::kVector : DecayForm::kScalar,
                                              delta ? StateUpdate::kDelta : StateUpdate::kAdd};
        const double values = static_cast<double>(dim) * dim;
        const int heads = static_cast<int>(kStateBytes / (4 * values)) / 4;  // a block has keys and values, too
        DT_ASSIGN_OR_RETURN(const double decode,
                            SecondsOf(shape, heads, 1, kMiddle, kernels::ContextOf(stream), seconds));
        DT_ASSIGN_OR_RETURN(const double prompt, SecondsOf(shape, 8, 512, 0, kernels::ContextOf(stream), seconds));
        all.push_back({dim, delta, vector, decode / values, prompt / values});
      }
  return all;
}

}  // namespace dovetail::engine
