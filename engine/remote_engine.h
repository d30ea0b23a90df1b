#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/certificate_watch.h"
#include "base/mutex.h"
#include "base/status.h"
#include "control/messages.h"
#include "control/security.h"
#include "engine/engine.h"
#include "proto/control/dovetail_control.grpc.pb.h"

namespace dovetail::engine {

struct RemoteEngineOptions {
  std::string scheduler;  // HOST:PORT
  control::Security security;
  absl::Duration connect_timeout = absl::Seconds(60);  // for a scheduler that starts, and a model that is being loaded
  std::function<bool()> cancelled;                     // asked while waiting; may be empty
};

// An Engine whose scheduler is another process. When the scheduler is lost, or says nothing for kSilence, every request
// ends with kUnavailable, stats() say so, and the connection is tried again until it is back with the same model.
// Threads: thread-safe, as Engine says.
class RemoteEngine final : public Engine {
 public:
  // Waits for the scheduler and its model. kUnavailable, kInvalidArgument: one line naming the address and the remedy.
  static absl::StatusOr<std::unique_ptr<RemoteEngine>> Connect(const RemoteEngineOptions& options);
  // Ends what still runs as cancelled.
  ~RemoteEngine() override;

  // Of the cluster, as it was at the first connection.
  const control::ModelSummary& model() const { return model_; }
  const std::vector<control::TextFile>& files() const { return files_; }
  int max_model_len() const { return max_model_len_; }
  int max_queued_requests() const { return max_queued_requests_; }
  int max_num_seqs() const { return max_num_seqs_; }

  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request, std::shared_ptr<GenerationSink> sink) override;
  void Cancel(RequestId request) override;
  void StopChoice(RequestId request, int choice) override;
  void Pause(RequestId request) override;
  void Resume(RequestId request) override;
  void WatchCache(std::shared_ptr<CacheSink> sink) override;
  EngineStats stats() override;
  std::vector<StepSample> TakeStepSamples() override;

 private:
  using Stream = grpc::ClientReaderWriter<control::v1::GenerationCommands, control::v1::GenerationEvents>;
  static constexpr size_t kMaxStepSamples = 4096;
  static constexpr absl::Duration kSilence = absl::Seconds(5);  // a scheduler has something to say twice a second

  explicit RemoteEngine(RemoteEngineOptions options) : options_(std::move(options)) {}
  absl::Status MakeStub();
  absl::Status WaitForModel();
  absl::Status GetModel(control::v1::GetModelReply& reply);
  absl::Status GetFiles();
  absl::Status CheckSameModel();
  absl::Status CheckRequest(const requests::GenerationRequest& request) const;
  void Enqueue(control::v1::GenerationCommand command);
  void Start();
  void Run();
  void ServeOneStream();
  void WriteCommands(Stream& stream);
  void Take(const control::v1::GenerationEvents& events);
  void TakeCache(const control::v1::CacheEvents& from);
  void TakeStats(const control::v1::Stats& from) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Deliver(requests::GenerationUpdate update);
  void EndEverything(requests::FinishReason reason, const absl::Status& status);
  bool PauseBeforeRetry();

  const RemoteEngineOptions options_;
  const CertificateWatch certificate_{options_.security.cert_file};
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<control::v1::Generation::Stub> stub_;
  control::ModelSummary model_;
  std::vector<control::TextFile> files_;
  int max_model_len_ = 0, max_num_seqs_ = 0, max_queued_requests_ = 0;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  bool stream_ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time heard_ ABSL_GUARDED_BY(mutex_);                              // from the scheduler
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);  // of the stream
  std::vector<control::v1::GenerationCommand> commands_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<RequestId, std::shared_ptr<GenerationSink>> sinks_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CacheSink> cache_sink_ ABSL_GUARDED_BY(mutex_);  // null: nothing listens
  EngineStats stats_ ABSL_GUARDED_BY(mutex_);
  std::deque<StepSample> step_samples_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_request_ ABSL_GUARDED_BY(mutex_) = 1;

  std::thread thread_;
};

}  // namespace dovetail::engine
