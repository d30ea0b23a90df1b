#include "scheduler/core/kv_budget.h"

#include <algorithm>

#include "base/check.h"
#include "proto/state_blocks.h"

namespace dovetail::scheduler {

void KvBudget::Join(WorkerId id, Epoch epoch, uint64_t capacity, double rate, std::optional<WorkerId> pair) {
  const Worker joined{.id = id, .epoch = epoch, .capacity = capacity, .rate = rate > 0 ? rate : 1, .pair = pair};
  if (const auto known = IndexOf(id)) {
    const uint64_t used = workers_[*known].used;
    workers_[*known] = joined;
    workers_[*known].used = used;
  } else if (const auto forgotten = IndexOf(kForgotten)) {
    workers_[*forgotten] = joined;
  } else {
    workers_.push_back(joined);
  }
}

void KvBudget::Lose(WorkerId id) {
  const auto worker = IndexOf(id);
  if (!worker) return;
  workers_[*worker].lost = true;
  workers_[*worker].capacity = 0;
}

void KvBudget::Drain(WorkerId id) {
  if (const auto worker = IndexOf(id)) workers_[*worker].draining = true;
}

bool KvBudget::any_usable() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& worker) { return worker.usable(); });
}

std::optional<int> KvBudget::IndexOf(WorkerId id) const {
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].id == id) return static_cast<int>(i);
  }
  return std::nullopt;
}

bool KvBudget::IsCurrent(WorkerId id, Epoch epoch) const {
  const auto index = IndexOf(id);
  return index.has_value() && workers_[*index].epoch == epoch && !workers_[*index].lost;
}

uint64_t KvBudget::capacity() const {
  uint64_t total = 0;
  for (const Worker& worker : workers_) total += worker.capacity;
  return total;
}

double KvBudget::fullest_usage() const {
  double usage = 0;
  for (const Worker& worker : workers_)
    if (!worker.lost) usage = std::max(usage, worker.usage());
  return usage;
}

int64_t KvBudget::BlocksOfShard(const proto::Shard& shard, const Extent& extent) const {
  const int window = table_.softmax(shard.group).window;
  int64_t first = std::max(shard.tokens.begin / kSegmentTokens, extent.first_block);
  if (window > 0) {
    // One more than a row at ctx_len sees: the worker forgets at the next StepBegin, not before.
    const Position seen_from = std::max<Position>(0, extent.ctx_len + 1 - window);
    first = std::max(first, seen_from / kSegmentTokens - 1);
  }
  const int64_t end = BlocksOf(std::min(shard.tokens.end, extent.end));
  const int64_t blocks = std::max<int64_t>(0, end - first);
  if (linear_ == proto::LinearPrompts::kOnComputeWorkers && table_.linear(shard.group) != nullptr)
    return std::min(blocks, std::max(extent.group_states, proto::MostStateBlocks(max_chunk_)));
  return proto::MostSegments(blocks * kSegmentTokens, window, std::max(extent.chunk, max_chunk_));
}

Charges KvBudget::CostOf(const proto::Placement& placement, const Extent& extent) const {
  Charges cost;
  for (const proto::Shard& shard : placement) {
    const auto worker = IndexOf(shard.worker);
    DT_CHECK(worker.has_value(), "a shard on worker ", shard.worker.value(), ", which never joined");
    const uint64_t blocks = static_cast<uint64_t>(BlocksOfShard(shard, extent)) *
                            table_.ops_in_group[shard.group.value()] * shard.kv_heads.size() *
                            table_.softmax(shard.group).blocks_per_head;
    auto at = std::find_if(cost.begin(), cost.end(), [&](const Charge& c) { return c.worker >= *worker; });
    if (at == cost.end() || at->worker != *worker) at = cost.insert(at, Charge{.worker = *worker});
    at->blocks += blocks;
  }
  return cost;
}

std::optional<int> KvBudget::Lacking(const Charges& cost, const Charges& held, double spare) const {
  for (const Charge& charge : cost) {
    const Worker& worker = workers_[charge.worker];
    const uint64_t now = BlocksOn(held, charge.worker);
    if (charge.blocks <= now) continue;
    const uint64_t kept_free = static_cast<uint64_t>(spare * static_cast<double>(worker.capacity));
    if (worker.used - now + charge.blocks + kept_free > worker.capacity) return charge.worker;
  }
  return std::nullopt;
}

bool KvBudget::FitsEmpty(const Charges& cost) const {
  return std::all_of(cost.begin(), cost.end(),
                     [&](const Charge& charge) { return charge.blocks <= workers_[charge.worker].capacity; });
}

void KvBudget::Exchange(Charges& held, const Charges& cost) {
  for (const Charge& charge : held) {
    workers_[charge.worker].used -= charge.blocks;
    if (BlocksOn(cost, charge.worker) < charge.blocks) ++workers_[charge.worker].freed;
  }
  for (const Charge& charge : cost) workers_[charge.worker].used += charge.blocks;
  held = cost;
}

}  // namespace dovetail::scheduler
