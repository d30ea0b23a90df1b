#include "scheduler/core/cache_directory.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace dovetail::scheduler {

using requests::CacheEvent;
using requests::CacheGroup;

namespace {

// Parents first; the order of the map differs from run to run.
void Sort(std::vector<CacheEvent>& events) {
  std::sort(events.begin(), events.end(), [](const CacheEvent& a, const CacheEvent& b) {
    return std::tie(a.block->number, a.block->hash, a.group.index) <
           std::tie(b.block->number, b.block->hash, b.group.index);
  });
}

}  // namespace

void CacheDirectory::Add(const proto::BlockHash& name, const proto::BlockHash* parent, int64_t number,
                         const requests::GenerationRequest& request, std::vector<TokenId> tokens) {
  auto block = std::make_shared<requests::CachedBlock>();
  block->hash = name;
  block->number = number;
  block->tokens = std::move(tokens);
  if (parent != nullptr) {
    block->parent = *parent;
    // A name stands for all before it, and for whose it is.
    if (const auto known = blocks_.find(*parent); known != blocks_.end()) block->of = known->second.block->of;
  }
  if (block->of == nullptr)
    block->of =
        std::make_shared<const requests::CacheNamespace>(requests::CacheNamespace{request.tenant, request.cache_salt});
  Entry& entry = blocks_[name];
  entry.block = std::move(block);
  Touch(name, entry);
}

void CacheDirectory::Touch(const proto::BlockHash& name, Entry& entry) {
  if (!entry.holders.empty()) return;
  entry.given_out = ++given_out_;
  unheld_.push_back({name, entry.given_out});
  if (unheld_.size() <= kMaxUnheld) return;
  const Unheld oldest = unheld_.front();
  unheld_.pop_front();
  const auto known = blocks_.find(oldest.name);
  if (known == blocks_.end() || !known->second.holders.empty() || known->second.given_out != oldest.given_out) return;
  blocks_.erase(known);
}

CacheGroup CacheDirectory::GroupAt(uint16_t group) const {
  if (table_.linear(LayerGroup(group)) != nullptr) return {group, CacheGroup::Kind::kState, 0};
  const int window = table_.softmax(LayerGroup(group)).window;
  return {group, window > 0 ? CacheGroup::Kind::kSlidingWindow : CacheGroup::Kind::kFullAttention, window};
}

bool CacheDirectory::IsHeld(const Entry& entry, uint16_t group) const {
  const int heads = table_.softmax(LayerGroup(group)).kv_heads;
  int covered = 0;
  for (bool more = true; more && covered < heads;) {
    more = false;
    for (const Holder& holder : entry.holders) {
      if (holder.group != group || holder.head_begin > covered || holder.head_end <= covered) continue;
      covered = holder.head_end;
      more = true;
    }
  }
  return covered >= heads;
}

uint64_t CacheDirectory::Take(WorkerId worker, Epoch epoch, const proto::CacheChanged& changed,
                              std::vector<CacheEvent>& events) {
  uint64_t unknown = 0;
  for (const proto::CacheChange& change : changed.changes) {
    const uint16_t group = change.group.value();
    const auto known = blocks_.find(change.block);
    if (known == blocks_.end() || group >= table_.group_count() ||
        change.kv_heads.end > table_.softmax(change.group).kv_heads) {
      ++unknown;
      continue;
    }
    Entry& entry = known->second;
    const Holder holder{worker, epoch, group, static_cast<uint16_t>(change.kv_heads.begin),
                        static_cast<uint16_t>(change.kv_heads.end)};
    const auto at = std::find(entry.holders.begin(), entry.holders.end(), holder);
    if (change.held == (at != entry.holders.end())) continue;  // told before
    const bool before = IsHeld(entry, group);
    if (change.held)
      entry.holders.push_back(holder);
    else
      entry.holders.erase(at);
    if (const bool after = IsHeld(entry, group); after != before)
      events.push_back({after, GroupAt(group), entry.block});
    Touch(known->first, entry);
  }
  return unknown;
}

void CacheDirectory::Lose(WorkerId worker, Epoch epoch, std::vector<CacheEvent>& events) {
  std::vector<CacheEvent> lost;
  std::vector<std::pair<int64_t, proto::BlockHash>> unheld;
  for (auto& [name, entry] : blocks_) {
    const auto is_gone = [&](const Holder& holder) { return holder.worker == worker && holder.epoch == epoch; };
    if (std::none_of(entry.holders.begin(), entry.holders.end(), is_gone)) continue;
    std::vector<uint16_t> held;
    for (uint16_t group = 0; group < static_cast<uint16_t>(table_.group_count()); ++group)
      if (IsHeld(entry, group)) held.push_back(group);
    entry.holders.erase(std::remove_if(entry.holders.begin(), entry.holders.end(), is_gone), entry.holders.end());
    for (const uint16_t group : held)
      if (!IsHeld(entry, group)) lost.push_back({false, GroupAt(group), entry.block});
    if (entry.holders.empty()) unheld.emplace_back(entry.block->number, name);
  }
  Sort(lost);
  events.insert(events.end(), std::make_move_iterator(lost.begin()), std::make_move_iterator(lost.end()));
  std::sort(unheld.begin(), unheld.end());
  for (const auto& [number, name] : unheld)
    if (const auto known = blocks_.find(name); known != blocks_.end()) Touch(known->first, known->second);
}

requests::CacheEvents CacheDirectory::Snapshot() const {
  requests::CacheEvents all;
  all.reset = true;
  for (const auto& [name, entry] : blocks_)
    for (uint16_t group = 0; group < static_cast<uint16_t>(table_.group_count()); ++group)
      if (!entry.holders.empty() && IsHeld(entry, group)) all.events.push_back({true, GroupAt(group), entry.block});
  Sort(all.events);
  return all;
}

}  // namespace dovetail::scheduler
