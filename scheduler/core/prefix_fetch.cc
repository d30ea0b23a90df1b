#include "scheduler/core/prefix_fetch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "scheduler/core/limits.h"
#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {

// The worker of a slower tier that has most of the prompt cached; nothing: none has enough more than the taker.
std::optional<int> PrefixFetch::HolderFor(const Sequence& sequence, int taker) const {
  const std::vector<int> tiers = TiersOf(budget().workers());
  const auto hits = [&](int worker) {
    return worker < static_cast<int>(sequence.hits.size()) ? Position{sequence.hits[worker]} * kSegmentTokens : 0;
  };
  std::optional<int> holder;
  for (int worker = 0; worker < static_cast<int>(tiers.size()); ++worker) {
    if (!budget().workers()[worker].usable() || tiers[worker] <= tiers[taker]) continue;
    if (!holder || hits(worker) > hits(*holder)) holder = worker;
  }
  if (!holder || hits(*holder) < hits(taker) + kLeastTokensFetched) return std::nullopt;
  return IsFaster(taker, hits(taker), hits(*holder)) ? holder : std::nullopt;
}

bool PrefixFetch::IsFaster(int taker, Position begin, Position end) const {
  const std::optional<double> move_s = moves_.SecondsPerToken();
  if (!move_s || pool_.empty()) return true;
  const std::optional<WorkerId> pair = budget().workers()[static_cast<size_t>(taker)].pair;
  const double compute_s =
      pool_.planner().SecondsAlone(pair.value_or(pool_.workers().front()), begin, end, pair.has_value());
  return compute_s == 0 || *move_s * static_cast<double>(end - begin) < compute_s;
}

std::optional<proto::Placement> PrefixFetch::OpenElsewhere(Sequence& sequence,
                                                           const proto::Placement& placement) const {
  const bool whole = std::all_of(placement.begin(), placement.end(), [&](const proto::Shard& shard) {
    return shard.worker == placement.front().worker && shard.tokens.whole();
  });
  if (options_.placement != PlacementPolicy::kTiers || !whole || moves_.full()) return std::nullopt;
  if (sequence.params().only_attention_worker) return std::nullopt;
  const std::optional<int> taker = budget().IndexOf(placement.front().worker);
  const std::optional<int> holder = taker ? HolderFor(sequence, *taker) : std::nullopt;
  if (!holder || sequence.refusals.Include(*holder, budget())) return std::nullopt;
  const KvBudget::Worker& from = budget().workers()[*holder];
  proto::Placement there = proto::WholePlacement(options_.attention, from.id, from.epoch);
  if (budget().Lacking(budget().CostOf(there, {.end = sequence.size() + kSegmentTokens}), {})) return std::nullopt;
  sequence.fetched_to = placement.front().worker;
  return there;
}

void PrefixFetch::Begin(Sequence& sequence) {
  if (!sequence.fetched_to) return;
  const std::optional<int> to = budget().IndexOf(*std::exchange(sequence.fetched_to, std::nullopt));
  const bool possible = to && budget().workers()[*to].usable() && !moves_.full() && sequence.MayMove();
  if (!possible || sequence.ctx_len == 0 || sequence.charges.size() != 1) return;
  if (moves_.Begin(sequence, sequence.charges.front().worker, *to)) tokens_ += static_cast<uint64_t>(sequence.ctx_len);
}

}  // namespace dovetail::scheduler
