#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "base/segment_tree.h"
#include "proto/attention_spec.h"

namespace dovetail::proto {

// Linear layers of a prompt may run on the compute worker. Then no tokens cross for them but states: the one before the
// step comes from the attention worker, and those that the step leaves go there. How many bytes that is does not depend
// on the length of the step, except for a snapshot every kSnapshotTokens. A state on the wire, for one head and op, is
// what its block of 64 tokens holds (kernels/linear_state.h) as far as later tokens need it:
//   a full block:  S after it, [key_dim][value_dim] in LinearSpec::state; then the inputs of its last conv_history()
//                  tokens, [q, k, v] in the wire type
//   an open block: of its tokens so far keys [tokens][key_dim], values [tokens][value_dim] and decays [tokens] or
//                  [tokens][key_dim] in f32; then their inputs, if there is a convolution
// Threads: pure.
// Source:  Sun et al. 2024 (LASP), where the state goes from rank to rank; here it goes through the attention worker.

enum class StateExchange : uint8_t {
  kTokens = 0,  // none: q, k and v cross, and the attention worker computes
  kLeave = 1,   // the compute worker computes, and has the state before the step
  kFetch = 2,   // it computes, and asks for that state
};

// Prompts part from one another anywhere; one that begins like another goes on from the last snapshot before. Many
// share a short beginning: up to the first of these snapshots they lie closer.
inline constexpr Position kSnapshotTokens = 512;
inline constexpr Position kFirstSnapshotTokens = 128;

struct StateBlock {
  int64_t block = 0;  // tokens [64 block, 64 block + tokens)
  int tokens = 0;     // 64: it is full
  bool full() const { return tokens == kSegmentTokens; }
  bool operator==(const StateBlock&) const = default;
};
using StateBlocks = absl::InlinedVector<StateBlock, 8>;

// What a step at ctx_len needs: the full block before, and the open one. Nothing at 0.
StateBlocks StatesBefore(Position ctx_len);

// Whether the attention worker keeps a block that the step of tokens [ctx_len, end) fills or begins: the last one and
// the one before it, where the next step and the same prompt go on; the one that is open at ctx_len; and snapshots.
bool KeepsStateBlock(int64_t block, Position ctx_len, Position end);

// All that it keeps, in order.
StateBlocks StatesLeft(Position ctx_len, Position end);

// Blocks of a head that an attention worker holds at once while the ranks of a group take the tokens between these
// cuts, of which the first is what was committed before, each leaving what StatesLeft says: those before the group, and
// those that the ranks leave. A step alone is two cuts.
//   Requires: at least two cuts, rising
int64_t StateBlocksHeld(std::span<const Position> cuts);

// As many or more, of any step alone that takes at most so many tokens: a little more than one for kSnapshotTokens.
int64_t MostStateBlocks(int max_chunk);

// Bytes of these blocks of one head. `spec` is linear().
int64_t BytesOf(std::span<const StateBlock> blocks, const SoftmaxSpec& spec);

}  // namespace dovetail::proto
