#pragma once
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/placement.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/scheduler.h"

// Placements as pure functions of who is there. All satisfy proto::Validate.

namespace dovetail::scheduler {

// A worker that holds a prefix is preferred unless it is fuller than the emptiest by more than this.
inline constexpr double kPrefixWorthUsage = 0.25;

// Worker indices, emptiest first; ties by id.
std::vector<int> EmptiestFirst(const std::vector<KvBudget::Worker>& workers);

// As EmptiestFirst, but those that hold most of the prompt come first. hits: blocks held, by worker index; empty: unknown.
std::vector<int> PreferredForWhole(const std::vector<KvBudget::Worker>& workers, const std::vector<uint32_t>& hits);

// Each group's KV heads in runs of as equal size as possible, one worker each, the first of `order` taking the longer ones. Fewer
// workers if there are fewer heads.
proto::Placement SplitHeads(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                            const std::vector<int>& order);

// Token ranges of `shard_tokens` going round `order`, the last one open. Ranges are shorter if that lets more workers take part in
// a sequence of `max_tokens`, longer if there would be more shards than proto::kMaxShards.
proto::Placement SplitTokens(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                             const std::vector<int>& order, int shard_tokens, Position max_tokens);

// What kMixed means for the sequence number `turn`; other policies mean themselves.
PlacementPolicy PolicyOfTurn(PlacementPolicy policy, uint64_t turn);

}  // namespace dovetail::scheduler
