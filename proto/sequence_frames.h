#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "proto/block_hash.h"
#include "proto/placement.h"

// The messages about sequences, between the scheduler and attention workers, and StepBegin from the compute worker.
// Plain values; Encode and Decode are exact inverses; Decode checks every length and range before use (kInvalidArgument
// names the field).

namespace dovetail::proto {

inline constexpr int kMaxSequenceBlocks = 1 << 20;  // 64 Mi tokens

// Scheduler -> attention worker. Makes the sequence known here, with the shards this worker holds (none of another
// worker's). Blocks that the prefix cache holds under `hashes` are taken over at once, so they cannot be evicted.
// Opening an open sequence again replaces it.
struct OpenSequence {
  SequenceId sequence;
  std::vector<Shard> shards;
  std::vector<BlockHash> hashes;  // of the prompt's full blocks, in order; empty: no prefix reuse
  bool operator==(const OpenSequence&) const = default;
};

// Attention worker -> scheduler. `resumable` are the block counts, falling, at which this worker could start: all its
// shards hold what a first query at 64 x count would see. Always ends with 0. The scheduler takes the largest that all
// the sequence's workers offer and says so by the ctx_len of the first StepBegin.
struct SequenceOpened {
  SequenceId sequence;
  std::vector<uint32_t> resumable;
  bool operator==(const SequenceOpened&) const = default;
};

// Scheduler -> attention worker. `child` begins as a copy of the first ctx_len tokens of `parent`, copy on write.
// Answered by SequenceOpened{child, {ctx_len in whole blocks}}.
struct ForkSequence {
  SequenceId parent;
  SequenceId child;
  Position ctx_len = 0;
  bool operator==(const ForkSequence&) const = default;
};

// Scheduler -> attention worker. Forgets the sequence; its full committed blocks stay in the prefix cache until
// evicted. `hashes` name the last blocks that end at or before ctx_len, as in StepBegin. Releasing an unknown sequence
// is harmless.
struct ReleaseSequence {
  SequenceId sequence;
  Position ctx_len = 0;  // committed tokens
  std::vector<BlockHash> hashes;
  bool operator==(const ReleaseSequence&) const = default;
};

// Scheduler -> attention worker: how much of a prompt is cached? With pin, the hit is kept from eviction until the pin
// is opened or unpinned (pin ids are the asker's). Answered by PrefixProbed.
struct PrefixProbe {
  uint64_t pin_id = 0;  // 0: do not pin
  std::vector<Shard> shards;
  std::vector<BlockHash> hashes;
  bool operator==(const PrefixProbe&) const = default;
};
struct PrefixProbed {
  uint64_t pin_id = 0;
  std::vector<uint32_t> resumable;
  bool operator==(const PrefixProbed&) const = default;
};
struct Unpin {
  uint64_t pin_id = 0;
  bool operator==(const Unpin&) const = default;
};

// Attention worker -> scheduler, after a change: what the scheduler's budgets are checked against.
struct WorkerStatus {
  uint64_t blocks_total = 0;
  uint64_t blocks_in_use = 0;     // referenced by live sequences or pins
  uint64_t blocks_cached = 0;     // unreferenced, kept for prefix hits, evictable
  uint64_t sequences = 0;
  bool operator==(const WorkerStatus&) const = default;
};

// Compute worker -> attention worker, once per step. ctx_len is authoritative and commits the previous step: tokens
// beyond it are forgotten; a ctx_len that is neither the former one nor its end is refused.
struct StepBeginEntry {
  SequenceId sequence;
  Position ctx_len = 0;
  int32_t q_len = 0;
  std::vector<BlockHash>
      hashes;  // of the last blocks that end at or before ctx_len; those that came before may come again
  bool operator==(const StepBeginEntry&) const = default;
};
struct StepBegin {
  std::vector<StepBeginEntry> entries;
  bool operator==(const StepBegin&) const = default;
};

// Attention worker -> compute worker: the step cannot run here. Nothing was changed by it; lacking memory, nothing but
// the commit that its ctx_len meant, so that it may be repeated.
struct StepRefused {
  bool out_of_memory = false;
  std::string reason;
  bool operator==(const StepRefused&) const = default;
};

void Encode(const OpenSequence& message, std::vector<std::byte>& out);
void Encode(const SequenceOpened& message, std::vector<std::byte>& out);
void Encode(const ForkSequence& message, std::vector<std::byte>& out);
void Encode(const ReleaseSequence& message, std::vector<std::byte>& out);
void Encode(const PrefixProbe& message, std::vector<std::byte>& out);
void Encode(const PrefixProbed& message, std::vector<std::byte>& out);
void Encode(const Unpin& message, std::vector<std::byte>& out);
void Encode(const WorkerStatus& message, std::vector<std::byte>& out);
void Encode(const StepBegin& message, std::vector<std::byte>& out);
void Encode(const StepRefused& message, std::vector<std::byte>& out);

// Decode<OpenSequence>(bytes) and so on.
template <typename Message>
absl::StatusOr<Message> Decode(std::span<const std::byte> bytes);

}  // namespace dovetail::proto
