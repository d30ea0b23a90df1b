#pragma once
#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "control/security.h"
#include "control/worker_main.h"
#include "engine/remote_engine.h"
#include "proto/control/dovetail_admin.pb.h"
#include "scheduler/scheduler_main.h"
#include "tests/cluster/faulty_connector.h"
#include "tests/cluster/hosts.h"
#include "tests/cluster/inproc_hub.h"
#include "tests/cluster/test_engine.h"

namespace dovetail::test {

// Where a cluster's roles run and what carries their frames; the control plane is gRPC, on loopback but for hosts.
enum class Deployment {
  kThreads,     // of this process, over an InprocHub
  kUcxThreads,  // of this process, over UCX
  kProcesses,   // the `dovetail` binary of this build, over UCX
  kHosts,       // the same, over the options' hosts in turn, whose network carries both planes
};
std::string Name(Deployment deployment);

struct MiniClusterOptions {
  Deployment deployment = Deployment::kThreads;
  std::string lanes = "shm";  // of UCX
  Hosts* hosts = nullptr;     // of kHosts; outlives the cluster
  std::filesystem::path model;
  model::WeightFormat weights = model::WeightFormat::kAuto;
  DType kv = DType::kBF16;                                 // kProcesses: bf16, or f32 with f32 weights
  DType state = DType::kF32;                               // of linear states
  kernels::Isa isa = kernels::kStrongestIsa;               // threads only
  scheduler::SchedulerOptions scheduler;                   // attention and model_digest are filled in
  compute::ComputeWorkerTuning compute;                    // threads only, but for kv_storage
  attention::Digests digests = attention::Digests::kNone;  // threads only
  uint64_t kv_bytes = uint64_t{8} << 20;                   // of each attention worker
  int attention_workers = 1;                               // a1, a2, ..
  int compute_workers = 1;                                 // c1, c2, ..
  absl::Duration lease = absl::Seconds(20);                // long: a busy machine must not lose a member
  transport::Faults faults;  // threads only: what happens to frames, of all roles both ways
  uint64_t fault_seed = 1;
};

// One test body, in this process and as real processes: a scheduler, a server's client, compute and attention workers
// that come and go. The threads of roles share one loaded model. Used by one thread.
class MiniCluster {
 public:
  // Waits until all workers serve. Errors are those of the roles.
  static absl::StatusOr<std::unique_ptr<MiniCluster>> Start(const MiniClusterOptions& options);
  ~MiniCluster();

  engine::RemoteEngine& engine() { return *engine_; }
  const std::string& address() const { return address_; }  // of the scheduler

  // Starts another worker and waits until it serves.
  absl::Status AddAttentionWorker(const std::string& name, uint64_t kv_bytes = 0);  // 0: as the options say
  absl::Status AddComputeWorker(const std::string& name);
  // It leaves (threads) or is killed with SIGKILL (processes); returns when it is gone. The cluster learns of it by
  // itself.
  void Stop(const std::string& name);
  // Threads only: its device is lost. WaitForEnd: what the worker ended with, once it has.
  void LoseDevice(const std::string& name);
  // Threads only: a bit of each `step` bytes of a worker's KV blocks changes. Nothing may run there meanwhile.
  void FlipBits(const std::string& name, size_t step);
  void FlipSigns(const std::string& name);  // the same of every float's sign
  absl::Status WaitForEnd(const std::string& name);
  // Asks for a drain and waits until the worker has left by itself.
  absl::Status Drain(const std::string& name);

  // Of the options' `faults`, so far.
  const FaultTotals& faults() const { return faults_; }

  admin::v1::ClusterStatus status();
  const admin::v1::Worker* Find(const admin::v1::ClusterStatus& status, const std::string& name) const;

 private:
  class ThreadWorker;
  class Process;
  explicit MiniCluster(const MiniClusterOptions& options);
  absl::Status StartScheduler();
  absl::Status StartAttention(const std::string& name, uint64_t kv_bytes);
  absl::Status StartCompute(const std::string& name);
  absl::Status LoadModel();
  absl::Status WaitUntilServing(const std::vector<std::string>& names);
  absl::StatusOr<std::unique_ptr<transport::Connector>> MakeConnector(NodeId node, Epoch epoch);
  absl::StatusOr<std::unique_ptr<transport::Connector>> MakeSoundConnector(NodeId node, Epoch epoch);
  control::WorkerMainOptions WorkerOptions(control::Role role, const std::string& name) const;
  bool processes() const { return options_.deployment >= Deployment::kProcesses; }
  std::unique_ptr<Process> StartProcess(int host, std::vector<std::string> words) const;
  int HostOf(const std::string& name) const;  // of a worker: the number behind its letter says

  const MiniClusterOptions options_;
  InprocHub hub_;
  FaultTotals faults_;
  std::atomic<uint64_t> connectors_{0};
  control::Security security_;
  std::string address_;
  std::unique_ptr<TestModel> model_;  // of threads
  control::ModelSummary summary_;
  std::vector<control::TextFile> files_;
  std::unique_ptr<scheduler::SchedulerMain> scheduler_;
  std::unique_ptr<Process> scheduler_process_;
  std::map<std::string, std::unique_ptr<ThreadWorker>> threads_;
  std::map<std::string, std::unique_ptr<Process>> processes_;
  std::unique_ptr<engine::RemoteEngine> engine_;
};

}  // namespace dovetail::test
