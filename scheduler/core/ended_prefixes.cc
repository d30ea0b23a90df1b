#include "scheduler/core/ended_prefixes.h"

#include <algorithm>
#include <utility>

#include "scheduler/core/limits.h"
#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {

// It lies whole on a worker that has a slower tier below it, and may be found under its blocks' names.
bool EndedPrefixes::IsWorthKeeping(const Sequence& sequence) const {
  if (options_.placement != PlacementPolicy::kTiers) return false;
  if (!options_.enable_prefix_caching || !options_.spill_prefixes) return false;
  if (!sequence.stepped || sequence.lost || sequence.ctx_len < kLeastTokensSpilled) return false;
  if (!sequence.params().use_prefix_cache || sequence.charges.size() != 1) return false;
  if (!sequence.placement.front().tokens.whole()) return false;
  const std::vector<int> tiers = TiersOf(budget_.workers());
  const KvBudget::Worker& at = budget_.workers()[sequence.charges.front().worker];
  const int tier = tiers[sequence.charges.front().worker];
  return at.usable() && std::any_of(tiers.begin(), tiers.end(), [&](int other) { return other > tier; });
}

void EndedPrefixes::Note(const Sequence& sequence) {
  if (!IsWorthKeeping(sequence)) return;
  const proto::Shard& shard = sequence.placement.front();
  Prefix prefix{.worker = shard.worker,
                .epoch = shard.epoch,
                .tenant = sequence.params().tenant,
                .cache_salt = sequence.params().cache_salt,
                .tokens = {}};
  const Position end = std::min(sequence.ctx_len + 1, sequence.size());
  prefix.tokens.reserve(end);
  for (Position at = 0; at < end; ++at) prefix.tokens.push_back(sequence.token(at));
  if (prefix.tokens.size() > kMostEndedTokens) return;
  tokens_ += prefix.tokens.size();
  prefixes_.push_back(std::move(prefix));
  while (prefixes_.size() > kMostEndedPrefixes || tokens_ > kMostEndedTokens) DropOldest();
}

void EndedPrefixes::DropOldest() {
  tokens_ -= prefixes_.front().tokens.size();
  prefixes_.pop_front();
}

std::optional<EndedPrefixes::Prefix> EndedPrefixes::TakeOldest() {
  if (prefixes_.empty()) return std::nullopt;
  tokens_ -= prefixes_.front().tokens.size();
  Prefix oldest = std::move(prefixes_.front());
  prefixes_.pop_front();
  return oldest;
}

}  // namespace dovetail::scheduler
