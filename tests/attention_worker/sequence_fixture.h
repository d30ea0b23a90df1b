#pragma once
#include <string>
#include <vector>

#include "attention_worker/core/sequence_table.h"
#include "base/status.h"
#include "proto/attention_spec.h"
#include "proto/block_hash.h"

// Small models and sequences for the tests of the attention worker.

namespace dovetail::attention::testing {

inline proto::SoftmaxSpec Spec(int kv_heads, int window = 0) {
  proto::SoftmaxSpec spec;
  spec.query_heads = 2 * kv_heads;
  spec.kv_heads = kv_heads;
  spec.key_dim = 8;
  spec.value_dim = 4;
  spec.scale = 1;
  spec.window = window;
  return spec;
}

// One layer group of full attention: 2 ops, 2 KV heads, so 4 KvBlocks for 64 tokens of a whole shard.
proto::AttentionTable FullTable();
// Group 0 as above; group 1: 1 op, 1 KV head, a window of 100 tokens.
proto::AttentionTable MixedTable();

inline constexpr WorkerId kWorker{7};
inline constexpr Epoch kEpoch{3};

proto::Shard ShardOf(int group, proto::HeadRange heads, proto::TokenRange tokens = {});
// A whole shard for each group.
std::vector<proto::Shard> WholeShards(const proto::AttentionTable& table);

// The chain hashes of the first `count` blocks of a text in which token t of version v is v + t: texts of one version
// share prefixes.
std::vector<proto::BlockHash> Hashes(int version, int count);
// Those of blocks [first, end).
std::vector<proto::BlockHash> HashesBetween(int version, int first, int end);

// A sequence table driven as the worker's core drives it.
class Driver {
 public:
  Driver(const proto::AttentionTable& table, uint32_t blocks) : table_(table), sequences_(table_, blocks) {}

  SequenceTable& operator*() { return sequences_; }
  SequenceTable* operator->() { return &sequences_; }

  // Opens with whole shards; returns the block counts at which it may start.
  std::vector<uint32_t> Open(uint64_t id, std::vector<proto::BlockHash> hashes = {});
  // Commit, make room, append. kResourceExhausted if there is no room.
  absl::Status Step(uint64_t id, Position ctx_len, int q_len, std::vector<proto::BlockHash> hashes = {});
  void Release(uint64_t id, Position ctx_len = 0, std::vector<proto::BlockHash> hashes = {});
  // Opens, prefills `tokens` in one step, commits them with the hashes of `version` and releases: the cache now holds
  // the full blocks.
  void Cache(uint64_t id, int version, int tokens);

  const std::vector<BlockSetId>& Sets(uint64_t id, int shard = 0) {
    return sequences_.Find(SequenceId(id))->shards[shard].sets;
  }
  uint64_t in_use() const { return sequences_.status().blocks_in_use; }
  uint64_t cached() const { return sequences_.status().blocks_cached; }
  std::vector<BlockCopy> copies;  // of the last step

 private:
  const proto::AttentionTable table_;
  SequenceTable sequences_;
};

}  // namespace dovetail::attention::testing
