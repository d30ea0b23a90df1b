#pragma once
#include <cstdint>
#include <string>

#include "base/ids.h"
#include "proto/attention_spec.h"

// How many KvBlocks sequences of a model take.
// Threads: pure.

namespace dovetail::proto {

// Blocks for 64 tokens of a whole sequence, in all attention ops; or of those its linear states alone, which take two
// of these at any length.
uint64_t BlocksPerSegment(const AttentionTable& table, bool states_only = false);

// Segments of 64 tokens that `tokens` tokens lie in.
constexpr int64_t SegmentsOf(Position tokens) { return (tokens + kSegmentTokens - 1) / kSegmentTokens; }

// Segments of 64 tokens of which a sequence holds blocks at most in a layer that sees `window` tokens (0: all), while
// no step has more than `max_chunk` of its tokens: a worker forgets at the next step what the window has left.
int64_t MostSegments(Position tokens, int window, int max_chunk);

// The same of linear states where linear layers of prompts run on compute workers: of a step's tokens the worker holds
// what state_blocks.h says that it keeps.
int64_t MostSegmentsOfStates(Position tokens, int max_chunk);

// Where the linear layers of prompts run. That decides of which segments of a step an attention worker holds states.
enum class LinearPrompts : uint8_t {
  kOnAttentionWorkers,  // of all
  kOnComputeWorkers,    // of those that state_blocks.h names
};

// Blocks that a whole sequence of `tokens` tokens takes at most, in all attention ops: what the scheduler charges for
// it. Linear states and layers with windows take no more beyond some length.
uint64_t BlocksOfSequence(const AttentionTable& table, Position tokens, int max_chunk,
                          LinearPrompts linear = LinearPrompts::kOnAttentionWorkers);

// What to say of an attention worker that has `blocks` blocks of `block_bytes` bytes: one line with the remedy if it
// cannot hold 128 tokens of a whole sequence, else nothing. Parts of sequences may still fit.
std::string TooFewForASequence(const AttentionTable& table, uint64_t blocks, uint64_t block_bytes);

}  // namespace dovetail::proto
