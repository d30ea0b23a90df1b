#pragma once
#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "transport/ucx/lanes.h"
#include "transport/ucx/socket_guard.h"

namespace dovetail::transport::ucx {

struct UcxWorkerOptions {
  Lanes lanes = Lanes::kAny;
  std::string devices;  // network devices, comma-separated; empty: all
  int first_port = 0;   // of TCP; 0: any
  int last_port = 0;
  absl::Duration keepalive = absl::Seconds(1);
};

// One ucp_context and one ucp_worker, set up by this program and not by the environment.
// Threads: reactor-owned. Another thread may make it before the event loop runs, and destroy it after: UCX is told that
//   several threads call it, one at a time (UCS_THREAD_MODE_SERIALIZED). UCS_THREAD_MODE_SINGLE is for workers that
//   only the thread that made them ever calls.
// Source: UCX, src/ucs/type/thread_mode.h.
class UcxWorker {
 public:
  // kFailedPrecondition: this host has no such lane. The message names the option.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const UcxWorkerOptions& options);
  ~UcxWorker();

  ucp_context_h context() const { return context_; }
  ucp_worker_h get() const { return worker_; }
  int event_fd() const { return event_fd_; }
  unsigned Progress() { return ucp_worker_progress(worker_); }

  absl::StatusOr<std::string> Address() const;

  // Its TCP listeners, and what a connection to one of them begins with. None on shared memory and RDMA.
  const std::vector<GuardedListener>& listeners() const { return guarded_.listeners(); }
  const Ticket& ticket() const { return ticket_; }

  // Its TCP connections, of peers and of nodes that greet it without being peers.
  int connections() const;

  // Instead of the destructor, where that would not return: its TCP connections are closed, and its port, so that
  // peers which wait for an answer hear that none comes; nothing else is freed, and nothing happens any more.
  void Abandon();

 private:
  UcxWorker() = default;
  absl::Status Init(const UcxWorkerOptions& options);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  const Ticket ticket_ = RandomTicket();
  GuardedListeners guarded_{ticket_};  // UCX's own thread accepts connections there
};

// "what: UCX's text for it".
absl::Status UcxError(ucs_status_t status, const std::string& what);

// UCX's text about an endpoint.
// Threads: reactor-owned, as the endpoint's worker.
std::string DescribeEndpoint(ucp_ep_h endpoint);

}  // namespace dovetail::transport::ucx
