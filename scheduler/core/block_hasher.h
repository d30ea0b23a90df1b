#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "base/ids.h"
#include "proto/block_hash.h"

// Names of KV blocks: a chain over a sequence's tokens, 64 at a time. Equal names mean equal content, equal model and
// equal salt.
// Threads: pure.

namespace dovetail::scheduler {

// What the chain of a request begins with: which requests may share its blocks. The lengths are hashed too, so that no
// tenant can imitate another.
proto::BlockHash ChainSeed(uint64_t model_digest, const std::string& tenant, const std::string& cache_salt);

// The name of the block of exactly kSegmentTokens tokens that follows `previous`.
proto::BlockHash NextBlockHash(const proto::BlockHash& previous, std::span<const TokenId> block);

}  // namespace dovetail::scheduler
