#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/state/state_args.h"

namespace dovetail::kernels::cuda {

// Parameters of the kernels that pack linear states for the wire and unpack them. Plain structs, device pointers.
// Threads: plain values.

// One block of one head. Its packed bytes are what proto/state_blocks.h says of a full or an open block.
struct StatePackJob {
  std::byte* block = nullptr;  // in one piece, 64-byte aligned
  int64_t at = 0;              // bytes into StatePackLaunch::packed, even
  int32_t tokens = 0;          // that the block holds: 64 if it is full
  int32_t pad = 0;
};

struct StatePackLaunch {
  const StatePackJob* jobs = nullptr;
  std::byte* packed = nullptr;
  StateLayout layout;  // of blocks in one piece
  int32_t count = 0;   // jobs
  int32_t key_dim = 0, value_dim = 0;
  int32_t state_bytes = 4;  // of an element of S: 4, or 2 for bf16
  int32_t vector_decay = 0;
  int32_t history_tokens = 0;    // of a full block: its last ones, whose inputs the convolution looks back at
  int32_t history_channels = 0;  // 2 bytes each; 0: there is no convolution
};

}  // namespace dovetail::kernels::cuda
