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
#include "proto/prefill_part.h"
#include "proto/state_blocks.h"
#include "proto/step_layout.h"

// The messages about sequences, between the scheduler and attention workers, and StepBegin from the compute worker.
// Encode and Decode are exact inverses. Decode checks every length and range before use.
// Errors: kInvalidArgument names the field.
// Threads: plain values and pure functions.

namespace dovetail::proto {

inline constexpr int kMaxSequenceBlocks = 1 << 20;  // 64 Mi tokens
inline constexpr int64_t kMaxGatherPieceBytes = int64_t{64} << 20;

// Scheduler -> attention worker. Makes the sequence known here, with the shards this worker holds (none of another
// worker's). Blocks that the prefix cache holds under `hashes` are taken over at once, so they cannot be evicted.
// Opening an open sequence again replaces it.
struct OpenSequence {
  SequenceId sequence;
  std::vector<Shard> shards;
  std::vector<BlockHash> hashes;  // of the prompt's full blocks, in order; empty: no prefix reuse
  // The sequence is open here: it gets these shards in addition, and what they lack of its tokens comes by a move.
  bool extend = false;
  // With extend: committed tokens, and `hashes` name all their full blocks. It commits them as StepBegin does.
  Position ctx_len = 0;
  // With extend: all steps of the sequence with smaller numbers are over. Their begins are refused if they come later.
  StepId steps_from;
  bool operator==(const OpenSequence&) const = default;
};

// Attention worker -> scheduler. `resumable` are the block counts, falling, at which this worker could start: all its
// shards hold what a first query at 64 x count would see. Always ends with 0. The scheduler takes the largest that all
// the sequence's workers offer and says so by the ctx_len of the first StepBegin.
struct SequenceOpened {
  SequenceId sequence;
  std::vector<uint32_t> resumable;
  // What the worker calls the KV that the sequence has here from now on: it counts openings and forks, and an opening
  // that extends gets no new one. All that is said about the sequence later says it again (0: says nothing). What says
  // another one speaks of KV that is no more, and is refused.
  KvGeneration generation{};
  bool operator==(const SequenceOpened&) const = default;
};

// Scheduler -> attention worker. `child` begins as a copy of the first ctx_len tokens of `parent`, copy on write.
// Answered by SequenceOpened{child, {ctx_len in whole blocks}}.
struct ForkSequence {
  SequenceId parent;
  SequenceId child;
  Position ctx_len = 0;
  KvGeneration generation{};  // of the parent
  bool operator==(const ForkSequence&) const = default;
};

// Scheduler -> attention worker. Forgets the sequence; its full committed blocks stay in the prefix cache until
// evicted. `hashes` name the last blocks that end at or before ctx_len, as in StepBegin. Releasing an unknown sequence
// is harmless.
struct ReleaseSequence {
  SequenceId sequence;
  Position ctx_len = 0;  // committed tokens
  std::vector<BlockHash> hashes;
  KvGeneration generation{};
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

// Scheduler -> attention worker: send the K and V of all shards that you hold of a sequence to the attention worker
// `target`, which has opened it (or was given more shards of it) with shards like these in the same order. Goes by
// frames of steps without queries, in the micro-batch `slot` beyond those of compute workers: StepBegin with fill_end,
// then kKeyValue per op (of a linear state: its blocks as they lie in memory, attention_worker/core/state_snapshot.h),
// each answered by an empty kPartial. No step of the sequence is in flight meanwhile. Answered
// by SequenceMoved; the sequence stays open here until it is released.
inline constexpr int kMoveSlots = 4;          // sequences that one attention worker takes in or gives away at a time
inline constexpr int kMoveChunkTokens = 512;  // of a step without queries; a multiple of 64
inline constexpr int kMoveOpsAhead = 4;       // ops of such a step that are sent before the first of them is answered
struct MoveSequence {
  SequenceId sequence;
  Position begin = 0;  // a multiple of 64: the target has what comes before
  Position end = 0;    // committed tokens
  uint16_t slot = 0;
  StepId step;  // of its first part; the others take those that follow. Greater than that of any earlier move or step
  NodeId target;
  Epoch target_epoch;
  KvGeneration generation{};         // here
  KvGeneration target_generation{};  // there
  bool operator==(const MoveSequence&) const = default;
};
struct SequenceMoved {
  SequenceId sequence;
  StepId step;
  bool moved = false;
  std::string reason;  // why not
  bool operator==(const SequenceMoved&) const = default;
};

// Compute worker -> attention worker, once per step. ctx_len is authoritative and commits the previous step: tokens
// beyond it are forgotten; a ctx_len that is neither the former one nor its end is refused.
struct StepBeginEntry {
  SequenceId sequence;
  Position ctx_len = 0;
  int32_t q_len = 0;
  std::vector<BlockHash>
      hashes;  // of the last blocks that end at or before ctx_len; those that came before may come again
  // Queries attend the tokens before this position here, the others where the asker is: a multiple of 64, at most
  // ctx_len. 0: no query comes for this entry. kOpenEnd: all tokens, new ones included.
  Position attend_end = kOpenEnd;
  // K and V of tokens [gather_begin, gather_end), which are not attended here, come with the answers: at least
  // attend_end, and at most ctx_len. kOpenEnd as gather_begin: of none; as gather_end: up to ctx_len.
  Position gather_begin = kOpenEnd;
  Position gather_end = kOpenEnd;
  // How linear layers cross; with states, the asker computes them.
  StateExchange states = StateExchange::kTokens;
  // > 0: a part of a move, for the shards that the sequence was given last; ctx_len commits nothing. Where the move
  // ends.
  Position fill_end = 0;
  KvGeneration generation{};
  EntryExchange exchange() const { return {attend_end, gather_begin, gather_end, states, fill_end > 0}; }
  bool operator==(const StepBeginEntry&) const = default;
};
struct StepBegin {
  std::vector<StepBeginEntry> entries;
  // A rank of a prefill group; there is one entry then, whose hashes end at part.base. The first rank that comes
  // commits part.base and makes room for all tokens of the group; later ranks write into that room. What a rank asks
  // of an op is answered when the ranks before it have written theirs of that op.
  PrefillPart part;
  // K and V of earlier tokens that an op asks for come in pieces of about so many bytes at most, if they have more
  // (StepLayout::piece_bytes). 0: with the answer in any case.
  int64_t gather_piece_bytes = 0;
  bool operator==(const StepBegin&) const = default;
};

// Attention worker -> compute worker: the step cannot run here. Nothing was changed by it; lacking memory, nothing but
// the commit that its ctx_len meant, so that it may be repeated.
struct StepRefused {
  bool out_of_memory = false;
  std::string reason;
  // Sequences of the step whose KV here is not what was written: they must begin again from the token log.
  std::vector<SequenceId> damaged;
  bool operator==(const StepRefused&) const = default;
};

void Encode(const OpenSequence& message, std::vector<std::byte>& out);
void Encode(const SequenceOpened& message, std::vector<std::byte>& out);
void Encode(const ForkSequence& message, std::vector<std::byte>& out);
void Encode(const ReleaseSequence& message, std::vector<std::byte>& out);
void Encode(const PrefixProbe& message, std::vector<std::byte>& out);
void Encode(const PrefixProbed& message, std::vector<std::byte>& out);
void Encode(const Unpin& message, std::vector<std::byte>& out);
void Encode(const MoveSequence& message, std::vector<std::byte>& out);
void Encode(const SequenceMoved& message, std::vector<std::byte>& out);
void Encode(const StepBegin& message, std::vector<std::byte>& out);
void Encode(const StepRefused& message, std::vector<std::byte>& out);

// Decode<OpenSequence>(bytes) and so on.
template <typename Message>
absl::StatusOr<Message> Decode(std::span<const std::byte> bytes);

}  // namespace dovetail::proto
