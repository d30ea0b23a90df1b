#pragma once
#include <cstdint>

#include "base/ids.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// What happens to the tokens before a prompt's step that are not in this worker's scratch: those of a cached prefix, of
// earlier steps that other compute workers took, and of the ranks before this one in a prefill group.
enum class PrefixExchange : uint8_t {
  kAsk = 0,     // pass-Q: attention workers attend to them; queries go there and partials come back
  kGather = 1,  // attention workers give their K and V, and they are attended to here
};

// Of an op's answer, at most.
inline constexpr int64_t kMostGatheredBytes = int64_t{64} << 20;

// Whether K and V of tokens [gather_begin, ctx_len) may come here: no op's answer is larger than it may be.
//   Units:  tokens; with a window, only those count that token ctx_len sees
bool MayGather(const proto::AttentionTable& table, Position gather_begin, Position ctx_len);

}  // namespace dovetail::compute
