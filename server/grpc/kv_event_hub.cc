#include "server/grpc/kv_event_hub.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/time/clock.h"
#include "base/segment_tree.h"

namespace dovetail::server {

namespace pb = vllm::grpc::engine;
using requests::CachedBlock;
using requests::CacheGroup;

namespace {

struct Salt {
  std::string of_client;
  std::string epoch;  // CacheEpochs
};

// GenerationRequest::cache_salt: what the client said, the tenant's epoch, and which rope a prompt of that length has.
Salt Split(std::string salt) {
  constexpr std::string_view kRope = "|rope", kEpoch = "|epoch";
  constexpr size_t kEpochBytes = kEpoch.size() + 16;
  const size_t rope = salt.rfind(kRope);
  if (rope != std::string::npos &&
      std::all_of(salt.begin() + static_cast<ptrdiff_t>(rope + kRope.size()), salt.end(), absl::ascii_isdigit))
    salt.resize(rope);
  const size_t epoch = salt.rfind(kEpoch);
  if (epoch == std::string::npos || salt.size() - epoch != kEpochBytes) return {std::move(salt), ""};
  return {salt.substr(0, epoch), salt.substr(epoch)};
}

int64_t NameOf(const proto::BlockHash& hash) { return static_cast<int64_t>(hash[0]); }

const char* NameOf(CacheGroup::Kind kind) {
  switch (kind) {
    case CacheGroup::Kind::kFullAttention: return "full_attention";
    case CacheGroup::Kind::kSlidingWindow: return "sliding_window";
    case CacheGroup::Kind::kState: return "mamba";
  }
  return "";
}

double Timestamp() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

}  // namespace

// Events of one tenant, in batches of at most kBlocksPerBatch blocks. Blocks that follow each other share an event.
class KvEventHub::Batches {
 public:
  void Stored(const CachedBlock& block, const CacheGroup& group) {
    const bool follows = last_stored_ != nullptr && block.parent == last_hash_ && last_group_ == group && HasRoom();
    if (!follows) {
      last_stored_ = NewEvent().mutable_stored();
      if (block.parent) last_stored_->set_parent_block_hash(NameOf(*block.parent));
      last_stored_->set_group_idx(group.index);
      last_stored_->set_kv_cache_spec_kind(NameOf(group.kind));
      if (group.window > 0) last_stored_->set_kv_cache_spec_sliding_window(static_cast<uint32_t>(group.window));
      if (std::string salt = Split(block.of->cache_salt).of_client; !salt.empty())
        last_stored_->set_cache_salt(std::move(salt));
    }
    pb::KvBlock& out = *last_stored_->add_blocks();
    out.set_block_hash(NameOf(block.hash));
    out.mutable_token_ids()->Add(block.tokens.begin(), block.tokens.end());
    out.set_block_size(kSegmentTokens);
    last_removed_ = nullptr;
    last_hash_ = block.hash;
    last_group_ = group;
    ++blocks_;
  }
  void Removed(const proto::BlockHash& hash, const CacheGroup& group) {
    if (last_removed_ == nullptr || last_group_ != group || !HasRoom()) {
      last_removed_ = NewEvent().mutable_removed();
      last_removed_->set_group_idx(group.index);
    }
    last_removed_->add_block_hashes(NameOf(hash));
    last_stored_ = nullptr;
    last_group_ = group;
    ++blocks_;
  }
  void Cleared() {
    NewEvent().mutable_cleared();
    last_stored_ = nullptr;
    last_removed_ = nullptr;
  }
  std::vector<pb::KvEventBatch> Take() { return std::move(batches_); }

 private:
  bool HasRoom() const { return blocks_ < kBlocksPerBatch; }
  pb::KvCacheEvent& NewEvent() {
    if (batches_.empty() || !HasRoom()) {
      batches_.emplace_back();
      blocks_ = 0;
    }
    return *batches_.back().add_events();
  }

  std::vector<pb::KvEventBatch> batches_;
  size_t blocks_ = 0;  // in the last one
  pb::KvBlocksStored* last_stored_ = nullptr;
  pb::KvBlocksRemoved* last_removed_ = nullptr;
  proto::BlockHash last_hash_{};
  CacheGroup last_group_;
};

// All blocks of a tenant, as they were when batch `last` had been sent. A chunk is made when it is asked for.
class KvEventHub::Snapshot {
 public:
  Snapshot(const std::map<uint64_t, Live>& live, uint64_t last) : last_(last) {
    live_.reserve(live.size());
    for (const auto& [stored, block] : live) live_.push_back(block);
    chunks_ = std::max<size_t>(1, (live_.size() + kBlocksPerBatch - 1) / kBlocksPerBatch);
  }

  KvEventBatchPtr Next() {
    if (next_ == chunks_) return nullptr;
    Batches made;
    if (next_ == 0) made.Cleared();
    const size_t end = std::min(live_.size(), (next_ + 1) * kBlocksPerBatch);
    for (size_t i = next_ * kBlocksPerBatch; i < end; ++i) made.Stored(*live_[i].block, live_[i].group);
    auto chunk = std::make_shared<pb::KvEventBatch>(std::move(made.Take().front()));
    // Every batch stored at most kBlocksPerBatch blocks, so there are no more chunks than batches were sent.
    chunk->set_sequence_number(last_ - std::min<uint64_t>(last_, chunks_ - 1 - next_));
    chunk->set_timestamp(Timestamp());
    chunk->set_dp_rank(0);
    chunk->mutable_snapshot()->set_index(static_cast<uint32_t>(next_));
    chunk->mutable_snapshot()->set_count(static_cast<uint32_t>(chunks_));
    chunk->mutable_snapshot()->set_blocks(live_.size());
    ++next_;
    return chunk;
  }

 private:
  std::vector<Live> live_;
  size_t chunks_ = 0, next_ = 0;
  const uint64_t last_;
};

void KvEventHub::OnCacheEvents(requests::CacheEvents events) {
  const MutexLock lock(post_mutex_);
  if (post_ == nullptr) return;
  post_([this, events = std::make_shared<const requests::CacheEvents>(std::move(events))] { Take(*events); });
}

void KvEventHub::Take(const requests::CacheEvents& events) {
  const MutexLock lock(mutex_);
  std::map<std::string, Batches> batches;
  if (events.reset)
    for (auto& [name, tenant] : tenants_)
      if (tenant.last > 0) Clear(tenant, batches[name]);
  for (const requests::CacheEvent& event : events.events) TakeEvent(event, batches);
  for (auto& [name, of_tenant] : batches) Publish(tenants_[name], std::move(of_tenant));
}

void KvEventHub::TakeEvent(const requests::CacheEvent& event, std::map<std::string, Batches>& batches) {
  const Key key(event.block->hash, event.group.index);
  const auto place = places_.find(key);
  if (!event.stored) {
    if (place == places_.end()) return;  // of a tenant's former epoch, or of another server
    Tenant& tenant = *place->second.tenant;
    const auto live = tenant.live.find(place->second.stored);
    batches[live->second.block->of->tenant].Removed(key.first, event.group);
    tenant.live.erase(live);
    places_.erase(place);
    return;
  }
  const requests::CacheNamespace& of = *event.block->of;
  if (place != places_.end() || Split(of.cache_salt).epoch != epochs_.Of(of.tenant)) return;
  Tenant& tenant = tenants_[of.tenant];
  places_[key] = {&tenant, ++tenant.last_stored};
  tenant.live[tenant.last_stored] = {event.block, event.group};
  batches[of.tenant].Stored(*event.block, event.group);
}

void KvEventHub::Clear(Tenant& tenant, Batches& batches) {
  for (const auto& [stored, live] : tenant.live) places_.erase(Key(live.block->hash, live.group.index));
  tenant.live.clear();
  batches.Cleared();
}

void KvEventHub::Flushed(const std::string& name) {
  const MutexLock lock(mutex_);
  Batches batches;
  Tenant& tenant = tenants_[name];
  Clear(tenant, batches);
  Publish(tenant, std::move(batches));
}

void KvEventHub::Publish(Tenant& tenant, Batches batches) {
  for (pb::KvEventBatch& made : batches.Take()) {
    made.set_sequence_number(++tenant.last);
    made.set_timestamp(Timestamp());
    made.set_dp_rank(0);
    for (pb::KvCacheEvent& event : *made.mutable_events()) event.set_event_id(++tenant.last_event);
    const auto batch = std::make_shared<const pb::KvEventBatch>(std::move(made));
    tenant.history.push_back(batch);
    tenant.history_bytes += batch->ByteSizeLong();
    while (tenant.history.size() > kMaxHistory || tenant.history_bytes > kMaxHistoryBytes) {
      tenant.history_bytes -= tenant.history.front()->ByteSizeLong();
      tenant.history.pop_front();
    }
    for (const auto& subscriber : tenant.subscribers)
      if (const auto call = subscriber.lock()) call->Send(batch);
  }
}

size_t KvEventHub::CountSubscribers() {
  size_t count = 0;
  for (auto& [name, tenant] : tenants_) {
    std::erase_if(tenant.subscribers, [](const auto& subscriber) { return subscriber.expired(); });
    count += tenant.subscribers.size();
  }
  return count;
}

absl::Status KvEventHub::Subscribe(const std::string& name, uint64_t start, const std::shared_ptr<KvEventsCall>& call) {
  const MutexLock lock(mutex_);
  if (closed_) return absl::UnavailableError("the server is shutting down");
  if (CountSubscribers() >= kMaxSubscribers)
    return ResourceExhausted("there are ", kMaxSubscribers, " subscribers; end the call of one of them");
  Tenant& tenant = tenants_[name];
  const uint64_t oldest = tenant.history.empty() ? tenant.last + 1 : tenant.history.front()->sequence_number();
  KvSnapshotFn first;
  if (start >= oldest && start <= tenant.last + 1) {
    std::deque<KvEventBatchPtr> again(tenant.history.begin() + static_cast<ptrdiff_t>(start - oldest),
                                      tenant.history.end());
    first = [again = std::move(again)]() mutable {
      KvEventBatchPtr next;
      if (again.empty()) return next;
      next = std::move(again.front());
      again.pop_front();
      return next;
    };
  } else if (start > 0 || tenant.last > 0) {
    first = [snapshot = std::make_shared<Snapshot>(tenant.live, tenant.last)] { return snapshot->Next(); };
  }
  call->Begin(std::move(first));
  tenant.subscribers.push_back(call);
  return absl::OkStatus();
}

void KvEventHub::Close() {
  {
    const MutexLock lock(post_mutex_);
    post_ = nullptr;
  }
  std::vector<std::shared_ptr<KvEventsCall>> calls;
  {
    const MutexLock lock(mutex_);
    closed_ = true;
    for (auto& [name, tenant] : tenants_)
      for (const auto& subscriber : tenant.subscribers)
        if (auto call = subscriber.lock()) calls.push_back(std::move(call));
  }
  for (const auto& call : calls) call->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
}

}  // namespace dovetail::server
