#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/certificate_watch.h"
#include "base/mutex.h"
#include "control/messages.h"
#include "control/security.h"
#include "proto/control/dovetail_control.grpc.pb.h"

namespace dovetail::control {

// A worker's membership: Join, then one stream on which it reports and takes orders. One object is one incarnation.
// Threads: one thread calls Join() and Run(); the Report functions, Leave() and Stop() are thread-safe.
class MembershipClient {
 public:
  struct Options {
    std::string scheduler;  // HOST:PORT
    Security security;
    JoinRequest request;
    std::vector<TextFile> files;  // of request.model
    absl::Duration call_timeout = absl::Seconds(5);
  };
  // Called by Run() on its thread.
  struct Handlers {
    std::function<void(Configuration)> on_configuration;
    std::function<void(Peers)> on_peers;
    std::function<Heartbeat()> heartbeat;  // on the heartbeat thread; the sequence number is filled in
  };

  // Joins, and uploads the model's files if the scheduler lacks them. Blocks. Errors are one line naming the remedy:
  // kUnavailable may be tried again, others will stay. kAborted: this process was drained.
  static absl::StatusOr<std::unique_ptr<MembershipClient>> Join(const Options& options);
  ~MembershipClient();

  const JoinReply& membership() const { return reply_; }

  // Serves the stream until it ends; blocks. kOk: Stop() was called. kAborted: the scheduler dismissed this worker, the
  // message says why. kUnavailable: the scheduler has ended, or was silent for a lease.
  absl::Status Run(const Handlers& handlers);

  // Thread-safe.
  void ReportReady(const Ready& ready);
  void ReportApplied(const Applied& applied);
  void ReportLinkFailed(const LinkFailed& failed);
  void Leave();  // tells the scheduler and ends Run()
  void Stop();   // ends Run()

 private:
  explicit MembershipClient(Options options) : options_(std::move(options)) {}
  absl::Status JoinNow();
  absl::Status PutFiles();
  bool Write(v1::WorkerReport report);
  void Beat(const std::function<Heartbeat()>& heartbeat);
  void Prepare(grpc::ClientContext& context) const;

  const Options options_;
  const CertificateWatch certificate_{options_.security.cert_file};
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Membership::Stub> stub_;
  JoinReply reply_;
  grpc::ClientContext stream_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerReport, v1::SchedulerOrder>> stream_;

  Mutex write_mutex_;
  Mutex mutex_;
  CondVar wake_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> silent_ms_{0};  // the scheduler was, and the membership ended for it
  std::atomic<bool> configured_{false};
  std::atomic<int64_t> heard_us_{0};
};

}  // namespace dovetail::control
