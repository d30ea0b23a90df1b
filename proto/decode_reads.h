#pragma once
#include <cstdint>

#include "base/kv_storage.h"
#include "proto/attention_spec.h"

// What bounds how many tokens attention workers can answer for: they read all of a sequence's K and V for each token.
// Threads: pure functions.

namespace dovetail::proto {

// Bytes of memory that attention of all layers moves for one token of a sequence at `tokens` >= 0 tokens: K and V that
// the token sees are read, linear states are read and written.
double DecodeBytes(const AttentionTable& table, KvStorage storage, int64_t tokens);

}  // namespace dovetail::proto
