#pragma once
#include <cstdint>

#include "kernels/cuda/attention/kv_layout.h"

namespace dovetail::kernels::cuda {

// K and V of whole sequences into KvBlocks that lie in order, with heads padded by zeros, and q into padded rows: what
// KvAppendLaunch does for tokens that come a few at a time and blocks that lie anywhere. 16-bit elements, as they are.
//
// The source has head h of q, k and v (n = 0, 1, 2) of row r at element r * row_step + (n * heads + h) * head_step,
// `dim` numbers. Block g of head h of sequence i begins at byte ((i * heads + h) * segments + g) * block_step of
// `blocks`, g being of 64 tokens each and segments as many as `length` needs. Threads: plain values.
struct PackHeadsLaunch {
  const void* source = nullptr;
  void* q = nullptr;  // [rows][heads][layout.key_dim]; null: q is left where it is
  void* blocks = nullptr;
  int64_t row_step = 0;
  int64_t block_step = 0;
  int32_t head_step = 0;
  int32_t dim = 0;
  int32_t heads = 0;
  int32_t sequences = 0;
  int32_t length = 0;    // of each, tokens
  int32_t by_token = 0;  // row: token * sequences + sequence; else sequence * length + token
  CudaKvLayout layout;   // of 16 bits, key_dim = value_dim: what `dim` is padded to
};

// Enqueues one kernel. cudaError_t as int; 0: enqueued.
// Threads: any host thread, one at a time per stream.
int LaunchPackHeads(const PackHeadsLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
