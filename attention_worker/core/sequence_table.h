#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "attention_worker/core/block_pool.h"
#include "attention_worker/core/prefix_index.h"
#include "base/ids.h"
#include "base/status.h"
#include "proto/attention_spec.h"
#include "proto/block_hash.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"

namespace dovetail::attention {

// One shard of a live sequence: the block sets of its token range, in order.
struct ShardState {
  proto::Shard shard;
  std::vector<BlockSetId> sets;  // [i]: tokens 64 x (first_block() + i) ..; kNoBlockSet: not held (not yet, or left by the window)

  int64_t first_block() const { return shard.tokens.begin / kSegmentTokens; }
};

// A live sequence. ctx_len tokens are committed; the step in progress appends q_len more.
struct SequenceState {
  SequenceId id;
  std::vector<ShardState> shards;
  std::vector<proto::BlockHash> hashes;   // of its blocks from 0, as far as they are known
  std::vector<uint32_t> resumable;        // until the first step: the block counts it may start at
  bool started = false;
  Position ctx_len = 0;
  int q_len = 0;
  int64_t indexed_blocks = 0;             // blocks below this were offered to the prefix index
};

struct BlockCopy {
  KvBlockId from = 0;
  KvBlockId to = 0;
};

// The sequences of an attention worker and the block sets they hold. Decides allocation, sharing, truncation and release; touches no KV
// byte. Thread-compatible. Memory in use is bounded by the pool and by kMaxSequences.
class SequenceTable {
 public:
  static constexpr size_t kMaxSequences = 65536;

  SequenceTable(const proto::AttentionTable& table, uint32_t capacity_blocks);

  // See proto::OpenSequence. kInvalidArgument: a shard that this model does not have; kResourceExhausted: too many sequences. On error
  // nothing changes. The pointer stays valid until the sequence is released.
  absl::StatusOr<const SequenceState*> Open(const proto::OpenSequence& message);

  // See proto::ForkSequence. kNotFound: no such parent; kInvalidArgument: it does not hold ctx_len tokens.
  absl::StatusOr<const SequenceState*> Fork(const proto::ForkSequence& message);

  void Release(const proto::ReleaseSequence& message);

  // Block counts, falling, at which shards like these could start from the prefix cache. Pins what it found if pin_id is not 0.
  std::vector<uint32_t> Probe(const proto::PrefixProbe& message);
  void Unpin(uint64_t pin_id);

  // Null if unknown.
  SequenceState* Find(SequenceId id);

  // Commits what came before ctx_len: keeps it, forgets the rest, offers full blocks to the prefix index, drops what windows have left
  // behind. kInvalidArgument if the sequence cannot stand at ctx_len; then nothing changes.
  absl::Status Commit(SequenceState& sequence, Position ctx_len, const std::vector<proto::BlockHash>& new_hashes);

  // KvBlocks that appending q_len tokens needs, copies of shared blocks included.
  int64_t BlocksToAppend(const SequenceState& sequence, int q_len) const;

  // False: that many blocks cannot be had.
  bool MakeRoom(int64_t blocks);

  // Makes room for q_len more tokens; MakeRoom has been called. Appends the copies to be made before anything is written.
  void Append(SequenceState& sequence, int q_len, std::vector<BlockCopy>& copies);

  proto::WorkerStatus status() const;
  const BlockPool& pool() const { return pool_; }

 private:
  struct Pin {
    std::vector<BlockSetId> sets;
  };

  PrefixKey KeyOf(const proto::Shard& shard, const proto::BlockHash& hash) const;
  uint32_t BlocksPerSet(const proto::Shard& shard) const;
  absl::Status ValidateShards(const std::vector<proto::Shard>& shards) const;
  std::vector<BlockSetId> FindCached(const proto::Shard& shard, const std::vector<proto::BlockHash>& hashes) const;
  std::vector<uint32_t> Resumable(const std::vector<ShardState>& shards, size_t blocks) const;
  // The first block that a query at `position` still sees.
  int64_t FirstVisibleBlock(const proto::Shard& shard, Position position) const;
  // Blocks of the shard that hold the positions [begin, end): [first, last), relative to its first block.
  struct BlockRange {
    int64_t first = 0;
    int64_t last = 0;
  };
  BlockRange BlocksHolding(const ShardState& shard, Position begin, Position end) const;
  bool MustCopy(BlockSetId set) const;
  void ReleaseSets(SequenceState& sequence);
  void IndexCommitted(SequenceState& sequence);

  const proto::AttentionTable& table_;
  BlockPool pool_;
  PrefixIndex index_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<SequenceState>> sequences_;  // looked up, never iterated
  absl::flat_hash_map<uint64_t, Pin> pins_;
};

}  // namespace dovetail::attention
