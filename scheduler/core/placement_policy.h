#pragma once
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/placement.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/scheduler.h"

// Placements as functions of the workers that are there. All satisfy proto::Validate.
// Threads: pure.

namespace dovetail::scheduler {

// A worker that holds a prefix is preferred unless it is fuller than the emptiest by more than this.
inline constexpr double kPrefixWorthUsage = 0.25;

// What part of all KV each worker should hold: limited by its part of the memory and by its part of the speed at which
// KV is read, since attention takes as long as the slowest. By worker index; 0 for those that get nothing new.
std::vector<double> FairParts(const std::vector<KvBudget::Worker>& workers);

// Worker indices, those first that hold least of their fair part; ties by free blocks, then by id.
std::vector<int> EmptiestFirst(const std::vector<KvBudget::Worker>& workers);

// As EmptiestFirst, but those that hold most of the prompt come first. hits: blocks held, by worker index; empty:
// unknown.
std::vector<int> PreferredForWhole(const std::vector<KvBudget::Worker>& workers, const std::vector<uint32_t>& hits);

// Tiers of workers by the speed at which they read KV: 0 is the fastest. A tier begins where a worker is less than half
// as fast as the first of the tier before. By worker index; of those that get nothing new, 0.
std::vector<int> TiersOf(const std::vector<KvBudget::Worker>& workers);

// As PreferredForWhole, but the workers of a faster tier come first.
std::vector<int> FastestTierFirst(const std::vector<KvBudget::Worker>& workers, const std::vector<uint32_t>& hits);

// Each group's KV heads in runs, one worker each, as long as its fair part says; equal ones as equal as possible, the
// first of `order` taking the longer ones. Fewer workers if there are fewer heads.
proto::Placement SplitHeads(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                            const std::vector<int>& order);

// Token ranges of `shard_tokens` going round `order`, as often to each worker as its fair part says, the last one open.
// Ranges are shorter if that lets more workers take part in a sequence of `max_tokens`, longer if there would be more
// shards than proto::kMaxShards.
proto::Placement SplitTokens(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                             const std::vector<int>& order, int shard_tokens, Position max_tokens);

// Token ranges in `order`, one of each worker: as many tokens as `holds` says, by place in the order, a multiple of 64;
// the last one open. Linear states lie on the first worker. No worker of which `holds` says 0 has a range.
proto::Placement ContinueTokens(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                                const std::vector<int>& order, const std::vector<Position>& holds);

// What kMixed means for the sequence number `turn`; other policies mean themselves.
PlacementPolicy PolicyOfTurn(PlacementPolicy policy, uint64_t turn);

}  // namespace dovetail::scheduler
