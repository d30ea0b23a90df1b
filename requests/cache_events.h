#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "proto/block_hash.h"

// What the prefix cache of a cluster gains and loses, as the scheduler, the control plane and the server share it.
// Threads: plain values.

namespace dovetail::requests {

// Whose requests may find a block.
// Threads: immutable.
struct CacheNamespace {
  std::string tenant;      // GenerationRequest::tenant
  std::string cache_salt;  // GenerationRequest::cache_salt
};

// 64 tokens that follow `parent`.
// Threads: immutable; shared by those that tell of it and those that listen.
struct CachedBlock {
  proto::BlockHash hash{};
  std::optional<proto::BlockHash> parent;  // nothing: the first 64 tokens of a prompt
  int64_t number = 0;                      // of the block in its sequence, from 0
  std::vector<TokenId> tokens;             // 64
  std::shared_ptr<const CacheNamespace> of;
};

// Layers with equal attention have blocks of their own.
struct CacheGroup {
  enum class Kind : uint8_t { kFullAttention = 0, kSlidingWindow = 1, kState = 2 };
  uint16_t index = 0;
  Kind kind = Kind::kFullAttention;
  int window = 0;  // of kSlidingWindow, in tokens
  bool operator==(const CacheGroup&) const = default;
};

// A block can be found from now on (all heads of the group, on whichever attention workers), or cannot any more.
struct CacheEvent {
  bool stored = false;
  CacheGroup group;
  std::shared_ptr<const CachedBlock> block;
};

// In order: a parent is stored before what follows it.
struct CacheEvents {
  bool reset = false;  // what was told before is void: nothing is cached but what these and later events store
  std::vector<CacheEvent> events;
};

}  // namespace dovetail::requests
