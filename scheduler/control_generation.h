#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "proto/control/dovetail_control.pb.h"
#include "scheduler/scheduler_node.h"

namespace dovetail::scheduler {

// The servers that are connected, and whose request is whose. Every server numbers its requests by itself; the
// scheduler gives them numbers of its own. Updates of one turn of the loop travel to a server in one message.
// Threads: reactor-owned.
class ControlGeneration {
 public:
  using SendFn = std::function<void(control::v1::GenerationEvents)>;
  using HandleFn = std::function<void(const Event&)>;
  // Of a cache that a server begins to watch; what it is not told of are the last blocks of long sequences. With their
  // tokens they fit into what may wait for a server.
  static constexpr size_t kMaxSnapshotBlocks = size_t{1} << 17;

  // `handle` gives events to the scheduler's node. At most `max_requests` are in the system; one more is refused.
  ControlGeneration(HandleFn handle, int max_requests) : handle_(std::move(handle)), max_requests_(max_requests) {}

  uint64_t AddServer(SendFn send);     // its number
  void RemoveServer(uint64_t server);  // cancels what it submitted
  int servers() const { return static_cast<int>(servers_.size()); }

  // Commands are validated; a request that is no good ends at once with an error update.
  void OnCommands(uint64_t server, const control::v1::GenerationCommands& commands);

  // Not kOk: nothing can run, and requests are not to wait for it any longer. Those in the system end with it, and so
  // do those that come until it is kOk again.
  void SetOutage(const absl::Status& outage);

  void OnUpdate(GenerationUpdate update);
  void OnStep(const proto::StepResult& result, int sequences, int new_tokens);

  // What the cache holds, for servers that begin to watch it. Before commands come.
  void SetCacheSnapshots(std::function<requests::CacheEvents()> snapshot) { cache_snapshot_ = std::move(snapshot); }
  void OnCacheEvents(const requests::CacheEvents& events);

  // Sends what has gathered since the last call; with `stats` to every server.
  void Flush(const control::v1::Stats* stats);

 private:
  struct Origin {
    uint64_t server = 0;
    RequestId request;  // the server's number
  };
  struct Server {
    SendFn send;
    std::map<RequestId, RequestId> requests;  // the server's number -> ours
    control::v1::GenerationEvents pending;
    bool watches_cache = false;
  };

  static void SendCache(Server& server, const requests::CacheEvents& events);

  void Submit(Server& server, uint64_t id, RequestId theirs, const control::v1::GenerationRequest& request);
  static void Refuse(Server& server, RequestId theirs, const absl::Status& status);

  const HandleFn handle_;
  std::function<requests::CacheEvents()> cache_snapshot_;
  const int max_requests_;
  absl::Status outage_;
  std::map<uint64_t, Server> servers_;
  absl::flat_hash_map<RequestId, Origin> origins_;
  uint64_t next_server_ = 1;
  uint64_t next_request_ = 1;
};

}  // namespace dovetail::scheduler
