#include "control/cache_messages.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/segment_tree.h"
#include "proto/attention_spec.h"
#include "proto/sequence_frames.h"

namespace dovetail::control {

using requests::CachedBlock;
using requests::CacheEvent;
using requests::CacheGroup;

namespace {

constexpr size_t kMaxOwnerBytes = 4096;  // of tenant and cache_salt

void ToProto(const proto::BlockHash& name, v1::BlockName& out) {
  out.set_low(name[0]);
  out.set_high(name[1]);
}

proto::BlockHash FromProto(const v1::BlockName& in) { return {in.low(), in.high()}; }

absl::StatusOr<std::shared_ptr<const CachedBlock>> BlockFrom(const v1::CacheEvent& in) {
  auto block = std::make_shared<CachedBlock>();
  block->hash = FromProto(in.name());
  if (!in.stored()) return block;
  if (in.tokens_size() != kSegmentTokens)
    return InvalidArgument("cache.tokens: ", in.tokens_size(), " of a block, which has ", kSegmentTokens);
  if (in.number() >= static_cast<uint64_t>(proto::kMaxSequenceBlocks))
    return InvalidArgument("cache.number: ", in.number(), " is outside the limit");
  if (in.tenant().size() > kMaxOwnerBytes || in.cache_salt().size() > kMaxOwnerBytes)
    return InvalidArgument("cache.tenant or cache.cache_salt: longer than ", kMaxOwnerBytes, " bytes");
  if (in.has_parent()) block->parent = FromProto(in.parent());
  block->number = static_cast<int64_t>(in.number());
  block->tokens.assign(in.tokens().begin(), in.tokens().end());
  block->of = std::make_shared<const requests::CacheNamespace>(requests::CacheNamespace{in.tenant(), in.cache_salt()});
  return block;
}

}  // namespace

void ToProto(const requests::CacheEvents& events, size_t first, v1::CacheEvents& out) {
  out.set_reset(events.reset && first == 0);
  const size_t end = std::min(events.events.size(), first + kCacheEventsPerMessage);
  for (size_t i = first; i < end; ++i) {
    const CacheEvent& event = events.events[i];
    v1::CacheEvent& to = *out.add_events();
    to.set_stored(event.stored);
    ToProto(event.block->hash, *to.mutable_name());
    to.set_group(event.group.index);
    to.set_kind(static_cast<uint32_t>(event.group.kind));
    to.set_window(static_cast<uint32_t>(event.group.window));
    if (!event.stored) continue;
    if (event.block->parent) ToProto(*event.block->parent, *to.mutable_parent());
    to.set_number(static_cast<uint64_t>(event.block->number));
    to.mutable_tokens()->Add(event.block->tokens.begin(), event.block->tokens.end());
    to.set_tenant(event.block->of->tenant);
    to.set_cache_salt(event.block->of->cache_salt);
  }
}

absl::StatusOr<requests::CacheEvents> FromProto(const v1::CacheEvents& in) {
  requests::CacheEvents events;
  events.reset = in.reset();
  for (const v1::CacheEvent& from : in.events()) {
    if (from.group() >= static_cast<uint32_t>(proto::kMaxLayerGroups) ||
        from.kind() > static_cast<uint32_t>(CacheGroup::Kind::kState) || from.window() > INT32_MAX)
      return InvalidArgument("cache.group, cache.kind or cache.window: outside the limit");
    CacheEvent event;
    event.stored = from.stored();
    event.group = {static_cast<uint16_t>(from.group()), static_cast<CacheGroup::Kind>(from.kind()),
                   static_cast<int>(from.window())};
    DT_ASSIGN_OR_RETURN(event.block, BlockFrom(from));
    events.events.push_back(std::move(event));
  }
  return events;
}

}  // namespace dovetail::control
