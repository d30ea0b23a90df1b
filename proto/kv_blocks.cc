#include "proto/kv_blocks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/state_blocks.h"

namespace dovetail::proto {
namespace {

uint64_t BlocksPerSegment(const AttentionTable& table, LayerGroup group) {
  const SoftmaxSpec& spec = table.softmax(group);
  return uint64_t(table.ops_in_group[group.value()]) * spec.kv_heads * spec.blocks_per_head;
}

}  // namespace

uint64_t BlocksPerSegment(const AttentionTable& table, bool states_only) {
  uint64_t blocks = 0;
  for (int group = 0; group < table.group_count(); ++group) {
    const LayerGroup id(static_cast<uint16_t>(group));
    if (!states_only || table.linear(id) != nullptr) blocks += BlocksPerSegment(table, id);
  }
  return blocks;
}

int64_t MostSegments(Position tokens, int window, int max_chunk) {
  const int64_t all = SegmentsOf(tokens);
  return window == 0 ? all : std::min(all, SegmentsOf(window) + SegmentsOf(max_chunk) + 3);
}

int64_t MostSegmentsOfStates(Position tokens, int max_chunk) {
  return std::min(SegmentsOf(tokens), MostStateBlocks(max_chunk));
}

uint64_t BlocksOfSequence(const AttentionTable& table, Position tokens, int max_chunk, LinearPrompts linear) {
  uint64_t blocks = 0;
  for (int group = 0; group < table.group_count(); ++group) {
    const LayerGroup id(static_cast<uint16_t>(group));
    const bool left = linear == LinearPrompts::kOnComputeWorkers && table.linear(id) != nullptr;
    blocks += BlocksPerSegment(table, id) * (left ? MostSegmentsOfStates(tokens, max_chunk)
                                                  : MostSegments(tokens, table.softmax(id).window, max_chunk));
  }
  return blocks;
}

std::string TooFewForASequence(const AttentionTable& table, uint64_t blocks, uint64_t block_bytes) {
  const uint64_t needed = 2 * BlocksPerSegment(table);
  if (blocks >= needed) return "";
  const uint64_t states = 2 * BlocksPerSegment(table, /*states_only=*/true);
  return absl::StrCat(
      "--kv-capacity: ", blocks, " KV blocks hold less than 128 tokens of a sequence of this model, which take ",
      needed, states == 0 ? "" : absl::StrCat(", ", states, " of them for linear states (at any length)"),
      "; only parts of sequences may lie there: give it ", (needed * block_bytes + 1023) >> 10, "KiB or more");
}

}  // namespace dovetail::proto
