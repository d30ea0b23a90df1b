#pragma once
#include <cstdint>
#include <vector>

#include "proto/block_hash.h"
#include "scheduler/core/cache_directory.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// The names of a sequence's KV blocks, by which attention workers find what they have cached. They are computed once
// and kept with the request (prompt) and with the sequence (output).
// Threads: thread-compatible.
class BlockNames {
 public:
  // `directory` hears of names that go out, and outlives this; null: none does.
  explicit BlockNames(const SchedulerOptions& options, CacheDirectory* directory = nullptr)
      : caching_(options.enable_prefix_caching), directory_(directory) {}

  // False if cached blocks may not be used: caching is off, or log probabilities of the prompt are still owed.
  bool MayLookUp(const Sequence& sequence) const;
  // How many leading blocks may be looked up: at least one token is always computed.
  uint32_t Usable(const Sequence& sequence) const;
  // Appends the names of blocks [first, end) to `out`. Nothing if caching is off.
  // Requires: the sequence has end x 64 tokens.
  void Append(Sequence& sequence, int64_t first, int64_t end, std::vector<proto::BlockHash>& out) const;

 private:
  void TellDirectory(Sequence& sequence, int64_t block) const;
  static const proto::BlockHash& NameOf(Sequence& sequence, int64_t block);

  const bool caching_;
  CacheDirectory* const directory_;
};

}  // namespace dovetail::scheduler
