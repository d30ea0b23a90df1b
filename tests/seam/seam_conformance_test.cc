#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_worker/attention_worker_node.h"
#include "base/check.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/compute_worker_node.h"
#include "compute_worker/cpu/cpu_dense.h"
#include "compute_worker/cuda/cuda_model.h"
#include "exchange/cuda/shared_gpu.h"
#include "gmock/gmock.h"
#include "model/checkpoint.h"
#include "scheduler/scheduler_node.h"
#include "tests/cluster/tiny_model.h"
#include "tests/seam/loop_links.h"
#include "tests/seam/seam_monitor.h"
#include "tests/seam/watched.h"
#include "tests/support/test_data.h"
#include "transport/inproc/inproc_fabric.h"

// The contract of exchange/seam.h, over every way: a scheduler, a compute worker and attention workers in one thread
// serve requests, and a SeamMonitor watches ports and backends. Ways of GPUs run on one, or on the emulated one. Steps
// between GPUs run without kernels: those of two workers wait for each other, which needs two processes
// (control_two_gpus_test).

namespace dovetail::test {
namespace {

using kernels::cuda::CudaDevice;
using ::testing::IsEmpty;
using Way = SeamMonitor::Way;

constexpr uint32_t kBlocks = 4000;
constexpr Epoch kEpoch(1);

class HandClock final : public Clock {
 public:
  absl::Time Now() override { return now; }
  absl::Time now = absl::UnixEpoch();
};

// Steps that go well and compute nothing.
class IdleDense final : public compute::DenseBackend {
 public:
  std::vector<SequenceId> PendingGrammars(const proto::StepPlan&) override { return {}; }
  absl::Status PrepareStep(const compute::ComputeWorkerCore&, MicroBatchId, const exchange::Seam&) override {
    return absl::OkStatus();
  }
  absl::Status Run(const compute::ComputeWorkerCore&, MicroBatchId, int) override { return absl::OkStatus(); }
  absl::Status AttendPrompts(const compute::ComputeWorkerCore&, MicroBatchId, int) override { return absl::OkStatus(); }
  absl::StatusOr<transport::LentBytes> PackQuery(const compute::ComputeWorkerCore&, MicroBatchId, int, int) override {
    return Internal("nothing is packed");
  }
  absl::StatusOr<transport::LentBytes> PackKeyValue(const compute::ComputeWorkerCore&, MicroBatchId, int,
                                                    int) override {
    return Internal("nothing is packed");
  }
  absl::StatusOr<bool> BeginSample(const proto::StepPlan&, MicroBatchId) override { return true; }
  absl::Status Sample(const proto::StepPlan& plan, MicroBatchId, proto::StepResult& result) override {
    for (const proto::StepEntry& entry : plan.entries) {
      proto::EntryResult& drawn = result.entries.emplace_back();
      drawn.sequence = entry.sequence;
      drawn.position = entry.ctx_len + static_cast<Position>(entry.tokens.size());
      drawn.token = entry.sample ? 5 : -1;
    }
    return absl::OkStatus();
  }
};

class IdleAttention final : public attention::AttentionBackend {
 public:
  absl::Status Copy(std::span<const attention::BlockCopy>) override { return absl::OkStatus(); }
  absl::StatusOr<uint64_t> DigestOf(std::span<const attention::KvBlockId>) override { return 1; }
  absl::Status Poison(std::span<const attention::KvBlockId>) override { return absl::OkStatus(); }
  absl::Status PrepareStep(MicroBatchId, const exchange::Seam&) override { return absl::OkStatus(); }
  absl::StatusOr<transport::LentBytes> GiveStates(MicroBatchId, int) override { return transport::LentBytes(); }
  absl::Status TakeQuery(MicroBatchId, int, std::span<const std::byte>) override { return absl::OkStatus(); }
  absl::StatusOr<transport::LentBytes> AppendAndFinish(MicroBatchId, int, std::span<const std::byte>) override {
    return transport::LentBytes();
  }
  absl::StatusOr<transport::LentBytes> GiveRows(MicroBatchId, int, int) override { return transport::LentBytes(); }
  absl::StatusOr<transport::LentBytes> Gather(int, int) override { return transport::LentBytes(); }
};

struct Stream {
  std::vector<TokenId> tokens;
  bool finished = false;
  std::string error;
};

struct Case {
  const char* name;
  Way way;
  bool on_gpu;
  int attention_workers = 1;
  bool late = false;  // the device is slower than the host
};

// Node 0 is the scheduler, node 1 the compute worker, those from 2 on are attention workers.
class Cluster final : public compute::DenseBackendFactory {
 public:
  explicit Cluster(const Case& how) : how_(how), monitor(!how.on_gpu) {}

  absl::Status Build() {
    DT_RETURN_IF_ERROR(LoadModel());
    for (int i = 0; i < 2 + how_.attention_workers; ++i) {
      auto port = fabric_.CreatePort(nullptr);
      if (i == 0) {
        scheduler_port_ = std::move(port);
      } else {
        ports_.push_back(std::make_unique<WatchedPort>(std::move(port), monitor, /*compute=*/i == 1));
      }
    }
    if (how_.way == Way::kOneGpu) {
      DT_ASSIGN_OR_RETURN(shared_gpu_, exchange::SharedGpu::Create(*gpu_, NodeId(2), kMicroBatches));
    }
    if (how_.way == Way::kBetweenGpus) {
      means_.device = gpu_;
      means_.links = links_;
      means_.on_cpu = false;
    }
    BuildScheduler();
    DT_RETURN_IF_ERROR(BuildComputeWorker());
    for (int i = 0; i < how_.attention_workers; ++i) DT_RETURN_IF_ERROR(BuildAttentionWorker(i));
    scheduler_->AddComputeWorker(WorkerId(1), NodeId(1));
    const bool linked =
        Until([&] { return how_.way != Way::kBetweenGpus || compute_->ExchangeWith(NodeId(2)) == "device"; });
    return linked ? absl::OkStatus() : Internal("no link: ", compute_->ExchangeWith(NodeId(2)));
  }

  uint64_t Submit(int prompt, int max_tokens) {
    requests::GenerationRequest request;
    request.tenant = "test";
    for (int i = 0; i < prompt; ++i) request.prompt.push_back(1 + (17 * i * i + 31 * i) % 90);
    request.sampling.temperature = 0;
    request.max_tokens = max_tokens;
    request.id = RequestId(++requests_);
    scheduler_->Handle(scheduler::RequestArrived{std::make_shared<requests::GenerationRequest>(std::move(request))});
    return requests_;
  }
  // False: not in a time that only a hang takes.
  bool Until(const std::function<bool()>& condition) {
    for (int turn = 0, quiet = 0; turn < 200'000; ++turn) {
      if (condition()) return true;
      clock_.now += absl::Microseconds(20);
      int frames = scheduler_->Poll() + compute_->Poll();
      for (const auto& worker : attention_) frames += worker->Poll();
      SeeWhichWaitsEnded();
      const absl::Time deadline = scheduler_->NextDeadline();
      quiet = frames == 0 ? quiet + 1 : 0;
      if (quiet > 50 && deadline != absl::InfiniteFuture()) clock_.now = std::max(clock_.now, deadline);
    }
    return false;
  }
  bool UntilTheEndOf(uint64_t request) {
    return Until([&] { return streams_[request].finished; });
  }
  const Stream& stream(uint64_t request) { return streams_[request]; }
  void LetAnOpFail() { fail_next_ = true; }
  bool kernels_run() const { return how_.way != Way::kBetweenGpus; }

 private:
  static constexpr int kMicroBatches = 2;

  absl::Status LoadModel() {
    DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenCheckpoint(WriteTinyModel({}, TempFolder())));
    if (!how_.on_gpu) {
      DT_ASSIGN_OR_RETURN(device_, kernels::CreateCpuDevice({.threads = 1}));
      const auto stream = device_->CreateStream();
      DT_ASSIGN_OR_RETURN(model_,
                          model::LoadModel(std::move(checkpoint), model::WeightFormat::kF32, &stream->pool(), {}));
      DT_ASSIGN_OR_RETURN(table_, compute::AttentionTableOf(model_->config(), DType::kF32));
      return absl::OkStatus();
    }
    DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
    DT_ASSIGN_OR_RETURN(auto gpu, CudaDevice::Create(std::move(library), {.index = 0, .host_threads = 1}));
    gpu_ = gpu.get();
    device_ = std::move(gpu);
    DT_ASSIGN_OR_RETURN(model_, model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
    DT_ASSIGN_OR_RETURN(
        weights_, compute::CudaModel::Load(*gpu_, *model_, DType::kBF16, false, compute::GpuWeights::kDequantise, {}));
    DT_ASSIGN_OR_RETURN(table_, compute::AttentionTableOf(model_->config(), DType::kBF16));
    return absl::OkStatus();
  }
  void BuildScheduler() {
    scheduler::SchedulerOptions options;
    options.max_num_batched_tokens = 40;
    options.max_num_seqs = 8;
    options.max_model_len = 512;
    options.attention = table_;
    options.micro_batches = how_.way == Way::kOneGpu ? 1 : kMicroBatches;
    options.run_ahead = how_.way == Way::kOneGpu;
    options.adapt_micro_batches = false;
    if (how_.attention_workers > 1) options.placement = scheduler::PlacementPolicy::kMixed;
    scheduler_ = std::make_unique<scheduler::SchedulerNode>(
        options, 0, *scheduler_port_, clock_, [this](requests::GenerationUpdate update) { Take(std::move(update)); },
        [](const proto::StepResult&, int, int) {});
  }
  absl::Status BuildComputeWorker() {
    compute::ComputeWorkerOptions options;
    options.micro_batches = kMicroBatches;
    options.max_step_tokens = 64;
    options.vocab_size = static_cast<int32_t>(model_->config().vocab_size);
    compute::ComputeWorkerTuning tuning;
    tuning.dense = this;
    tuning.shared_gpu = shared_gpu_.get();
    tuning.exchange = means_;
    tuning.prompt_scratch_bytes = 4 << 20;
    DT_ASSIGN_OR_RETURN(compute_, compute::ComputeWorkerNode::Create(*model_, table_, options, NodeId(0), *device_,
                                                                     *ports_[0], clock_, tuning));
    return absl::OkStatus();
  }
  absl::Status BuildAttentionWorker(int i) {
    const WorkerId worker(static_cast<uint32_t>(2 + i));
    const NodeId node(static_cast<uint32_t>(2 + i));
    const attention::AttentionWorkerOptions options{worker, kEpoch, kBlocks, kMicroBatches};
    DT_ASSIGN_OR_RETURN(auto made, attention::AttentionWorkerNode::Create(table_, options, *device_, *ports_[1 + i],
                                                                          clock_, shared_gpu_.get()));
    made->WrapBackend([&](std::unique_ptr<attention::AttentionBackend> backend) {
      if (!kernels_run()) backend = std::make_unique<IdleAttention>();
      return std::make_unique<WatchedAttention>(std::move(backend), made->core(), node, monitor, fail_next_);
    });
    if (how_.way == Way::kBetweenGpus) made->AllowExchange(means_);
    attention_.push_back(std::move(made));
    compute_->AddAttentionWorker({worker, kEpoch, node});
    std::optional<WorkerId> pair;
    if (shared_gpu_ != nullptr) pair = WorkerId(1);  // the compute worker
    scheduler_->AddAttentionWorker(worker, kEpoch, node, kBlocks, /*rate=*/1, pair);
    return absl::OkStatus();
  }
  uint32_t PromptBlocks(const proto::AttentionTable& table, int max_step_tokens,
                        std::optional<uint64_t> bytes) const override {
    if (!how_.on_gpu) return 0;
    return kernels_run() ? weights_->PromptBlocks(table, max_step_tokens, bytes) : 1000;
  }
  absl::StatusOr<std::unique_ptr<compute::DenseBackend>> Create(const proto::AttentionTable& table,
                                                                const compute::ComputeWorkerOptions& options,
                                                                exchange::SharedGpu* shared_gpu) const override {
    std::unique_ptr<compute::DenseBackend> dense;
    if (how_.on_gpu && kernels_run()) {
      DT_ASSIGN_OR_RETURN(dense, weights_->Create(table, options, shared_gpu));
    } else if (how_.on_gpu) {
      dense = std::make_unique<IdleDense>();
    } else {
      dense = std::make_unique<compute::CpuDense>(*model_, table_, *device_, options.micro_batches, KvStorage::kAsSent);
    }
    return std::unique_ptr<compute::DenseBackend>(
        std::make_unique<WatchedDense>(std::move(dense), *model_, monitor, how_.late));
  }
  // A host that ends a step's waits writes so into the memory of both sides.
  void SeeWhichWaitsEnded() {
    using kernels::cuda::ExchangeWords;
    if (links_->linked.size() < 2) return;
    const auto stream = *gpu_->WorkerStream();
    for (uint16_t id = 0; id < kMicroBatches; ++id) {
      uint64_t ended = ~uint64_t{0};
      for (const std::byte* memory : links_->linked) {
        ExchangeWords words;
        DT_CHECK(stream->Copy(&words, memory + id * sizeof(words), sizeof(words)).ok());
        DT_CHECK(stream->SynchronizeStatus().ok());
        ended = std::min(ended, words.given_up);
      }
      const uint64_t step = ended / kernels::cuda::kExchangeOps;
      if (step > ended_[id]) monitor.EndsWaits({MicroBatchId(id), StepId(step - 1)});
      ended_[id] = step;
    }
  }
  void Take(requests::GenerationUpdate update) {
    Stream& stream = streams_[update.request.value()];
    stream.tokens.insert(stream.tokens.end(), update.tokens.begin(), update.tokens.end());
    stream.finished = update.request_finished;
    stream.error += update.error;
  }

  const Case how_;

 public:
  mutable SeamMonitor monitor;  // which Create() hands on

 private:
  HandClock clock_;
  std::unique_ptr<kernels::Device> device_;
  CudaDevice* gpu_ = nullptr;
  std::unique_ptr<model::LoadedModel> model_;
  std::unique_ptr<compute::CudaModel> weights_;
  proto::AttentionTable table_;
  std::shared_ptr<LoopLinks> links_ = std::make_shared<LoopLinks>();
  exchange::GpuExchangeMeans means_;
  transport::InprocFabric fabric_;
  std::unique_ptr<transport::Port> scheduler_port_;
  std::vector<std::unique_ptr<WatchedPort>> ports_;
  std::unique_ptr<exchange::SharedGpu> shared_gpu_;
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::unique_ptr<compute::ComputeWorkerNode> compute_;
  std::vector<std::unique_ptr<attention::AttentionWorkerNode>> attention_;
  bool fail_next_ = false;
  std::map<uint64_t, Stream> streams_;
  uint64_t requests_ = 0;
  uint64_t ended_[kMicroBatches] = {};
};

// Whether the ways of GPUs can run here; else what this machine lacks.
absl::Status FindGpu() {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = 0, .host_threads = 1}).status();
}

class SeamConformance : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().on_gpu) {
      if (const absl::Status gpu = FindGpu(); !gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.message();
    }
    cluster_ = std::make_unique<Cluster>(GetParam());
    const absl::Status built = cluster_->Build();
    ASSERT_TRUE(built.ok()) << built;
  }
  std::unique_ptr<Cluster> cluster_;
};

TEST_P(SeamConformance, PromptsAndDecodesOfSeveralSequencesKeepEveryObligation) {
  const uint64_t first = cluster_->Submit(70, 9), second = cluster_->Submit(5, 12), third = cluster_->Submit(33, 7);
  for (const uint64_t request : {first, second, third}) {
    ASSERT_TRUE(cluster_->UntilTheEndOf(request));
    EXPECT_EQ(cluster_->stream(request).error, "");
  }
  EXPECT_EQ(cluster_->stream(first).tokens.size(), 9u);
  EXPECT_EQ(cluster_->stream(second).tokens.size(), 12u);
  EXPECT_THAT(cluster_->monitor.violations(), IsEmpty());
  for (const Way way : {Way::kHosts, Way::kOneGpu, Way::kBetweenGpus}) {
    if (way == GetParam().way)
      EXPECT_GT(cluster_->monitor.steps(way), 12);
    else
      EXPECT_EQ(cluster_->monitor.steps(way), 0);
  }
}

TEST_P(SeamConformance, AStepThatFailsOnAnAttentionWorkerEndsItsWaitsAndTheNextOnesGoWell) {
  cluster_->LetAnOpFail();
  const uint64_t failed = cluster_->Submit(20, 4);
  ASSERT_TRUE(cluster_->UntilTheEndOf(failed));
  EXPECT_NE(cluster_->stream(failed).error, "");
  const uint64_t after = cluster_->Submit(20, 4);
  ASSERT_TRUE(cluster_->UntilTheEndOf(after));
  EXPECT_EQ(cluster_->stream(after).error, "");
  EXPECT_EQ(cluster_->stream(after).tokens.size(), 4u);
  EXPECT_THAT(cluster_->monitor.violations(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    Ways, SeamConformance,
    ::testing::Values(Case{"HostsOfCpus", Way::kHosts, false}, Case{"HostsOfCpusDivided", Way::kHosts, false, 3},
                      Case{"HostsOfCpusLate", Way::kHosts, false, 1, true},
                      Case{"HostsOfCpusDividedLate", Way::kHosts, false, 3, true},
                      Case{"HostsOfAGpu", Way::kHosts, true}, Case{"HostsOfAGpuDivided", Way::kHosts, true, 3},
                      Case{"HostsOfAGpuLate", Way::kHosts, true, 1, true}, Case{"OneGpu", Way::kOneGpu, true},
                      Case{"BetweenGpus", Way::kBetweenGpus, true}),
    [](const auto& info) { return std::string(info.param.name); });

// The tokens of one way are those of another, where kernels run.
TEST(SeamWays, AGpuGivesTheSameTokensThroughTheHostsAndOnItself) {
  std::vector<std::vector<TokenId>> tokens;
  for (const Case& how : {Case{"HostsOfAGpu", Way::kHosts, true}, Case{"OneGpu", Way::kOneGpu, true}}) {
    if (const absl::Status gpu = FindGpu(); !gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.message();
    Cluster cluster(how);
    const absl::Status built = cluster.Build();
    ASSERT_TRUE(built.ok()) << built;
    const uint64_t request = cluster.Submit(37, 16);
    ASSERT_TRUE(cluster.UntilTheEndOf(request));
    tokens.push_back(cluster.stream(request).tokens);
  }
  EXPECT_EQ(tokens[0], tokens[1]);
  EXPECT_EQ(tokens[0].size(), 16u);
}

}  // namespace
}  // namespace dovetail::test
