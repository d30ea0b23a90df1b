#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "compute_worker/attention_specs.h"
#include "compute_worker/cuda/cuda_model.h"
#include "engine/pair_nodes.h"
#include "engine/remote_engine.h"
#include "engine/remote_model.h"
#include "scheduler/scheduler_main.h"
#include "tests/cluster/inproc_hub.h"
#include "tests/cluster/near_ties.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_for_gpus.h"
#include "tests/support/test_data.h"

// A pair worker on a GPU, as `dovetail pair-worker` makes it, in a cluster with a scheduler of its own. Also on an
// emulated GPU.

namespace dovetail::test {
namespace {

using control::WorkerMain;
using kernels::cuda::CudaDevice;

constexpr uint64_t kKvBytes = uint64_t{16} << 20;

class GpuPairWorker : public ::testing::TestWithParam<bool> {  // whether the model has linear layers
 protected:
  void SetUp() override {
    auto tiny = TinyForGpus::Make(/*with_linear_layers=*/GetParam());
    ASSERT_TRUE(tiny.ok()) << tiny.status();
    cpu_ = std::move(tiny->cpu);
    reference_ = std::move(tiny->reference);
    model_ = std::move(tiny->model);
    auto library = kernels::cuda::CudaLibrary::Open();
    if (!library.ok()) GTEST_SKIP() << "needs a GPU";
    auto device = CudaDevice::Create(*std::move(library), {.index = 0, .host_threads = 2});
    if (!device.ok()) GTEST_SKIP() << "needs a GPU";
    device_ = *std::move(device);
    auto weights =
        compute::CudaModel::Load(*device_, *model_, DType::kBF16, false, compute::GpuWeights::kDequantise, {});
    ASSERT_TRUE(weights.ok()) << weights.status();
    weights_ = *std::move(weights);
    ASSERT_NO_FATAL_FAILURE(StartScheduler());
  }
  void TearDown() override {
    engine_.reset();
    StopPair();
  }

  void StartScheduler() {
    scheduler::SchedulerMainOptions options;
    options.listen = "127.0.0.1:0";
    options.lease = absl::Seconds(20);  // a busy machine must not lose the pair
    options.scheduler.max_model_len = 1024;
    options.scheduler.max_num_seqs = 16;
    options.scheduler.max_num_batched_tokens = 256;
    auto scheduler = scheduler::SchedulerMain::Start(options, Epoch(1), hub_.Create(NodeId(0), Epoch(1)));
    ASSERT_TRUE(scheduler.ok()) << scheduler.status();
    scheduler_ = *std::move(scheduler);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", scheduler_->port()); }

  void StartPair() {
    control::WorkerMainOptions options;
    options.scheduler = address();
    options.role = control::Role::kComputeWorker;
    options.name = "pair-1";
    options.capabilities = {0, 1, 1'000'000'000, device_->name()};
    auto summary = engine::SummarizeModel(*model_->checkpoint, DType::kBF16, model_->weight_bytes, options.files);
    ASSERT_TRUE(summary.ok()) << summary.status();
    options.model = *summary;
    options.attention = {"pair-1-attention", options.capabilities};
    options.attention->capabilities.kv_bytes = kKvBytes;
    compute::ComputeWorkerTuning tuning;
    tuning.dense = weights_.get();
    attention::AttentionWorkerMainOptions attention;
    attention.kv_bytes = kKvBytes;
    attention.kv_room = kv_room_;
    nodes_ = std::make_unique<engine::PairNodes>(*model_, summary->digest, *device_, tuning, "", attention);
    pair_ = std::make_unique<WorkerMain>(
        options, [this](NodeId node, Epoch epoch) { return hub_.Create(node, epoch); },
        [this](const WorkerMain::Joined& computes, const WorkerMain::Joined& attends) {
          return nodes_->Make(computes, attends);
        });
    thread_ = std::thread([this] { EXPECT_EQ(pair_->Run(), absl::OkStatus()); });
  }
  void StopPair() {
    if (pair_ != nullptr) pair_->Stop();
    if (thread_.joinable()) thread_.join();
    pair_.reset();
    nodes_.reset();
  }
  void Connect() {
    auto engine = engine::RemoteEngine::Connect({address(), {}, absl::Seconds(60), {}});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  void ExpectStreamsOfACpu(int tokens) {
    std::vector<std::vector<TokenId>> prompts;
    std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
    for (int i = 0; i < 5; ++i) {
      prompts.push_back(UnlikeTokens(50 + 40 * i, 5 + i));
      sinks.push_back(Submit(*engine_, GreedyRequest(prompts.back(), tokens)));
    }
    for (size_t i = 0; i < sinks.size(); ++i) {
      ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
      EXPECT_EQ(sinks[i]->protocol_errors(), 0);
      ExpectChoicesOf(*reference_, prompts[i], sinks[i]->choices()[0].tokens);
    }
  }

  std::function<absl::StatusOr<uint64_t>()> kv_room_;
  InprocHub hub_;
  std::unique_ptr<TestModel> cpu_;
  std::unique_ptr<engine::EmbeddedCluster> reference_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<model::LoadedModel> model_;
  std::unique_ptr<compute::CudaModel> weights_;
  std::unique_ptr<scheduler::SchedulerMain> scheduler_;
  std::unique_ptr<engine::PairNodes> nodes_;
  std::unique_ptr<WorkerMain> pair_;
  std::thread thread_;
  std::unique_ptr<engine::RemoteEngine> engine_;
};

TEST_P(GpuPairWorker, HasTheChoicesOfACpuAndKeepsItsStepsOnTheGpu) {
  StartPair();
  ASSERT_NO_FATAL_FAILURE(Connect());
  ExpectStreamsOfACpu(40);
  uint64_t steps = 0;  // told once a second
  ASSERT_TRUE(Eventually([&] { return (steps = engine_->stats().scheduler.steps) > 40; }));
  pair_->Stop();
  thread_.join();
  EXPECT_GE(nodes_->steps_on_gpu(), steps) << "some went through the host";
}

TEST_P(GpuPairWorker, ServesAgainAsAnotherIncarnation) {
  StartPair();
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto sink = Submit(*engine_, GreedyRequest(UnlikeTokens(60, 3), 300));
  sink->WaitForTokens(5);
  StopPair();
  StartPair();
  ASSERT_EQ(sink->WaitForEnd(), absl::OkStatus());
  ExpectChoicesOf(*reference_, UnlikeTokens(60, 3), sink->choices()[0].tokens);
  ExpectStreamsOfACpu(20);
}

// What was free before the buffers of the layers were made is too much for KV.
TEST_P(GpuPairWorker, TakesForKvWhatIsLeftOnceTheLayersHaveTheirBuffers) {
  const size_t weights = device_->memory()->taken_bytes;
  std::atomic<size_t> taken = 0;
  kv_room_ = [&] {
    taken = device_->memory()->taken_bytes;
    return kKvBytes / 2;
  };
  StartPair();
  ASSERT_NO_FATAL_FAILURE(Connect());
  const auto table = compute::AttentionTableOf(model_->config(), DType::kBF16);
  ASSERT_TRUE(table.ok()) << table.status();
  const uint64_t block_bytes = attention::KvBlockBytes(*table, attention::KvStorage::kAsSent);
  ASSERT_TRUE(Eventually([&] { return engine_->stats().kv_blocks_total > 0; }));
  EXPECT_GT(taken, weights) << "buffers of the layers are not made yet";
  EXPECT_EQ(engine_->stats().kv_blocks_total, kKvBytes / 2 / block_bytes);
  ExpectStreamsOfACpu(8);
}

INSTANTIATE_TEST_SUITE_P(, GpuPairWorker, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "WithLinearLayers" : "Softmax"); });

}  // namespace
}  // namespace dovetail::test
