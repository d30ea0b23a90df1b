#include "proto/linear_switch.h"

#include <algorithm>

#include "proto/state_blocks.h"

namespace dovetail::proto {
namespace {

// Of a token and head.
int64_t RowBytes(const SoftmaxSpec& spec) {
  return (2 * spec.key_dim + spec.value_dim) * static_cast<int64_t>(SizeOf(spec.kv)) +
         spec.gates * static_cast<int64_t>(sizeof(float));
}

}  // namespace

int MostLinearSwitchRanks(const AttentionTable& table) {
  int most = 0;
  for (const SoftmaxSpec& spec : table.views)
    if (spec.linear()) most = most == 0 ? spec.kv_heads : std::min(most, spec.kv_heads);
  return most;
}

int64_t LinearRowsBytes(const SoftmaxSpec& spec, const TokenRange& tokens, int rank, int heads) {
  const int64_t before = rank == 0 ? BytesOf(StatesBefore(tokens.begin), spec) : 0;
  return heads * ((tokens.end - tokens.begin) * RowBytes(spec) + before);
}

int64_t LinearOutputBytes(const SoftmaxSpec& spec, const TokenRange& tokens, int heads) {
  const int64_t row = spec.value_dim * static_cast<int64_t>(SizeOf(spec.kv));
  return heads * ((tokens.end - tokens.begin) * row + BytesOf(StatesLeft(tokens.begin, tokens.end), spec));
}

int64_t LinearSwitchBytesTo(const SoftmaxSpec& spec, const SwitchRank& rank) {
  const int own = HeadsOfRank(spec.kv_heads, rank.rank, rank.ranks).size();
  const int64_t others = (rank.end - rank.base) - (rank.tokens.end - rank.tokens.begin);
  const int64_t before = rank.rank == 0 ? 0 : BytesOf(StatesBefore(rank.base), spec);
  return own * (others * RowBytes(spec) + before) + LinearOutputBytes(spec, rank.tokens, spec.kv_heads - own);
}

}  // namespace dovetail::proto
