#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/kv_blocks.h"
#include "proto/placement.h"

namespace dovetail::scheduler {

inline constexpr int64_t BlocksOf(Position tokens) { return (tokens + kSegmentTokens - 1) / kSegmentTokens; }

// KvBlocks that one sequence may use on one attention worker.
struct Charge {
  int worker = 0;  // index in KvBudget::workers()
  uint64_t blocks = 0;
};
using Charges = absl::InlinedVector<Charge, 4>;  // by rising worker

// Which tokens of a sequence are charged.
struct Extent {
  int64_t first_block = 0;  // blocks before are charged elsewhere: shared with the sequence's siblings
  Position end = 0;         // tokens before are charged
  // What attention workers last heard: a windowed group has forgotten what no row from here on can see.
  Position ctx_len = 0;
  int chunk = 0;  // new tokens of its largest step; 0: what the budget was told
  // Of a prefill group whose ranks leave states: blocks of each head's (proto::StateBlocksHeld). 0: there is none.
  int64_t group_states = 0;
};

// How many KvBlocks the scheduler lets sequences use on each attention worker. A block is 64 tokens x one KV head x one
// attention op. Only a promise: block ids stay with the workers, and blocks that the prefix cache shares are charged to
// each of their users.
// Threads: thread-compatible.
class KvBudget {
 public:
  struct Worker {
    WorkerId id;
    Epoch epoch;
    uint64_t capacity = 0;
    uint64_t used = 0;
    uint64_t freed = 0;                           // how often blocks were given back
    double rate = 1;                              // AttentionWorkerJoined
    std::optional<WorkerId> pair = std::nullopt;  // AttentionWorkerJoined
    bool lost = false;      // sequences that lay on it may still be charged here until their steps return
    bool draining = false;  // keeps what it has
    bool usable() const { return !lost && !draining; }
    uint64_t free() const { return used < capacity ? capacity - used : 0; }
    double usage() const { return capacity == 0 ? 1.0 : static_cast<double>(used) / static_cast<double>(capacity); }
  };

  // `table` must outlive the budget. No step has more than `max_chunk` new tokens of a sequence.
  KvBudget(const proto::AttentionTable& table, int max_chunk) : table_(table), max_chunk_(max_chunk) {}

  // Where linear layers of prompts run from now on. Until told: on attention workers, which takes more blocks. What is
  // charged already stays.
  void SetLinearPrompts(proto::LinearPrompts where) { linear_ = where; }
  proto::LinearPrompts linear_prompts() const { return linear_; }

  // A worker that was known keeps its index and what is charged to it.
  void Join(WorkerId id, Epoch epoch, uint64_t capacity, double rate = 1, std::optional<WorkerId> pair = std::nullopt);
  const std::vector<Worker>& workers() const { return workers_; }  // in the order they joined
  // Nothing new may lie on a lost or draining worker. Once no sequence names a lost one any more, Forget() lets a
  // newcomer take its index.
  void Lose(WorkerId id);
  void Drain(WorkerId id);
  void Forget(int worker) { workers_[worker].id = kForgotten; }
  bool any_usable() const;
  std::optional<int> IndexOf(WorkerId id) const;
  bool IsCurrent(WorkerId id, Epoch epoch) const;  // and not lost
  uint64_t capacity() const;
  double fullest_usage() const;

  // What `extent` of a sequence costs; its shards must lie on joined workers.
  Charges CostOf(const proto::Placement& placement, const Extent& extent) const;

  // The first worker where `cost` instead of `held` and with `spare` of its capacity left over is too much; nothing if
  // it fits.
  std::optional<int> Lacking(const Charges& cost, const Charges& held, double spare = 0) const;
  bool FitsEmpty(const Charges& cost) const;  // if nothing else used anything

  // Sets what a sequence holds, whether it fits or not.
  void Exchange(Charges& held, const Charges& cost);

 private:
  static constexpr WorkerId kForgotten{std::numeric_limits<uint32_t>::max()};

  int64_t BlocksOfShard(const proto::Shard& shard, const Extent& extent) const;

  const proto::AttentionTable& table_;
  int max_chunk_;
  proto::LinearPrompts linear_ = proto::LinearPrompts::kOnAttentionWorkers;
  std::vector<Worker> workers_;
};

inline uint64_t TotalBlocks(const Charges& charges) {
  uint64_t total = 0;
  for (const Charge& charge : charges) total += charge.blocks;
  return total;
}
inline uint64_t BlocksOn(const Charges& charges, int worker) {
  for (const Charge& charge : charges) {
    if (charge.worker == worker) return charge.blocks;
  }
  return 0;
}

}  // namespace dovetail::scheduler
