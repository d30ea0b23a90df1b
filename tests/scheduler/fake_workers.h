#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"
#include "proto/step_plan.h"

namespace dovetail::scheduler {

// An attention worker that stores token ids instead of keys and values, block by block, shard by shard, and says what
// is wrong with what it is told. Memory is counted as a real one would: 64 tokens x a KV head x an attention op, copy
// on write, windows freed.
class FakeAttentionWorker {
 public:
  FakeAttentionWorker(WorkerId id, Epoch epoch, uint64_t capacity, const proto::AttentionTable* table, bool caching)
      : id_(id), epoch_(epoch), capacity_(capacity), table_(table), caching_(caching) {}

  WorkerId id() const { return id_; }
  Epoch epoch() const { return epoch_; }
  void Restart() {
    ++epoch_;
    sequences_.clear();
    cache_.clear();
    blocks_at_most_ = 0;
  }

  int refuse = 0;  // so many of the next opens and forks

  proto::SequenceOpened Open(const proto::OpenSequence& message);
  proto::SequenceOpened Fork(const proto::ForkSequence& message);
  void Release(const proto::ReleaseSequence& message);
  // Takes over what `giver` holds, into the shards that it was given last: as MoveSequence asks the giver. False: the
  // giver does not hold that.
  bool TakeFrom(const FakeAttentionWorker& giver, const proto::MoveSequence& message);
  std::vector<uint32_t> Probe(const std::vector<proto::Shard>& shards,
                              const std::vector<proto::BlockHash>& hashes) const;

  // StepBegin and the appends of one entry. Then Read() gives what each shard holds.
  void Step(const proto::StepEntry& entry, const proto::PrefillPart& part = {});
  // The token at `position` that the shard of `group` holding `kv_head` remembers; -1: none.
  TokenId Read(SequenceId sequence, LayerGroup group, int kv_head, Position position) const;

  void EvictSome(uint64_t random);
  bool Knows(SequenceId sequence) const { return sequences_.contains(sequence); }
  size_t sequences() const { return sequences_.size(); }
  uint64_t blocks_in_use() const;
  uint64_t capacity() const { return capacity_; }
  std::vector<std::string> TakeComplaints() { return std::exchange(complaints_, {}); }

 private:
  bool Refuses(SequenceId sequence);

  struct Block {
    std::vector<TokenId> tokens;
  };
  struct HeldShard {
    proto::Shard shard;
    std::map<int64_t, std::shared_ptr<Block>> blocks;
  };
  struct Held {
    KvGeneration generation;
    std::vector<HeldShard> shards;
    std::vector<uint32_t> resumable;        // before the first step
    std::vector<proto::BlockHash> offered;  // hashes it was opened with
    bool stepped = false;
    size_t fill_shard = 0;  // a move brings what this shard and those after it lack
    bool filled = false;    // and has, since it was opened; `offered` names these blocks, too
    Position ctx_len = 0, end = 0;
    StepId group;          // of the step at hand: the prefill group whose rank 0 began it
    Position written = 0;  // by its ranks so far
    int64_t named = 0;
    uint64_t blocks = 0;  // as in blocks_in_use(), shared ones included
  };
  using CacheKey = std::tuple<proto::BlockHash, uint16_t, int, int>;  // hash, group, heads

  static CacheKey KeyOf(const proto::BlockHash& hash, const proto::Shard& shard) {
    return {hash, shard.group.value(), shard.kv_heads.begin, shard.kv_heads.end};
  }
  int64_t FirstVisible(const proto::Shard& shard, Position ctx_len) const;
  void Append(HeldShard& held, Position position, TokenId token);
  void AppendTokens(HeldShard& held, const proto::StepEntry& entry);
  void CheckRoom(SequenceId sequence);
  void Name(Held& held, Position ctx_len, const std::vector<proto::BlockHash>& hashes, bool exact);
  void NameFilled(Held& held, Position ctx_len);
  // Whether the cache had all that the release names when the sequence was opened.
  static bool WasOffered(const Held& held, const proto::ReleaseSequence& message);
  void Complain(SequenceId sequence, const std::string& what);
  // What is said of a sequence names the generation that its opening gave; or none, unless it was `heard`.
  void CheckGeneration(const Held& held, SequenceId sequence, KvGeneration said, bool heard = true);
  uint64_t BlocksPerIndex(const proto::Shard& shard) const;
  void Recount(Held& held);

  WorkerId id_;
  Epoch epoch_;
  uint64_t capacity_;
  const proto::AttentionTable* table_;
  bool caching_;  // block hashes are expected
  std::map<SequenceId, Held> sequences_;
  std::map<CacheKey, std::vector<TokenId>> cache_;
  uint64_t openings_ = 0;
  uint64_t blocks_at_most_ = 0;  // sum of Held::blocks: blocks_in_use() if nothing is shared
  std::set<SequenceId> refused_;
  std::vector<std::string> complaints_;
};

}  // namespace dovetail::scheduler
