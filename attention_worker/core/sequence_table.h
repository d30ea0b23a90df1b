#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "attention_worker/core/block_pool.h"
#include "attention_worker/core/joint_append.h"
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
  std::vector<BlockSetId>
      sets;  // [i]: tokens 64 x (first_block() + i) ..; kNoBlockSet: not held (not yet, or left by the window)
  int64_t left_by_window = 0;  // sets[0 .. this) are kNoBlockSet for good

  int64_t first_block() const { return shard.tokens.begin / kSegmentTokens; }
};

// A live sequence. ctx_len tokens are committed; the step in progress appends q_len more.
struct SequenceState {
  SequenceId id;
  KvGeneration generation;  // proto::SequenceOpened
  std::vector<ShardState> shards;
  std::vector<proto::BlockHash> hashes;  // of its blocks from 0, as far as they are known
  std::vector<uint32_t> resumable;       // until the first step: the block counts it may start at
  bool started = false;
  Position ctx_len = 0;
  int q_len = 0;
  int64_t indexed_blocks = 0;    // blocks below this were offered to the prefix index
  int64_t prompt_blocks = 0;     // that had names when it was opened: where the same prompt would begin again
  size_t fill_shard = 0;         // a move brings the tokens of this shard and of those after it
  Position filled = kNotFilled;  // so far
  static constexpr Position kNotFilled = -1;
  bool filling = false;           // a part came and no step since: it may not have arrived as a whole
  Position arrived = kNotFilled;  // before here it has
  uint32_t micro_batches = 0;     // bit i: its step is in micro-batch i, or was there last; the worker core's, as are:
  StepId last_step;      // the newest step that has begun with it, or part of a move; of a group: its first rank's
  StepId steps_from;     // steps below are over (proto::OpenSequence)
  JointAppend joint;     // of the group that appends its q_len tokens, if one does
  bool damaged = false;  // a block under it does not hold what was written: it must begin again

  void NoteArrival() { arrived = filling ? filled : kNotFilled; }  // of the last part
  Position end() const { return started ? ctx_len + q_len : 0; }   // of what steps that came here brought
};

// What a worker's memory is used for.
struct WorkerStatus {
  uint64_t blocks_total = 0;
  uint64_t blocks_in_use = 0;        // referenced by live sequences or pins
  uint64_t blocks_cached = 0;        // unreferenced, kept for prefix hits, evictable
  uint64_t blocks_of_snapshots = 0;  // of those, of linear states
  uint64_t sequences = 0;
};

// Whether finished blocks get a digest, against which they are compared when another sequence or worker takes them.
enum class Digests : bool { kNone, kOfFinishedBlocks };

struct BlockCopy {
  KvBlockId from = 0;
  KvBlockId to = 0;
};

// The sequences of an attention worker and the block sets they hold. Decides allocation, sharing, truncation and
// release; touches no KV byte. Memory in use is bounded by the pool and by kMaxSequences.
// Threads: thread-compatible.
class SequenceTable {
 public:
  static constexpr size_t kMaxSequences = 65536;
  static constexpr size_t kMaxPins = 65536;

  // `snapshot_blocks`: KvBlocks that snapshots of linear states may keep which no live sequence holds.
  SequenceTable(const proto::AttentionTable& table, uint32_t capacity_blocks, uint32_t snapshot_blocks = UINT32_MAX,
                Digests digests = Digests::kNone);

  // See proto::OpenSequence. kInvalidArgument: a shard that this model does not have; kResourceExhausted: too many
  // sequences. On error nothing changes. The pointer stays valid until the sequence is released.
  // With `extend`: commits message.ctx_len. kNotFound if the sequence is not open, kInvalidArgument for a shard that it
  // has and as Commit.
  absl::StatusOr<const SequenceState*> Open(const proto::OpenSequence& message);

  // A part of a move: positions [begin, end) of [.., move_end) for the shards that Open gave the sequence last. The
  // next part begins where this one ends. CheckFill, MakeRoom(BlocksToFill), Fill.
  struct Part {
    Position begin = 0;
    Position end = 0;
    Position move_end = 0;
  };
  absl::Status CheckFill(const SequenceState& sequence, const Part& part) const;
  int64_t BlocksToFill(const SequenceState& sequence, const Part& part) const;
  void Fill(SequenceState& sequence, const Part& part);
  // Where the part begins in this shard: a windowed one needs only what will be visible. part.end: nowhere.
  Position FillBegin(const proto::Shard& shard, const Part& part) const;

  // See proto::ForkSequence. kNotFound: no such parent; kInvalidArgument: it does not hold ctx_len tokens. The fork may
  // arrive before steps of the parent that bring nothing to this worker: see LacksTokens.
  absl::StatusOr<const SequenceState*> Fork(const proto::ForkSequence& message);

  // Of another generation than the sequence's: nothing happens.
  void Release(const proto::ReleaseSequence& message);

  // Block counts, falling, at which shards like these could start from the prefix cache. Pins what it found if pin_id
  // is not 0. With kMaxPins held, another pin is answered with {0}: nothing that could be relied on.
  std::vector<uint32_t> Probe(const proto::PrefixProbe& message);
  void Unpin(uint64_t pin_id);

  // Null if unknown.
  SequenceState* Find(SequenceId id);
  const SequenceState* Find(SequenceId id) const { return const_cast<SequenceTable*>(this)->Find(id); }
  // Whether what was said speaks of this opening of the sequence, or of none in particular (0).
  static bool Speaks(const SequenceState& sequence, KvGeneration of) {
    return of == KvGeneration(0) || of == sequence.generation;
  }

  // Commits what came before ctx_len: keeps it, forgets the rest, offers full blocks to the prefix index, drops what
  // windows have left behind. `hashes` name the last blocks that end at or before ctx_len; naming one again is
  // harmless. kInvalidArgument if the sequence cannot stand at ctx_len or the hashes do not continue (or contradict)
  // those it has; then nothing changes.
  absl::Status Commit(SequenceState& sequence, Position ctx_len, const std::vector<proto::BlockHash>& hashes);
  // Whether a sequence that has not begun may begin there.
  static bool Offers(const SequenceState& sequence, Position begin);
  absl::Status CheckCommit(const SequenceState& sequence, Position ctx_len,
                           const std::vector<proto::BlockHash>& hashes) const;
  // Whether tokens of [begin, end) belong on this worker. If none does, a step of these tokens is not awaited by its
  // compute worker, and what follows the step may arrive here before it does, or without it.
  static bool LacksTokens(const SequenceState& sequence, Position begin, Position end);
  // Whether no block before those that `hashes` name as the last before ctx_len is without a name.
  static bool NamesContinue(const SequenceState& sequence, Position ctx_len,
                            const std::vector<proto::BlockHash>& hashes);
  // Whether all blocks are here that a query at ctx_len sees. Not so where a move or a step did not bring them.
  bool HoldsVisible(const SequenceState& sequence, Position ctx_len) const;

  // What a step appends to a sequence.
  struct Growth {
    SequenceState* sequence = nullptr;
    int q_len = 0;  // tokens of K and V after what is committed; 0: there is room for them, and they stay as they are
    // Tokens [state_begin, state_end) of linear states. `states`: they come as states, and of their blocks only those
    // are held that proto::KeepsStateBlock names.
    Position state_begin = 0, state_end = 0;
    bool states = false;

    // A step of these tokens that no group shares.
    static Growth OfStep(SequenceState& sequence, int q_len, bool states = false) {
      return {&sequence, q_len, sequence.ctx_len, sequence.ctx_len + q_len, states};
    }
  };
  // KvBlocks that appending these tokens to these sequences, all different and committed, needs: copies of shared
  // blocks included, but not for the last one that still shares.
  int64_t BlocksToAppend(std::span<const Growth> step) const;

  // False: that many blocks cannot be had.
  bool MakeRoom(int64_t blocks);

  // Makes room for these tokens; MakeRoom has been called. Appends the copies to be made before anything is written.
  void Append(const Growth& growth, std::vector<BlockCopy>& copies);

  // Sets that became findable since the last call, each finished and without a digest. None without Digests.
  std::vector<BlockSetId> TakeFinished();
  // The sets of a sequence that the prefix cache gave it and that have a digest: what Open took over, or all that a
  // move would give away.
  std::vector<BlockSetId> Digested(const SequenceState& sequence) const;
  // The digest of a set's bytes as they are now. The first one is kept. Another one than that: the set is damaged, and
  // every sequence that holds it; one that has not begun gives it back instead. Returns false then. A set that was
  // freed meanwhile is well.
  bool TakeDigest(BlockSetId set, uint64_t digest);
  // Whether every block set that the sequence refers to is still the one that it was given. If not, it is damaged.
  bool CheckHeld(SequenceState& sequence) const;
  // Whether every set that can be found lies where its name says. If not, the sequence is damaged. Slower: a lookup for
  // each block.
  bool CheckPlaces(SequenceState& sequence) const;
  // Where a sequence that has not begun may start, with what it holds now.
  void OfferAgain(SequenceState& sequence);

  WorkerStatus status() const;
  const BlockPool& pool() const { return pool_; }
  PrefixIndex& index() { return index_; }
  BlockPool& pool() { return pool_; }

  // Blocks, references and what can be found add up. Not so while a sequence's blocks are damaged.
  // Errors: kInternal says what is not so: a bug.
  absl::Status CheckInvariants() const;

 private:
  struct Pin {
    std::vector<BlockSetId> sets;
  };

  absl::StatusOr<const SequenceState*> Extend(const proto::OpenSequence& message);
  PrefixKey KeyOf(const proto::Shard& shard, const proto::BlockHash& hash) const;
  uint32_t BlocksPerSet(const proto::Shard& shard) const;
  absl::Status ValidateShards(const std::vector<proto::Shard>& shards) const;
  std::vector<BlockSetId> FindCached(const proto::Shard& shard, const std::vector<proto::BlockHash>& hashes);
  std::vector<uint32_t> Resumable(const std::vector<ShardState>& shards, size_t blocks) const;
  // The first block that a query at `position` still sees.
  int64_t FirstVisibleBlock(const proto::Shard& shard, Position position) const;
  // Blocks of the shard that hold the positions [begin, end): [first, last), relative to its first block.
  struct BlockRange {
    int64_t first = 0;
    int64_t last = 0;
  };
  BlockRange BlocksHolding(const ShardState& shard, Position begin, Position end) const;
  BlockRange BlocksWritten(const Growth& growth, const ShardState& shard) const;
  bool Keeps(const Growth& growth, const ShardState& shard, int64_t index) const;
  bool MustCopy(BlockSetId set) const;
  void ReleaseSets(SequenceState& sequence);
  void Drop(BlockSetId set);  // a reference of a sequence or a pin; nothing if the set is not its any more
  static absl::Status CheckHashes(const SequenceState& sequence, Position ctx_len,
                                  const std::vector<proto::BlockHash>& hashes);
  static void TakeHashes(SequenceState& sequence, Position ctx_len, const std::vector<proto::BlockHash>& hashes);
  void IndexCommitted(SequenceState& sequence);
  void MarkSnapshotsAt(const SequenceState& sequence, Position ctx_len);
  void Truncate(ShardState& shard, size_t blocks);  // keeps the first ones
  void DropLeftByWindow(ShardState& shard, Position ctx_len);
  void GiveBackDamaged(SequenceState& sequence, BlockSetId set);
  bool IsInPlace(const SequenceState& sequence, const ShardState& shard, size_t index) const;

  const proto::AttentionTable& table_;
  const Digests digests_;
  BlockPool pool_;
  PrefixIndex index_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<SequenceState>> sequences_;  // looked up, never iterated
  absl::flat_hash_map<uint64_t, Pin> pins_;
  std::vector<BlockSetId> finished_;  // findable, without a digest
  uint64_t openings_ = 0;
};

}  // namespace dovetail::attention
