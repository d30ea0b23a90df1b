#include <algorithm>
#include <vector>

#include "attention_worker/cuda/cuda_attention_crossings.h"

// Prompts, and parts of prompts, whose rows cuDNN attends as they come (kernels/cuda/prompts/cuda_prompts.h). What a
// part's rows see of earlier tokens is attended where the blocks are, and joined.

namespace dovetail::attention {

using kernels::cuda::CudaPrompts;
using kernels::cuda::WireType;

namespace {

constexpr int64_t kElement = 2;  // bytes of what is on the wire

CudaPrompts::Shape ShapeOfPrompts(const proto::SoftmaxSpec& spec) {
  return {spec.query_heads,
          spec.kv_heads,
          spec.key_dim,
          spec.value_dim,
          spec.kv == DType::kBF16 ? WireType::kBF16 : WireType::kF16,
          spec.scale};
}

bool AttendsPrompts(const proto::SoftmaxSpec& spec) { return spec.key_dim == spec.value_dim && spec.key_dim <= 128; }

}  // namespace

void CudaAttentionExecutor::ExpectPrompts(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table) {
  for (int op = 0; op < table.op_count(); ++op) {
    const LayerGroup group = table.op_group[op];
    if (table.op_index_in_group[op] == 0 && table.linear(group) == nullptr && table.sinks(op) == nullptr &&
        AttendsPrompts(table.softmax(group)))
      CudaPrompts::Expect(device, ShapeOfPrompts(table.softmax(group)));
  }
}

// All that its rows see among themselves are these rows, and before them only what lies in this shard.
bool CudaAttentionExecutor::IsPrompt(const proto::ShardStep& shard, LayerGroup group, bool parts) const {
  const proto::SoftmaxSpec& spec = core_.table().softmax(group);
  const int rows = shard.rows.q_count;
  const bool first = shard.ctx_len == 0 && (spec.window == 0 || spec.window >= rows);
  const bool part = parts && shard.ctx_len > 0 && shard.tokens.begin == 0 && spec.window == 0;
  return prompts_ != nullptr && rows >= CudaPrompts::kLeastRows && (first || part) && shard.rows.q_first == 0 &&
         shard.rows.kv_first == 0 && shard.rows.kv_count == rows && shard.finished() &&
         shard.kv_heads.size() == spec.kv_heads && AttendsPrompts(spec) && SinksOf(group, 0) == nullptr;
}

CudaPrompts::Shape CudaAttentionExecutor::PromptShapeOf(LayerGroup group) const {
  return ShapeOfPrompts(core_.table().softmax(group));
}

absl::Status CudaAttentionExecutor::PlanPrompts(MicroBatch& batch, MicroBatchId id, LayerGroup group, GroupStep& step) {
  if (prompts_ == nullptr) return absl::OkStatus();
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  // Partials of token shards would lie among those of parts; answers in another GPU's memory are not read again.
  step.parts = batch.crossing->answers_are_here() &&
               std::all_of(layout.items.begin(), layout.items.end(),
                           [](const proto::ShardStep& shard) { return shard.finished() || shard.rows.q_count == 0; });
  std::vector<CudaPrompts::Item> items;
  int32_t part_rows = 0;
  for (const proto::ShardStep& shard : layout.items) {
    if (!IsPrompt(shard, group, step.parts)) continue;
    items.push_back({shard.rows.q_count, shard.query_offset / kElement, shard.key_offset / kElement,
                     shard.value_offset / kElement, shard.partial_offset / kElement});
    if (shard.ctx_len == 0) continue;
    items.back().first_node = part_rows;
    part_rows += shard.rows.q_count;
  }
  if (part_rows > 0) {
    const proto::SoftmaxSpec& spec = core_.table().softmax(group);
    const int64_t rows = int64_t{part_rows} * spec.query_heads;
    DT_RETURN_IF_ERROR(Grow(batch.partial_floats, rows * (spec.value_dim + 2) * sizeof(float)));
    step.part_ml_at = rows * spec.value_dim;
  }
  return prompts_->Prepare(*batch.stream, PromptShapeOf(group), items, *step.prompts).status();
}

}  // namespace dovetail::attention
