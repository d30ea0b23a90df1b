#pragma once
#include <cstdint>

#include "proto/attention_spec.h"

// Bytes that the known ways to divide a prompt over ranks move, by closed formulas.
// Symbols: N new tokens after C earlier ones, P ranks of N / P tokens, f = (P - 1) / P, Hq and Hk query and KV heads,
//          dk and dv the dimensions of a head, e the bytes of an element on the wire, D the hidden size.
// Units:   bytes that one rank receives for one layer; whole numbers if P divides N, else rounded down.
// Source:  docs/sequence_parallelism.md, "Bytes of each exchange"
// Threads: pure.

namespace dovetail::scheduler {

struct PromptShape {
  int64_t new_tokens = 0;      // N
  int64_t earlier_tokens = 0;  // C
  int64_t ranks = 1;           // P
};

// Of softmax attention.
int64_t RingBytes(const proto::SoftmaxSpec& spec, const PromptShape& shape);    // f (N + C) Hk (dk + dv) e
int64_t SwitchBytes(const proto::SoftmaxSpec& spec, const PromptShape& shape);  // f N/P (Hq + max(Hk, P)) (dk + dv) e
// The rank that receives most: rank 0 gets f N Hq dk e of queries, the last one f N Hq s (dv + 2) 4 of partials, where
// a rank's tokens have s subtrees (base/segment_tree.h): one, if they are a power of two of segments. Of the group.
int64_t PassQBytes(const proto::SoftmaxSpec& spec, const PromptShape& shape);

// Of a linear layer with H heads; states in f32, except the chain's. H (dk dv s + (w - 1) (2 dk + dv) e): s the bytes
// of an element of a state, w the width of the convolution. Of each group, and nothing for rank 0.
int64_t ChainBytes(const proto::LinearSpec& spec, const PromptShape& shape);
// (P - 1) H dk dv 4; of delta rules, whose parts compose by a matrix, (P - 1) H dk (dk + dv) 4
int64_t StateGatherBytes(const proto::LinearSpec& spec, const PromptShape& shape);
// As a gather, with ceil(log2 P) in place of P - 1.
int64_t StateScanBytes(const proto::LinearSpec& spec, const PromptShape& shape);
// The rank that receives most, whose heads H/P are: q, k, v and g gates of other ranks' tokens for these, o of its own
// tokens for the others, and the states that those leave (proto/state_blocks.h): f N/P H ((2 dk + 2 dv) e + 4 g) + f H
// times a state for each snapshot of N/P tokens, and what comes before the group. 0: more ranks than heads.
int64_t LinearSwitchBytes(const proto::LinearSpec& spec, const PromptShape& shape);

// Two all-reduces of a layer, for comparison: 4 f N D e.
int64_t TensorParallelBytes(int64_t hidden, int64_t element, const PromptShape& shape);

}  // namespace dovetail::scheduler
