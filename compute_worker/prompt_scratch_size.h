#pragma once
#include <cstdint>
#include <optional>

#include "base/kv_storage.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// How many blocks of 64 tokens, a KV head and an op a compute worker's prompt scratch has in `bytes`; nothing: as many
// as a compute worker takes by itself, some steps' and at most 256 MiB. 0: the model has no softmax attention.
// `storage`: how the blocks hold K and V; a GPU's scratch has them as they were sent.
// Threads: pure.
uint32_t PromptScratchBlocks(const proto::AttentionTable& table, int max_step_tokens, std::optional<uint64_t> bytes,
                             KvStorage storage = KvStorage::kAsSent);

// The least with which steps of so many tokens are attended on the compute worker: room for one op at a time. Bytes of
// blocks that hold K and V as they were sent; 0: the model has no softmax attention.
// Threads: pure.
uint64_t PromptScratchBytesOfAStep(const proto::AttentionTable& table, int step_tokens);

}  // namespace dovetail::compute
