#include "tests/cluster/mini_cluster.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

#include "attention_worker/attention_worker_main.h"
#include "base/check.h"
#include "base/clock.h"
#include "compute_worker/compute_worker_main.h"
#include "control/ucx_connector.h"
#include "engine/remote_model.h"
#include "gtest/gtest.h"
#include "proto/control/dovetail_admin.grpc.pb.h"
#include "tests/support/frail_device.h"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int kPatienceMs = 60'000;

const char* FlagOf(scheduler::PlacementPolicy placement) {
  constexpr const char* kNames[] = {"request", "heads", "tokens", "mixed", "tiers"};
  return kNames[static_cast<int>(placement)];
}

Epoch NewEpoch() { return Epoch(std::random_device{}() | 1u); }

}  // namespace

std::string Name(Deployment deployment) {
  constexpr const char* kNames[] = {"Threads", "UcxThreads", "Processes", "Hosts"};
  return kNames[static_cast<int>(deployment)];
}

// A worker's whole life on a thread of its own, with a device of its own.
class MiniCluster::ThreadWorker {
 public:
  using Factory = std::function<std::unique_ptr<control::WorkerNode>(kernels::Device&, transport::Connector&,
                                                                     const control::JoinReply&)>;
  ThreadWorker(control::WorkerMainOptions options, control::WorkerMain::ConnectorFactory connectors,
               const kernels::CpuDeviceOptions& device, Factory make)
      : device_(*kernels::CreateCpuDevice(device)),
        main_(std::move(options), std::move(connectors),
              [this, make = std::move(make)](transport::Connector& connector, const control::JoinReply& reply) {
                return make(device_, connector, reply);
              }),
        thread_([this] { end_ = main_.Run(); }) {}
  ~ThreadWorker() {
    main_.Stop();
    if (thread_.joinable()) thread_.join();
  }
  absl::Status WaitForEnd() {
    thread_.join();
    return end_;
  }
  FrailDevice& device() { return device_; }

 private:
  FrailDevice device_;
  absl::Status end_;
  control::WorkerMain main_;
  std::thread thread_;
};

// The binary of this build; its output goes to a file that is shown when something went wrong.
class MiniCluster::Process {
 public:
  Process(std::vector<std::string> words, const Hosts* hosts, int host) {
    words.insert(words.begin(), DOVETAIL_BINARY);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    log_ = (TempFolder() / "log").string();
    const int log = open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int pipes[2];
    DT_CHECK(log >= 0 && pipe2(pipes, O_CLOEXEC) == 0);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {  // async-signal-safe calls only
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      if (hosts != nullptr && !hosts->Enter(host)) _exit(126);
      dup2(pipes[1], STDOUT_FILENO);
      dup2(log, STDERR_FILENO);
      execv(DOVETAIL_BINARY, argv.data());
      _exit(127);
    }
    close(pipes[1]);
    close(log);
    out_ = pipes[0];
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGTERM);
      EXPECT_NE(Wait(), 128 + SIGKILL) << "a process did not end: " << Log();
    }
    close(out_);
  }

  // The rest of the first line of its output that begins with `marker`.
  absl::StatusOr<std::string> LineAfter(const std::string& marker) {
    std::string text;
    while (true) {
      pollfd waiting{out_, POLLIN, 0};
      char byte;
      if (::poll(&waiting, 1, kPatienceMs) <= 0 || read(out_, &byte, 1) <= 0)
        return absl::UnavailableError(absl::StrCat("no '", marker, "' in its output; ", Log()));
      if (byte != '\n') {
        text.push_back(byte);
      } else if (text.rfind(marker, 0) == 0) {
        return text.substr(marker.size());
      } else {
        text.clear();
      }
    }
  }
  void Kill() {
    kill(pid_, SIGKILL);
    Wait();
  }
  // Its exit code, or 128 + the signal that ended it.
  int Wait() {
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
    pollfd waiting{fd, POLLIN, 0};
    if (::poll(&waiting, 1, kPatienceMs) <= 0) kill(pid_, SIGKILL);
    close(fd);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    // Clusters get over a worker that crashes as they do over one that is killed.
    const int signal = WTERMSIG(status);
    EXPECT_TRUE(signal == SIGTERM || signal == SIGKILL) << "a process crashed with signal " << signal << ": " << Log();
    return 128 + signal;
  }
  std::string Log() const { return ReadFile(log_); }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
  std::string log_;
};

absl::StatusOr<std::unique_ptr<MiniCluster>> MiniCluster::Start(const MiniClusterOptions& options) {
  std::unique_ptr<MiniCluster> cluster(new MiniCluster(options));
  DT_RETURN_IF_ERROR(cluster->LoadModel());
  DT_RETURN_IF_ERROR(cluster->StartScheduler());
  std::vector<std::string> names;
  for (int i = 1; i <= options.compute_workers; ++i) {
    names.push_back(absl::StrCat("c", i));
    DT_RETURN_IF_ERROR(cluster->StartCompute(names.back()));
  }
  for (int i = 1; i <= options.attention_workers; ++i) {
    names.push_back(absl::StrCat("a", i));
    DT_RETURN_IF_ERROR(cluster->StartAttention(names.back(), options.kv_bytes));
  }
  DT_ASSIGN_OR_RETURN(cluster->engine_,
                      engine::RemoteEngine::Connect({cluster->address_, cluster->security_, kPatience, {}}));
  DT_RETURN_IF_ERROR(cluster->WaitUntilServing(names));
  return cluster;
}

MiniCluster::MiniCluster(const MiniClusterOptions& options) : options_(options) {}

MiniCluster::~MiniCluster() {
  engine_.reset();
  threads_.clear();
  processes_.clear();
}

absl::Status MiniCluster::LoadModel() {
  if (processes()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(model_,
                      TestModel::Load(options_.model, options_.weights, {.threads = 1, .max_isa = options_.isa}));
  DT_ASSIGN_OR_RETURN(summary_, engine::SummarizeModel(*model_->model->checkpoint, options_.kv,
                                                       model_->model->weight_bytes, files_, options_.state));
  summary_.kv_storage = options_.compute.kv_storage;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<transport::Connector>> MiniCluster::MakeConnector(NodeId node, Epoch epoch) {
  DT_ASSIGN_OR_RETURN(std::unique_ptr<transport::Connector> connector, MakeSoundConnector(node, epoch));
  const transport::Faults& faults = options_.faults;
  if (faults.drop + faults.duplicate + faults.echo + faults.delay + faults.swap == 0) return connector;
  return std::make_unique<FaultyConnector>(std::move(connector), faults, options_.fault_seed + connectors_++, faults_);
}

absl::StatusOr<std::unique_ptr<transport::Connector>> MiniCluster::MakeSoundConnector(NodeId node, Epoch epoch) {
  if (options_.deployment == Deployment::kThreads) return hub_.Create(node, epoch);
  transport::ucx::UcxOptions ucx;
  DT_ASSIGN_OR_RETURN(ucx.lanes, transport::ucx::ParseLanes(options_.lanes));
  ucx.node = node;
  ucx.epoch = epoch;
  ucx.silence = options_.lease;  // all roles share a few cores
  DT_ASSIGN_OR_RETURN(std::unique_ptr<transport::Connector> connector, control::UcxConnector::Create(ucx));
  return connector;
}

absl::Status MiniCluster::StartScheduler() {
  const scheduler::SchedulerOptions& core = options_.scheduler;
  if (!processes()) {
    scheduler::SchedulerMainOptions options;
    options.listen = "127.0.0.1:0";
    options.scheduler = core;
    options.lease = options_.lease;
    const Epoch epoch = NewEpoch();
    DT_ASSIGN_OR_RETURN(auto connector, MakeConnector(NodeId(0), epoch));
    DT_ASSIGN_OR_RETURN(scheduler_, scheduler::SchedulerMain::Start(options, epoch, std::move(connector)));
    address_ = absl::StrCat("127.0.0.1:", scheduler_->port());
    return absl::OkStatus();
  }
  const std::string listen = options_.hosts == nullptr ? "127.0.0.1:0" : options_.hosts->address(0) + ":0";
  std::vector<std::string> words = {"scheduler", "--listen", listen, "--lanes", options_.lanes};
  const auto add = [&](const std::string& flag, int64_t value) {
    words.insert(words.end(), {flag, std::to_string(value)});
  };
  add("--lease-ms", absl::ToInt64Milliseconds(options_.lease));
  add("--max-model-len", core.max_model_len);
  add("--max-num-seqs", core.max_num_seqs);
  add("--max-num-batched-tokens", core.max_num_batched_tokens);
  add("--micro-batches", core.micro_batches);
  add("--prefill-rank-tokens", core.prefill_rank_tokens);
  words.insert(words.end(), {"--prefill-ranks", core.prefill_ranks == 0 ? "auto" : absl::StrCat(core.prefill_ranks)});
  words.insert(words.end(), {"--placement", FlagOf(core.placement)});
  std::string exchange = core.prefill_exchange ? NameOf(*core.prefill_exchange) : "auto";
  if (exchange == "plane" && core.linear_exchange == proto::LinearExchange::kChain) exchange = "chain";
  words.insert(words.end(), {"--prefill-exchange", exchange});
  words.push_back(core.enable_prefix_caching ? "--enable-prefix-caching" : "--no-enable-prefix-caching");
  words.push_back(core.enable_chunked_prefill ? "--enable-chunked-prefill" : "--no-enable-chunked-prefill");
  scheduler_process_ = StartProcess(0, std::move(words));
  DT_ASSIGN_OR_RETURN(address_, scheduler_process_->LineAfter("listening on "));
  return absl::OkStatus();
}

int MiniCluster::HostOf(const std::string& name) const {
  return options_.hosts == nullptr ? 1 : std::atoi(name.c_str() + 1) % options_.hosts->count();
}

std::unique_ptr<MiniCluster::Process> MiniCluster::StartProcess(int host, std::vector<std::string> words) const {
  if (options_.hosts != nullptr) words.insert(words.end(), {"--data-devices", "data0", "--trust-network"});
  return std::make_unique<Process>(std::move(words), options_.hosts, host);
}

control::WorkerMainOptions MiniCluster::WorkerOptions(control::Role role, const std::string& name) const {
  control::WorkerMainOptions options;
  options.scheduler = address_;
  options.security = security_;
  options.role = role;
  options.name = name;
  options.capabilities = {0, 1, 1'000'000'000, "cpu"};
  options.join_timeout = kPatience;
  return options;
}

absl::Status MiniCluster::StartAttention(const std::string& name, uint64_t kv_bytes) {
  if (processes()) {
    processes_[name] =
        StartProcess(HostOf(name), {"attention-worker", "--name", name, "--scheduler", address_, "--lanes",
                                    options_.lanes, "--kv-capacity", std::to_string(kv_bytes), "--threads", "1"});
    return absl::OkStatus();
  }
  auto options = WorkerOptions(control::Role::kAttentionWorker, name);
  options.capabilities.kv_bytes = kv_bytes;
  threads_[name] = std::make_unique<ThreadWorker>(
      std::move(options), [this](NodeId node, Epoch epoch) { return MakeConnector(node, epoch); },
      kernels::CpuDeviceOptions{.threads = 1, .max_isa = options_.isa},
      [kv_bytes, digests = options_.digests](kernels::Device& device, transport::Connector& connector,
                                             const control::JoinReply& reply) {
        attention::AttentionWorkerMainOptions role;
        role.kv_bytes = kv_bytes;
        role.digests = digests;
        return attention::MakeAttentionWorker(role, device, connector, reply);
      });
  return absl::OkStatus();
}

absl::Status MiniCluster::StartCompute(const std::string& name) {
  if (processes()) {
    const bool f32 = options_.weights == model::WeightFormat::kF32;
    const KvStorage storage = options_.compute.kv_storage;
    const std::string kv = storage != KvStorage::kAsSent ? std::string(dovetail::Name(storage))
                           : options_.kv == DType::kF32  ? "float32"
                           : options_.kv == DType::kF16  ? "float16"
                                                         : "bfloat16";
    processes_[name] = StartProcess(
        HostOf(name) - 1, {"compute-worker", options_.model.string(), "--name", name, "--scheduler", address_,
                           "--lanes", options_.lanes, "--threads", "1", "--dtype", f32 ? "float32" : "auto",
                           "--kv-cache-dtype", kv, "--state-dtype", std::string(dovetail::Name(options_.state))});
    return absl::OkStatus();
  }
  auto options = WorkerOptions(control::Role::kComputeWorker, name);
  options.model = summary_;
  options.files = files_;
  threads_[name] = std::make_unique<ThreadWorker>(
      std::move(options), [this](NodeId node, Epoch epoch) { return MakeConnector(node, epoch); },
      kernels::CpuDeviceOptions{.threads = 1, .max_isa = options_.isa},
      [this](kernels::Device& device, transport::Connector& connector, const control::JoinReply&) {
        return compute::MakeComputeWorker(*model_->model, summary_.digest, device, connector, options_.compute);
      });
  return absl::OkStatus();
}

absl::Status MiniCluster::AddAttentionWorker(const std::string& name, uint64_t kv_bytes) {
  DT_RETURN_IF_ERROR(StartAttention(name, kv_bytes == 0 ? options_.kv_bytes : kv_bytes));
  return WaitUntilServing({name});
}

absl::Status MiniCluster::AddComputeWorker(const std::string& name) {
  DT_RETURN_IF_ERROR(StartCompute(name));
  return WaitUntilServing({name});
}

void MiniCluster::Stop(const std::string& name) {
  if (const auto it = processes_.find(name); it != processes_.end()) it->second->Kill();
  processes_.erase(name);
  threads_.erase(name);
}

void MiniCluster::LoseDevice(const std::string& name) { threads_.at(name)->device().Lose(); }

void MiniCluster::FlipSigns(const std::string& name) { threads_.at(name)->device().FlipSigns(); }
void MiniCluster::FlipBits(const std::string& name, size_t step) { threads_.at(name)->device().FlipBits(step); }

absl::Status MiniCluster::WaitForEnd(const std::string& name) {
  const absl::Status end = threads_.at(name)->WaitForEnd();
  threads_.erase(name);
  return end;
}

absl::Status MiniCluster::Drain(const std::string& name) {
  auto channel = control::MakeChannel("--scheduler", address_, security_);
  DT_RETURN_IF_ERROR(channel.status());
  const auto stub = admin::v1::Admin::NewStub(*channel);
  grpc::ClientContext context;
  admin::v1::DrainWorkerRequest request;
  admin::v1::DrainWorkerReply reply;
  request.set_name(name);
  const grpc::Status done = stub->DrainWorker(&context, request, &reply);
  if (!done.ok()) return absl::NotFoundError(done.error_message());
  absl::Status end;
  if (const auto process = processes_.find(name); process != processes_.end()) {
    const int code = process->second->Wait();
    if (code != 0) end = Internal(name, " ended with ", code, ": ", process->second->Log());
  } else {
    end = threads_.at(name)->WaitForEnd();
  }
  threads_.erase(name);
  processes_.erase(name);
  return end;
}

admin::v1::ClusterStatus MiniCluster::status() {
  auto channel = control::MakeChannel("--scheduler", address_, security_);
  DT_CHECK(channel.ok());
  const auto stub = admin::v1::Admin::NewStub(*channel);
  grpc::ClientContext context;
  admin::v1::ClusterStatus status;
  stub->GetStatus(&context, {}, &status);
  return status;
}

const admin::v1::Worker* MiniCluster::Find(const admin::v1::ClusterStatus& status, const std::string& name) const {
  for (const auto& worker : status.workers())
    if (worker.name() == name) return &worker;
  return nullptr;
}

absl::Status MiniCluster::WaitUntilServing(const std::vector<std::string>& names) {
  std::string missing;
  const bool all = Eventually([&] {
    const admin::v1::ClusterStatus now = status();
    missing.clear();
    for (const std::string& name : names) {
      const admin::v1::Worker* worker = Find(now, name);
      if (worker == nullptr || worker->state() != "serving")
        absl::StrAppend(&missing, name, worker == nullptr ? " is no member; " : " is " + worker->state() + "; ");
    }
    return missing.empty();
  });
  if (all) return absl::OkStatus();
  for (const auto& [name, process] : processes_) absl::StrAppend(&missing, "\n", name, ": ", process->Log());
  return absl::DeadlineExceededError(missing);
}

}  // namespace dovetail::test
