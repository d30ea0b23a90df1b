#pragma once
#include <cstdint>
#include <limits>
#include <string>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "base/status.h"
#include "proto/attention_spec.h"

// Which attention worker holds which tokens and heads of a sequence: data, never a code path.
// Threads: plain values and pure functions.

namespace dovetail::proto {

inline constexpr Position kOpenEnd = std::numeric_limits<Position>::max();
inline constexpr int kMaxShards = 64;  // of one sequence

struct HeadRange {  // of KV heads
  int begin = 0;
  int end = 0;
  int size() const { return end - begin; }
  bool operator==(const HeadRange&) const = default;
};

struct TokenRange {  // of positions; begins on a segment, ends on one or is open
  Position begin = 0;
  Position end = kOpenEnd;
  bool whole() const { return begin == 0 && end == kOpenEnd; }
  bool operator==(const TokenRange&) const = default;
};

struct Shard {
  LayerGroup group;
  WorkerId worker;
  Epoch epoch;
  HeadRange kv_heads;
  TokenRange tokens;
  KvGeneration generation{};  // of the sequence at the worker, as SequenceOpened says; 0: not said yet
  bool operator==(const Shard&) const = default;
};

// Covers each group's kv_heads x positions exactly once. Head ranges of one group are equal or disjoint.
using Placement = absl::InlinedVector<Shard, 4>;

// kInvalidArgument names the shard and what it leaves out, overlaps or exceeds.
absl::Status Validate(const Placement& placement, const AttentionTable& table);

// What the worker calls the sequence's KV, as its shards say; 0: none says it.
KvGeneration GenerationAt(const Placement& placement, WorkerId worker);
// All shards of the worker say it from now on.
void SetGeneration(Placement& placement, WorkerId worker, KvGeneration generation);

// Everything on one worker: a shard per group.
Placement WholePlacement(const AttentionTable& table, WorkerId worker, Epoch epoch);

// The rows of a step that concern one shard: an entry's new tokens are positions [ctx_len, ctx_len + q_len). Both ends
// of the wire compute frames' layouts from this, so nothing about layout travels.
struct ShardRows {
  int q_first = 0;   // first new token (0-based in the entry) whose query the shard answers
  int q_count = 0;   // through the last new token; 0: the shard is not involved
  int kv_first = 0;  // first new token whose K and V the shard appends
  int kv_count = 0;
};
// attend_end: as StepBeginEntry::attend_end; tokens from there on are attended elsewhere.
ShardRows RowsOf(const TokenRange& tokens, int window, Position ctx_len, int q_len, Position attend_end = kOpenEnd);

std::string DebugString(const Shard& shard);

}  // namespace dovetail::proto
