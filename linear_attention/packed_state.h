#pragma once
#include <cstddef>

#include "kernels/linear_state.h"
#include "proto/attention_spec.h"

namespace dovetail::linear_attention {

kernels::LinearStateShape ShapeOf(const proto::LinearSpec& spec);

// Copies the state of one head and block between its KvBlocks (kernels::LinearStateLayout) and the wire
// (proto/state_blocks.h).
//   Shapes:  `pieces` are the KvBlocks of one head and block, piece_bytes each; none is null
//   Units:   `tokens` of the block: 64 if it is full, fewer if it is open
//   Threads: immutable
class PackedState {
 public:
  PackedState(const proto::LinearSpec& spec, size_t piece_bytes);

  size_t bytes(int tokens) const;

  // Writes bytes(tokens) to `out`; returns where they end.
  std::byte* Pack(int tokens, std::byte* const* pieces, std::byte* out) const;
  // Reads bytes(tokens) from `in`; returns where they end. What the wire does not have of the block stays as it was.
  const std::byte* Unpack(int tokens, const std::byte* in, std::byte* const* pieces) const;

 private:
  struct Rows;

  const proto::LinearSpec spec_;
  const kernels::LinearStateLayout layout_;
  const size_t piece_bytes_;
};

}  // namespace dovetail::linear_attention
