#pragma once
#include <cstdint>
#include <string>

#include "proto/attention_spec.h"

// How many KvBlocks sequences of a model take. Pure functions: thread-safe, no errors.

namespace dovetail::proto {

// Blocks for 64 tokens of a whole sequence, in all attention ops; or of those its linear states alone, which take two
// of these at any length.
uint64_t BlocksPerSegment(const AttentionTable& table, bool states_only = false);

// What to say of an attention worker that has `blocks` blocks of `block_bytes` bytes: one line with the remedy if it
// cannot hold 128 tokens of a whole sequence, else nothing. Parts of sequences may still fit.
std::string TooFewForASequence(const AttentionTable& table, uint64_t blocks, uint64_t block_bytes);

}  // namespace dovetail::proto
