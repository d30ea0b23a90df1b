#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/block_hash.h"
#include "proto/cache_frames.h"
#include "requests/cache_events.h"
#include "requests/generation.h"

namespace dovetail::scheduler {

// Which blocks of prefixes can be found on the attention workers. Workers say by name what they hold of each layer
// group; the tokens behind a name are noted when the scheduler gives it out. A block is stored while all heads of the
// group are on any workers.
//
// A name that no worker holds is kept for as long as a worker may still take it up: until kMaxUnheld others were given
// out after it. What a worker says about a name that is gone is counted and not told.
// Cost:    a look-up for each name that is given out or reported; about 500 bytes a block that is held.
// Threads: thread-compatible; deterministic.
class CacheDirectory {
 public:
  static constexpr size_t kMaxUnheld = 65536;

  // `table` outlives this.
  explicit CacheDirectory(const proto::AttentionTable& table) : table_(table) {}

  // A name goes out to a worker: that of block `number` of a sequence of `request`, whose 64 tokens are `tokens()`.
  // `parent` null: it is the first.
  template <typename TokensFn>
  void Name(const proto::BlockHash& name, const proto::BlockHash* parent, int64_t number,
            const requests::GenerationRequest& request, TokensFn tokens) {
    if (const auto known = blocks_.find(name); known != blocks_.end()) return Touch(known->first, known->second);
    Add(name, parent, number, request, tokens());
  }

  // What a worker reports; appends what that makes findable, or not findable any more. Returns how many changes were of
  // unknown blocks, groups or heads: they are dropped.
  uint64_t Take(WorkerId worker, Epoch epoch, const proto::CacheChanged& changed,
                std::vector<requests::CacheEvent>& events);
  // The worker is gone, with what it held in this epoch.
  void Lose(WorkerId worker, Epoch epoch, std::vector<requests::CacheEvent>& events);

  // All that can be found, as a reset: parents before what follows them.
  requests::CacheEvents Snapshot() const;

  size_t size() const { return blocks_.size(); }  // names that are known

 private:
  struct Holder {
    WorkerId worker;
    Epoch epoch;
    uint16_t group = 0;
    uint16_t head_begin = 0, head_end = 0;
    bool operator==(const Holder&) const = default;
  };
  struct Entry {
    std::shared_ptr<const requests::CachedBlock> block;
    absl::InlinedVector<Holder, 1> holders;
    uint64_t given_out = 0;  // its last place in unheld_
  };
  struct Unheld {
    proto::BlockHash name;
    uint64_t given_out = 0;
  };

  void Add(const proto::BlockHash& name, const proto::BlockHash* parent, int64_t number,
           const requests::GenerationRequest& request, std::vector<TokenId> tokens);
  void Touch(const proto::BlockHash& name, Entry& entry);
  bool IsHeld(const Entry& entry, uint16_t group) const;
  requests::CacheGroup GroupAt(uint16_t group) const;

  const proto::AttentionTable& table_;
  absl::flat_hash_map<proto::BlockHash, Entry> blocks_;  // what is read of all of them is sorted
  std::deque<Unheld> unheld_;                            // oldest first; some are held, or came again, meanwhile
  uint64_t given_out_ = 0;
};

}  // namespace dovetail::scheduler
