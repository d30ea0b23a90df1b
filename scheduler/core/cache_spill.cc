#include "scheduler/core/cache_spill.h"

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {

Sequence* CacheSpill::Current() const {
  RequestState* const request = current_ ? requests_.Find(*current_) : nullptr;
  if (request == nullptr || request->choices[0]->phase == Phase::kEnded) return nullptr;
  return request->choices[0].get();
}

void CacheSpill::Run() {
  if (Sequence* const current = Current()) return GoOn(*current);
  while (!ended_.empty() && choices_.waiting() == 0 && moves_.empty() && slots_.Has(1))
    if (Begin(*ended_.TakeOldest())) return;
}

// By now the fast worker may have dropped some of it, or be lost; then there is less to copy, or nothing.
bool CacheSpill::Begin(EndedPrefixes::Prefix&& prefix) {
  const std::optional<int> from = budget().IndexOf(prefix.worker);
  if (!from || !budget().IsCurrent(prefix.worker, prefix.epoch) || !budget().workers()[*from].usable()) return false;
  const proto::Placement placement = proto::WholePlacement(accounts_.table(), prefix.worker, prefix.epoch);
  const auto end = BlocksOf(static_cast<Position>(prefix.tokens.size())) * kSegmentTokens;
  if (budget().Lacking(budget().CostOf(placement, {.end = end}), {})) return false;

  auto params = std::make_shared<GenerationRequest>();
  // Clients' ids count from below.
  params->id = RequestId(std::numeric_limits<uint64_t>::max() - ++begun_);
  params->tenant = std::move(prefix.tenant);
  params->cache_salt = std::move(prefix.cache_salt);
  params->prompt = std::move(prefix.tokens);
  params->max_tokens = 1;
  RequestState& request = requests_.Add(std::move(params), turn_.now());
  request.spills = true;
  current_ = request.request->id;
  Sequence& sequence = *request.choices[0];
  choices_.AdmitSpill(sequence);
  incarnations_.Open(sequence, placement);
  return true;
}

void CacheSpill::GoOn(Sequence& sequence) {
  if (sequence.phase != Phase::kReady) return;
  if (sequence.moved) {
    tokens_ += static_cast<uint64_t>(sequence.ctx_len);
    return choices_.End(sequence, FinishReason::kStop);
  }
  sequence.stepped = true;  // by the sequence that ended: a release may name these blocks
  const int from = sequence.charges.front().worker;
  const std::optional<int> to = TakerOf(sequence, from);
  const bool begins = to && sequence.ctx_len > 0 && !moves_.full() && moves_.Begin(sequence, from, *to);
  if (!begins) choices_.End(sequence, FinishReason::kCancelled);
}

// The same worker for all that begins with the same block, if it has room: it has the beginning of what comes later.
std::optional<int> CacheSpill::TakerOf(const Sequence& sequence, int from) const {
  const std::vector<int> tiers = TiersOf(budget().workers());
  std::vector<int> slower;
  for (int worker = 0; worker < static_cast<int>(tiers.size()); ++worker)
    if (budget().workers()[worker].usable() && tiers[worker] > tiers[from]) slower.push_back(worker);
  if (slower.empty()) return std::nullopt;
  const auto& names = sequence.request->prompt_hashes;
  const size_t first = names.empty() ? 0 : static_cast<size_t>(names.front()[0]);
  const uint64_t needed = sequence.charges.front().blocks;
  for (size_t i = 0; i < slower.size(); ++i) {
    const int worker = slower[(first + i) % slower.size()];
    if (budget().workers()[worker].free() >= needed) return worker;
  }
  return std::nullopt;
}

}  // namespace dovetail::scheduler
