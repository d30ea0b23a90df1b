#include "scheduler/core/tiering.h"

#include <algorithm>

#include "scheduler/core/limits.h"
#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {
namespace {

// It may move, and a move frees what it holds: that was computed where it lies, and no sibling uses it.
bool HoldsItsOwn(const Sequence& sequence) {
  return sequence.MayMove() && sequence.stepped && !sequence.moved && !sequence.shares_prefix;
}

}  // namespace

bool Tiering::MakesRoom(Sequence& victim, int from) {
  if (options_.placement != PlacementPolicy::kTiers || victim.request->spills) return false;
  if (moves_.AnyFrom(budget().workers()[from].id)) return true;
  if (moves_.full() || !HoldsItsOwn(victim)) return false;
  std::vector<int> takers = placer_.TakersOf(victim);
  const std::vector<int> tiers = TiersOf(budget().workers());
  std::stable_sort(takers.begin(), takers.end(), [&](int a, int b) { return tiers[a] < tiers[b]; });
  return std::any_of(takers.begin(), takers.end(),
                     [&](int to) { return to != from && moves_.Begin(victim, from, to); });
}

// It lies whole on one worker, and is worth the pause.
bool Tiering::MayComeBack(const Sequence& sequence) const {
  if (!HoldsItsOwn(sequence) || sequence.request->paused) return false;
  if (sequence.params().only_attention_worker || sequence.charges.size() != 1) return false;
  const auto left = sequence.params().max_tokens - static_cast<int>(sequence.output.size());
  return left >= kLeastTokensBack && sequence.placement.front().tokens.whole();
}

bool Tiering::HasRoomToSpare(int worker, const Sequence& sequence) const {
  const KvBudget::Worker& of = budget().workers()[worker];
  if (sequence.refusals.Include(worker, budget())) return false;
  const uint64_t used = of.used + sequence.charges.front().blocks;
  return static_cast<double>(used) <= (1 - kSpareToComeBack) * static_cast<double>(of.capacity);
}

void Tiering::ComeBack() {
  if (options_.placement != PlacementPolicy::kTiers || choices_.waiting() > 0 || !moves_.empty()) return;
  const std::vector<int> tiers = TiersOf(budget().workers());
  const std::vector<int> order = FastestTierFirst(budget().workers(), {});
  if (order.empty() || tiers[order.back()] == 0) return;
  Sequence* oldest = nullptr;
  int from = 0, to = 0;
  for (Sequence* sequence : slots_.active()) {
    if ((oldest != nullptr && oldest->age() < sequence->age()) || !MayComeBack(*sequence)) continue;
    const int at = sequence->charges.front().worker;
    const auto taker = std::find_if(order.begin(), order.end(), [&](int worker) {
      return tiers[worker] < tiers[at] && HasRoomToSpare(worker, *sequence);
    });
    if (taker == order.end()) continue;
    oldest = sequence;
    from = at;
    to = *taker;
  }
  if (oldest != nullptr) moves_.Begin(*oldest, from, to);
}

}  // namespace dovetail::scheduler
