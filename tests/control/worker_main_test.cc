#include "control/worker_main.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "proto/control/dovetail_control.grpc.pb.h"
#include "tests/cluster/inproc_hub.h"

// What a worker does when a scheduler refuses it.

namespace dovetail::control {
namespace {

using Refusals = std::vector<std::pair<grpc::StatusCode, int>>;  // so often each, one after the other

// Admits a worker, ends its membership at once, refuses it as it was told to, and admits it for good.
class ScriptedScheduler final : public v1::Membership::Service {
 public:
  explicit ScriptedScheduler(const Refusals& refusals) {
    for (const auto& [code, times] : refusals) refusals_.insert(refusals_.end(), static_cast<size_t>(times), code);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~ScriptedScheduler() override { server_->Shutdown(); }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest* request, v1::JoinReply* reply) override {
    MutexLock lock(mutex_);
    const size_t join = joins_++;
    changed_.notify_all();
    if (join > 0 && join <= refusals_.size()) return {refusals_[join - 1], "as the test wants"};
    reply->set_worker(7);
    reply->set_epoch(request->epoch());
    reply->set_lease_ms(60'000);
    reply->set_heartbeat_ms(20);
    return grpc::Status::OK;
  }

  grpc::Status Attend(grpc::ServerContext* context,
                      grpc::ServerReaderWriter<v1::SchedulerOrder, v1::WorkerReport>* stream) override {
    {
      MutexLock lock(mutex_);
      if (joins_ == 1) return grpc::Status::OK;
    }
    v1::WorkerReport report;
    while (!context->IsCancelled() && stream->Read(&report)) {
      MutexLock lock(mutex_);
      attends_ = true;
      changed_.notify_all();
    }
    return grpc::Status::OK;
  }

  grpc::Status Leave(grpc::ServerContext*, const v1::LeaveRequest*, v1::LeaveReply*) override {
    return grpc::Status::OK;
  }

  // Until the worker is admitted again, or has ended. True: the former.
  bool WaitUntilItAttends() {
    MutexLock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30),
                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return attends_ || ended_; });
    return attends_;
  }
  void NoteEnd() {
    MutexLock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  int port_ = 0;
  Mutex mutex_;
  CondVar changed_;
  std::vector<grpc::StatusCode> refusals_ ABSL_GUARDED_BY(mutex_);
  size_t joins_ ABSL_GUARDED_BY(mutex_) = 0;
  bool attends_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::Server> server_;
};

class IdleNode final : public WorkerNode {
 public:
  absl::StatusOr<Ready> Configure(const Configuration&) override { return Ready{.kv_blocks = 1}; }
  void AddPeer(const Peer&) override {}
  void RemovePeer(const Peer&) override {}
  int Poll() override { return 0; }
  Heartbeat Status() const override { return {}; }
};

// Its end; kOk: it was admitted again, and then stopped.
absl::Status EndAfter(const Refusals& refusals, absl::Duration join_timeout) {
  ScriptedScheduler scheduler(refusals);
  test::InprocHub hub;
  WorkerMainOptions options;
  options.scheduler = scheduler.address();
  options.name = "a1";
  options.capabilities.device = "cpu";
  options.join_timeout = join_timeout;
  WorkerMain worker(
      options, [&](NodeId node, Epoch epoch) { return hub.Create(node, epoch); },
      [](transport::Connector&, const JoinReply&) { return std::make_unique<IdleNode>(); });
  absl::Status end;
  std::thread runs([&] {
    end = worker.Run();
    scheduler.NoteEnd();
  });
  const bool attends = scheduler.WaitUntilItAttends();
  worker.Stop();
  runs.join();
  if (end.ok() && !attends) return absl::DeadlineExceededError("it was not admitted again");
  return end;
}

// A scheduler that was stopped answers nothing, then has the worker's former incarnation for a moment, by name.
TEST(WorkerMain, ThatWasAMemberOutlastsItsFormerIncarnationHoweverLongTheSchedulerWasAway) {
  const absl::Status end =
      EndAfter({{grpc::StatusCode::UNAVAILABLE, 25}, {grpc::StatusCode::ALREADY_EXISTS, 3}}, absl::Milliseconds(100));
  EXPECT_TRUE(end.ok()) << end;
}

TEST(WorkerMain, ThatWasAMemberOutlastsItsPlaceInAFullCluster) {
  const absl::Status end = EndAfter({{grpc::StatusCode::RESOURCE_EXHAUSTED, 3}}, absl::Milliseconds(100));
  EXPECT_TRUE(end.ok()) << end;
}

TEST(WorkerMain, EndsAtARefusalThatTimeDoesNotMend) {
  const absl::Status end = EndAfter({{grpc::StatusCode::FAILED_PRECONDITION, 1}}, absl::Seconds(10));
  EXPECT_TRUE(absl::IsFailedPrecondition(end)) << end;
}

}  // namespace
}  // namespace dovetail::control
