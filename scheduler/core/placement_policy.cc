#include "scheduler/core/placement_policy.h"

#include <algorithm>
#include <numeric>

namespace dovetail::scheduler {
namespace {

Position RoundUp(Position tokens) { return BlocksOf(tokens) * kSegmentTokens; }

}  // namespace

std::vector<int> EmptiestFirst(const std::vector<KvBudget::Worker>& workers) {
  std::vector<int> order(workers.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int worker) { return !workers[worker].usable(); });
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    if (workers[a].free() != workers[b].free()) return workers[a].free() > workers[b].free();
    return workers[a].id < workers[b].id;
  });
  return order;
}

std::vector<int> PreferredForWhole(const std::vector<KvBudget::Worker>& workers, const std::vector<uint32_t>& hits) {
  std::vector<int> order = EmptiestFirst(workers);
  if (order.empty() || hits.empty()) return order;
  double lowest = 1;
  for (const int worker : order) lowest = std::min(lowest, workers[worker].usage());
  const auto worth = [&](int worker) -> uint32_t {
    const bool much_fuller = workers[worker].usage() > lowest + kPrefixWorthUsage;
    return much_fuller || worker >= static_cast<int>(hits.size()) ? 0 : hits[worker];
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return worth(a) > worth(b); });
  return order;
}

proto::Placement SplitHeads(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                            const std::vector<int>& order) {
  proto::Placement placement;
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const int heads = table.softmax(group).kv_heads;
    const int parts = std::min({static_cast<int>(order.size()), heads, proto::kMaxShards / table.group_count()});
    int begin = 0;
    for (int part = 0; part < parts; ++part) {
      const int size = heads / parts + (part < heads % parts ? 1 : 0);
      const KvBudget::Worker& worker = workers[order[part]];
      placement.push_back({.group = group,
                           .worker = worker.id,
                           .epoch = worker.epoch,
                           .kv_heads = {.begin = begin, .end = begin + size},
                           .tokens = {}});
      begin += size;
    }
  }
  return placement;
}

proto::Placement SplitTokens(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                             const std::vector<int>& order, int shard_tokens, Position max_tokens) {
  const Position workers_used = static_cast<Position>(order.size());
  const Position most_shards = proto::kMaxShards / table.group_count();
  const Position for_all_workers = RoundUp((max_tokens + workers_used - 1) / workers_used);
  const Position for_few_shards = RoundUp((max_tokens + most_shards - 1) / most_shards);
  const Position size = std::max(std::min<Position>(shard_tokens, for_all_workers), for_few_shards);
  const Position count = std::max<Position>(1, (max_tokens + size - 1) / size);

  proto::Placement placement;
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    for (Position shard = 0; shard < count; ++shard) {
      const KvBudget::Worker& worker = workers[order[shard % workers_used]];
      const bool last = shard + 1 == count;
      placement.push_back({.group = group,
                           .worker = worker.id,
                           .epoch = worker.epoch,
                           .kv_heads = {.begin = 0, .end = table.softmax(group).kv_heads},
                           .tokens = {.begin = shard * size, .end = last ? proto::kOpenEnd : (shard + 1) * size}});
    }
  }
  return placement;
}

PlacementPolicy PolicyOfTurn(PlacementPolicy policy, uint64_t turn) {
  if (policy != PlacementPolicy::kMixed) return policy;
  constexpr PlacementPolicy kTurns[] = {PlacementPolicy::kRequest, PlacementPolicy::kHeads, PlacementPolicy::kTokens};
  return kTurns[turn % std::size(kTurns)];
}

}  // namespace dovetail::scheduler
