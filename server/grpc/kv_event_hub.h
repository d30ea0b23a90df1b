#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"
#include "engine/engine.h"
#include "server/grpc/kv_events_call.h"
#include "server/work/cache_epochs.h"

namespace dovetail::server {

// What the prefix cache gains and loses, as numbered batches for the subscribers of SubscribeKvEvents. A tenant hears
// of the blocks that its requests to this server may find, and of no other tenant's; its batches have numbers of their
// own, from 1. The last batches are kept, so that a subscriber may go on where it was. One that begins, or was away for
// too long, gets all blocks as a snapshot, whose last chunk has the number of the last batch.
// Threads: thread-safe.
class KvEventHub final : public engine::CacheSink {
 public:
  static constexpr size_t kMaxSubscribers = 64;
  static constexpr size_t kBlocksPerBatch = 512;
  static constexpr size_t kMaxHistory = 4096;  // batches of a tenant, of together kMaxHistoryBytes at most
  static constexpr size_t kMaxHistoryBytes = size_t{4} << 20;

  using PostFn = std::function<void(std::function<void()>)>;

  // `post` has work done on another thread, in order. What is given outlives it, or is used no more after Close().
  KvEventHub(const CacheEpochs& epochs, PostFn post) : epochs_(epochs), post_(std::move(post)) {}

  // Posts Take(events).
  void OnCacheEvents(requests::CacheEvents events) override;
  void Take(const requests::CacheEvents& events);

  // The tenant's later requests find nothing of what is cached now.
  void Flushed(const std::string& tenant);

  // Sends what `start` asks for and, from then on, what happens. kResourceExhausted: there are too many subscribers.
  absl::Status Subscribe(const std::string& tenant, uint64_t start, const std::shared_ptr<KvEventsCall>& call);

  // Ends the calls of all subscribers; later ones end at once. What is posted must have been done before the hub goes.
  void Close();

 private:
  using Key = std::pair<proto::BlockHash, uint16_t>;  // of a block and a group
  struct Live {
    std::shared_ptr<const requests::CachedBlock> block;
    requests::CacheGroup group;
  };
  struct Tenant {
    uint64_t last = 0;  // batch
    uint64_t last_event = 0;
    uint64_t last_stored = 0;
    std::map<uint64_t, Live> live;  // in the order in which they were stored
    std::deque<KvEventBatchPtr> history;
    size_t history_bytes = 0;
    std::vector<std::weak_ptr<KvEventsCall>> subscribers;
  };
  struct Place {  // of a live block
    Tenant* tenant = nullptr;
    uint64_t stored = 0;
  };
  class Batches;
  class Snapshot;

  void TakeEvent(const requests::CacheEvent& event, std::map<std::string, Batches>& batches)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Clear(Tenant& tenant, Batches& batches) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish(Tenant& tenant, Batches batches) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t CountSubscribers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const CacheEpochs& epochs_;
  Mutex post_mutex_;
  PostFn post_ ABSL_GUARDED_BY(post_mutex_);  // empty: closed
  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, Tenant> tenants_ ABSL_GUARDED_BY(mutex_);  // at most as many as there are API keys
  absl::flat_hash_map<Key, Place> places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
