#include "scheduler/core/placement_policy.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace dovetail::scheduler {
namespace {

Position RoundUp(Position tokens) { return BlocksOf(tokens) * kSegmentTokens; }

// Hands out things one by one: each goes to the worker that then exceeds its part the least; to the first of `order`
// among equals.
class Dealer {
 public:
  Dealer(const std::vector<KvBudget::Worker>& workers, const std::vector<int>& order)
      : order_(order), parts_(FairParts(workers)), dealt_(workers.size(), 0) {}

  int Next() {
    int best = order_.front();
    for (const int worker : order_) {
      if ((dealt_[worker] + 1) * parts_[best] < (dealt_[best] + 1) * parts_[worker]) best = worker;
    }
    ++dealt_[best];
    return best;
  }
  int dealt(int worker) const { return static_cast<int>(dealt_[worker]); }

 private:
  const std::vector<int>& order_;
  const std::vector<double> parts_;
  std::vector<double> dealt_;
};

}  // namespace

std::vector<double> FairParts(const std::vector<KvBudget::Worker>& workers) {
  double capacity = 0, rate = 0;
  for (const KvBudget::Worker& worker : workers) {
    if (!worker.usable()) continue;
    capacity += static_cast<double>(worker.capacity);
    rate += worker.rate;
  }
  std::vector<double> parts;
  for (const KvBudget::Worker& worker : workers) {
    const double of_memory = capacity > 0 ? static_cast<double>(worker.capacity) / capacity : 0;
    parts.push_back(worker.usable() ? std::min(of_memory, worker.rate / rate) : 0);
  }
  return parts;
}

std::vector<int> EmptiestFirst(const std::vector<KvBudget::Worker>& workers) {
  std::vector<int> order(workers.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int worker) { return !workers[worker].usable(); });
  const std::vector<double> parts = FairParts(workers);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const double of_a = static_cast<double>(workers[a].used) * parts[b];
    const double of_b = static_cast<double>(workers[b].used) * parts[a];
    if (of_a != of_b) return of_a < of_b;
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

std::vector<int> TiersOf(const std::vector<KvBudget::Worker>& workers) {
  std::vector<int> order = EmptiestFirst(workers);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return workers[a].rate > workers[b].rate; });
  std::vector<int> tiers(workers.size(), 0);
  int tier = 0;
  double fastest = order.empty() ? 0 : workers[order.front()].rate;
  for (const int worker : order) {
    if (workers[worker].rate < fastest / 2) {
      ++tier;
      fastest = workers[worker].rate;
    }
    tiers[worker] = tier;
  }
  return tiers;
}

std::vector<int> FastestTierFirst(const std::vector<KvBudget::Worker>& workers, const std::vector<uint32_t>& hits) {
  std::vector<int> order = PreferredForWhole(workers, hits);
  const std::vector<int> tiers = TiersOf(workers);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return tiers[a] < tiers[b]; });
  return order;
}

proto::Placement SplitHeads(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                            const std::vector<int>& order) {
  proto::Placement placement;
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const int heads = table.softmax(group).kv_heads;
    const int most = std::min<int>(static_cast<int>(order.size()), proto::kMaxShards / table.group_count());
    const std::vector<int> takers(order.begin(), order.begin() + most);
    Dealer dealer(workers, takers);
    for (int head = 0; head < heads; ++head) dealer.Next();
    int begin = 0;
    for (const int taker : takers) {
      const int size = dealer.dealt(taker);
      if (size == 0) continue;
      const KvBudget::Worker& worker = workers[taker];
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
    if (table.linear(group) != nullptr) {  // a state has no token ranges
      const KvBudget::Worker& worker = workers[order[g % workers_used]];
      placement.push_back({.group = group,
                           .worker = worker.id,
                           .epoch = worker.epoch,
                           .kv_heads = {.begin = 0, .end = table.softmax(group).kv_heads},
                           .tokens = {}});
      continue;
    }
    Dealer dealer(workers, order);
    for (Position shard = 0; shard < count; ++shard) {
      const KvBudget::Worker& worker = workers[dealer.Next()];
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

proto::Placement ContinueTokens(const proto::AttentionTable& table, const std::vector<KvBudget::Worker>& workers,
                                const std::vector<int>& order, const std::vector<Position>& holds) {
  const auto most = static_cast<size_t>(proto::kMaxShards / table.group_count());
  std::vector<std::pair<int, Position>> parts;  // worker, tokens
  for (size_t i = 0; i < order.size() && parts.size() < most; ++i)
    if (holds[i] > 0) parts.emplace_back(order[i], holds[i]);
  proto::Placement placement;
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const bool linear = table.linear(group) != nullptr;
    Position begin = 0;
    for (size_t i = 0; i < (linear ? std::min<size_t>(1, parts.size()) : parts.size()); ++i) {
      const auto& [worker, tokens] = parts[i];
      const bool last = linear || i + 1 == parts.size();
      placement.push_back({.group = group,
                           .worker = workers[worker].id,
                           .epoch = workers[worker].epoch,
                           .kv_heads = {.begin = 0, .end = table.softmax(group).kv_heads},
                           .tokens = {.begin = begin, .end = last ? proto::kOpenEnd : begin + tokens}});
      begin += tokens;
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
