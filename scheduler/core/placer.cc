#include "scheduler/core/placer.h"

#include <algorithm>
#include <utility>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

Position Placer::MostTokens(const Sequence& sequence) const {
  return std::min<Position>(sequence.prompt_size() + sequence.params().max_tokens, options_.max_model_len);
}

std::optional<int> Placer::OnlyAttentionWorker(const Sequence& sequence) const {
  if (!sequence.params().only_attention_worker) return std::nullopt;
  const std::optional<int> index = budget_.IndexOf(*sequence.params().only_attention_worker);
  return index && budget_.workers()[*index].usable() ? index : std::nullopt;
}

std::vector<proto::Placement> Placer::Candidates(const Sequence& sequence, PlacementPolicy policy,
                                                 const std::vector<KvBudget::Worker>& workers) const {
  if (const std::optional<int> only = OnlyAttentionWorker(sequence))
    return {proto::WholePlacement(options_.attention, workers[*only].id, workers[*only].epoch)};
  return PlacementsOf(policy, MostTokens(sequence), sequence.hits, workers);
}

std::vector<proto::Placement> Placer::PlacementsOf(PlacementPolicy policy, Position most_tokens,
                                                   const std::vector<uint32_t>& hits,
                                                   const std::vector<KvBudget::Worker>& workers) const {
  const std::vector<int> order = EmptiestFirst(workers);
  if (order.empty()) return {};
  if (policy == PlacementPolicy::kHeads) return {SplitHeads(options_.attention, workers, order)};
  if (policy == PlacementPolicy::kTokens)
    return {SplitTokens(options_.attention, workers, order, options_.token_shard_tokens, most_tokens)};
  const bool tiers = policy == PlacementPolicy::kTiers;
  std::vector<proto::Placement> candidates;
  for (int worker : tiers ? FastestTierFirst(workers, hits) : PreferredForWhole(workers, hits))
    candidates.push_back(proto::WholePlacement(options_.attention, workers[worker].id, workers[worker].epoch));
  if (!tiers || !ThatHold(candidates, most_tokens).empty()) return candidates;
  if (auto continued = Continued(FastestTierFirst(workers, {}), workers)) candidates.push_back(*std::move(continued));
  return candidates;
}

// A sequence that takes the room which `workers` have, one after the other. Nothing: fewer than two have any.
std::optional<proto::Placement> Placer::Continued(const std::vector<int>& order,
                                                  const std::vector<KvBudget::Worker>& workers) const {
  const bool empty = std::all_of(order.begin(), order.end(), [&](int worker) { return workers[worker].used == 0; });
  std::vector<Position> holds;
  for (const int worker : order) {
    const KvBudget::Worker& of = workers[worker];
    const double spare = empty ? 0 : kAdmissionSpare * static_cast<double>(of.capacity);
    holds.push_back(TokensIn(of, of.free() - std::min(of.free(), static_cast<uint64_t>(spare))));
  }
  if (std::count_if(holds.begin(), holds.end(), [](Position tokens) { return tokens > 0; }) < 2) return std::nullopt;
  return ContinueTokens(options_.attention, workers, order, holds);
}

// Of a sequence's first tokens, a multiple of 64: what so many blocks of that worker hold.
Position Placer::TokensIn(const KvBudget::Worker& worker, uint64_t blocks) const {
  const proto::Placement whole = proto::WholePlacement(options_.attention, worker.id, worker.epoch);
  int64_t fits = 0, too_long = BlocksOf(options_.max_model_len) + 1;
  while (too_long - fits > 1) {
    const int64_t middle = fits + (too_long - fits) / 2;
    const bool fit = TotalBlocks(budget_.CostOf(whole, {.end = middle * kSegmentTokens})) <= blocks;
    (fit ? fits : too_long) = middle;
  }
  return fits * kSegmentTokens;
}

// Those that can hold it at all, on workers that do not refuse it if there are any; first those that can hold it until
// it ends.
std::vector<proto::Placement> Placer::Possible(const Sequence& sequence, PlacementPolicy policy) const {
  std::vector<proto::Placement> possible;
  if (!sequence.refusals.empty())
    possible = ThatHold(Candidates(sequence, policy, sequence.refusals.Others(budget_)), sequence.size());
  if (possible.empty()) {
    std::vector<proto::Placement> candidates = Candidates(sequence, policy, budget_.workers());
    possible = ThatHold(candidates, sequence.size());
    if (possible.empty()) return candidates;
  }
  std::stable_partition(possible.begin(), possible.end(), [&](const proto::Placement& placement) {
    return budget_.FitsEmpty(budget_.CostOf(placement, {.end = MostTokens(sequence)}));
  });
  return possible;
}

std::vector<proto::Placement> Placer::ThatHold(std::vector<proto::Placement> candidates, Position tokens) const {
  std::erase_if(candidates, [&](const proto::Placement& placement) {
    return !budget_.FitsEmpty(budget_.CostOf(placement, {.end = tokens}));
  });
  return candidates;
}

std::optional<PlacementPolicy> Placer::NextPolicy(const Sequence& sequence) const {
  if (!sequence.refusals.empty())
    if (const auto policy = PolicyThatFits(sequence, sequence.refusals.Others(budget_))) return policy;
  return PolicyThatFits(sequence, budget_.workers());
}

std::optional<PlacementPolicy> Placer::PolicyThatFits(const Sequence& sequence,
                                                      std::vector<KvBudget::Worker> workers) const {
  for (KvBudget::Worker& worker : workers) worker.used = 0;
  for (uint64_t turn = turn_; turn < turn_ + 3; ++turn) {
    const PlacementPolicy policy = PolicyOfTurn(options_.placement, turn);
    if (!ThatHold(Candidates(sequence, policy, workers), sequence.size()).empty()) return policy;
  }
  return std::nullopt;
}

std::optional<int> Placer::LacksRoomOn(const Sequence& sequence, const proto::Placement& placement) const {
  if (sequence.refusals.empty()) return std::nullopt;
  for (const proto::Shard& shard : placement)
    if (const auto index = budget_.IndexOf(shard.worker);
        index && budget_.workers()[*index].used > 0 && sequence.refusals.HadNoRoomOn(*index, budget_))
      return index;
  return std::nullopt;
}

bool Placer::FitsNowhere(Position tokens) const {
  std::vector<KvBudget::Worker> empty = budget_.workers();
  for (KvBudget::Worker& worker : empty) worker.used = 0;
  for (uint64_t turn = 0; turn < 3; ++turn)
    for (const proto::Placement& placement : PlacementsOf(PolicyOfTurn(options_.placement, turn), tokens, {}, empty))
      if (budget_.FitsEmpty(budget_.CostOf(placement, {.end = tokens}))) return false;
  return true;
}

Position Placer::LongestSequence() const {
  if (!FitsNowhere(options_.max_model_len)) return options_.max_model_len;
  int64_t fits = 0, too_long = BlocksOf(options_.max_model_len);
  while (too_long - fits > 1) {
    const int64_t middle = fits + (too_long - fits) / 2;
    (FitsNowhere(middle * kSegmentTokens) ? too_long : fits) = middle;
  }
  return fits * kSegmentTokens;
}

std::optional<proto::Placement> Placer::Place(const Sequence& sequence, PlacementPolicy policy) const {
  for (proto::Placement& placement : Possible(sequence, policy)) {
    if (LacksRoomOn(sequence, placement)) continue;
    // Room to grow by a block, unless nothing else is there.
    const Charges roomy = budget_.CostOf(placement, {.end = sequence.size() + kSegmentTokens});
    if (!budget_.Lacking(roomy, {}, kAdmissionSpare)) return placement;
    const Charges exact = budget_.CostOf(placement, {.end = sequence.size()});
    const bool alone = std::all_of(exact.begin(), exact.end(),
                                   [&](const struct Charge& c) { return budget_.workers()[c.worker].used == 0; });
    if (alone && budget_.FitsEmpty(exact)) return placement;
  }
  return std::nullopt;
}

std::vector<int> Placer::TakersOf(const Sequence& sequence) const {
  std::vector<int> takers = EmptiestFirst(budget_.workers());
  std::erase_if(takers, [&](int worker) { return sequence.refusals.HadNoRoomOn(worker, budget_); });
  std::stable_partition(takers.begin(), takers.end(),
                        [&](int worker) { return !sequence.refusals.Include(worker, budget_); });
  return takers;
}

bool Placer::FitsElsewhere(const Sequence& sequence) const {
  return PolicyThatFits(sequence, sequence.refusals.Others(budget_)) && !OnlyAttentionWorker(sequence);
}

}  // namespace dovetail::scheduler
