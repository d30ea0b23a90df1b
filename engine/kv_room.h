#pragma once
#include <cstdint>

#include "absl/status/status.h"
#include "attention_worker/attention_backend.h"
#include "proto/attention_spec.h"
#include "proto/kv_blocks.h"
#include "scheduler/core/scheduler.h"

// How much memory a KV cache takes, and whether it fits. K and V grow with a sequence up to max_model_len; layers with
// windows and linear states stop growing (proto::BlocksOfSequence). Bytes throughout.
// Threads: thread-safe; pure, except that the machine is asked how much memory it has.

namespace dovetail::engine {

// What sequences and what is kept of them for others can fill over all attention workers of one machine, within `room`
// bytes; 0: a quarter of its memory. At least one whole sequence a worker, whatever the room.
uint64_t DefaultKvCacheBytes(const proto::AttentionTable& table, const scheduler::SchedulerOptions& options,
                             int attention_workers, uint64_t room = 0,
                             attention::KvStorage storage = attention::KvStorage::kAsSent,
                             proto::LinearPrompts linear = proto::LinearPrompts::kOnAttentionWorkers);

// Whether so many bytes over so many workers hold a sequence. kResourceExhausted, naming the flag that gave them and
// what is needed of K and V and of linear states, if not.
absl::Status CheckKvCacheBytes(const proto::AttentionTable& table, uint64_t bytes, int attention_workers,
                               attention::KvStorage storage = attention::KvStorage::kAsSent,
                               const std::string& flag = "--kv-cache-memory-bytes");

// Whether `room` bytes of a device hold a sequence of max_model_len tokens. kResourceExhausted, with what would, if
// not.
absl::Status CheckKvRoom(const proto::AttentionTable& table, const scheduler::SchedulerOptions& options,
                         int attention_workers, uint64_t room,
                         attention::KvStorage storage = attention::KvStorage::kAsSent,
                         proto::LinearPrompts linear = proto::LinearPrompts::kOnAttentionWorkers);

}  // namespace dovetail::engine
