#include "proto/state_blocks.h"

namespace dovetail::proto {
namespace {

int64_t BlockOf(Position position) { return position / kSegmentTokens; }
Position EndOf(int64_t block) { return (block + 1) * kSegmentTokens; }

}  // namespace

StateBlocks StatesBefore(Position ctx_len) {
  StateBlocks blocks;
  const int64_t open = BlockOf(ctx_len);
  if (open > 0) blocks.push_back({open - 1, kSegmentTokens});
  if (ctx_len % kSegmentTokens != 0) blocks.push_back({open, static_cast<int>(ctx_len % kSegmentTokens)});
  return blocks;
}

bool KeepsStateBlock(int64_t block, Position ctx_len, Position end) {
  const int64_t first = BlockOf(ctx_len), last = BlockOf(end - 1);
  if (block < first || block > last) return false;
  const bool begun_before = block == first && ctx_len % kSegmentTokens != 0;
  const Position apart = EndOf(block) < kSnapshotTokens ? kFirstSnapshotTokens : kSnapshotTokens;
  return block >= last - 1 || begun_before || EndOf(block) % apart == 0;
}

StateBlocks StatesLeft(Position ctx_len, Position end) {
  StateBlocks blocks;
  for (int64_t block = BlockOf(ctx_len); block <= BlockOf(end - 1); ++block)
    if (KeepsStateBlock(block, ctx_len, end))
      blocks.push_back({block, static_cast<int>(std::min<Position>(end, EndOf(block)) - block * kSegmentTokens)});
  return blocks;
}

int64_t StateBlocksHeld(std::span<const Position> cuts) {
  int64_t held = cuts[0] / kSegmentTokens > 0;  // the full block before; an open one is left again
  for (size_t i = 1; i < cuts.size(); ++i) held += static_cast<int64_t>(StatesLeft(cuts[i - 1], cuts[i]).size());
  return held;
}

// The full block before, an open one, the last two, and snapshots before those: two more where a prompt begins.
int64_t MostStateBlocks(int max_chunk) {
  const int64_t snapshots = (max_chunk + kSnapshotTokens - 1) / kSnapshotTokens + 2;
  return std::min<int64_t>(4 + snapshots, std::max(0, max_chunk - 2) / kSegmentTokens + 3);
}

int64_t BytesOf(std::span<const StateBlock> blocks, const SoftmaxSpec& spec) {
  int64_t bytes = 0;
  for (const StateBlock& block : blocks) bytes += block.full() ? spec.state_bytes : block.tokens * spec.token_bytes;
  return bytes;
}

}  // namespace dovetail::proto
