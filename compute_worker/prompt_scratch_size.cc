#include "compute_worker/prompt_scratch_size.h"

#include <algorithm>

#include "compute_worker/cpu/prompt_attention.h"

namespace dovetail::compute {
namespace {

constexpr uint64_t kMostPromptScratch = uint64_t{256} << 20;
constexpr uint64_t kStepsOfPromptScratch = 4;

}  // namespace

uint32_t PromptScratchBlocks(const proto::AttentionTable& table, int max_step_tokens, std::optional<uint64_t> bytes,
                             KvStorage storage) {
  const uint64_t block_bytes = PromptAttention::BlockBytes(table, storage);
  if (block_bytes == 0) return 0;
  uint64_t per_segment = 0;
  for (const LayerGroup group : table.op_group)
    if (table.linear(group) == nullptr) per_segment += table.softmax(group).kv_heads;
  const uint64_t segments = kStepsOfPromptScratch * (max_step_tokens / kSegmentTokens + 1);
  const uint64_t otherwise = std::min(kMostPromptScratch, segments * per_segment * block_bytes);
  return static_cast<uint32_t>(std::min<uint64_t>(bytes.value_or(otherwise) / block_bytes, UINT32_MAX));
}

uint64_t PromptScratchBytesOfAStep(const proto::AttentionTable& table, int step_tokens) {
  uint64_t most_heads = 0;
  for (const LayerGroup group : table.op_group)
    if (table.linear(group) == nullptr) most_heads = std::max<uint64_t>(most_heads, table.softmax(group).kv_heads);
  return (step_tokens / kSegmentTokens + 1) * most_heads * PromptAttention::BlockBytes(table);
}

}  // namespace dovetail::compute
