#pragma once
#include <cstdint>

#include "base/ids.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// What happens to the tokens before a prompt's step that are not in this worker's scratch: those of a cached prefix, of
// earlier steps that other compute workers took, and of the ranks before this one in a prefill group.
enum class PrefixExchange : uint8_t {
  kAuto = 0,    // whichever moves fewer bytes
  kAsk = 1,     // pass-Q: attention workers attend to them; queries go there and partials come back
  kGather = 2,  // attention workers give their K and V, and they are attended to here
};

// What the earlier tokens of one step of a prompt cost on the wire, over all attention ops.
//   Units:   bytes
//   Source:  docs/sequence_parallelism.md has the formulas; Yang et al. 2024 (arXiv 2411.01783) compare the same two
struct PrefixBytes {
  int64_t ask = 0;     // queries, and the partials of tokens [0, ctx_len)
  int64_t gather = 0;  // K and V of tokens [gather_begin, ctx_len), as far as windows see them
  int64_t most = 0;    // of `gather`, what one op brings at most

  static PrefixBytes Of(const proto::AttentionTable& table, Position gather_begin, Position ctx_len, int q_len);
};

// An answer of one op brings no more than this.
inline constexpr int64_t kMostGatheredBytes = int64_t{64} << 20;

// Whether the earlier tokens of a step come here.
bool GathersPrefix(PrefixExchange exchange, const PrefixBytes& bytes);

}  // namespace dovetail::compute
