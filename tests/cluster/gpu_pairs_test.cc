#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "compute_worker/attention_specs.h"
#include "proto/kv_blocks.h"
#include "tests/cluster/near_ties.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/test_gpus.h"
#include "tests/cluster/tiny_for_gpus.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// Layers and attention on each of two GPUs, in one process (EmbeddedClusterOptions::attention_places). Where a machine
// has one GPU, both pairs are on it. Also on emulated GPUs.

namespace dovetail::test {
namespace {

constexpr double kBudget = 3.5e-2;  // as gpu_prompts_test and gpu_linear_prompts_test, the larger of the two

class GpuPairs : public ::testing::TestWithParam<bool> {  // whether the model has linear layers
 protected:
  void SetUp() override {
    auto tiny = TinyForGpus::Make(/*with_linear_layers=*/GetParam());
    ASSERT_TRUE(tiny.ok()) << tiny.status();
    cpu_ = std::move(tiny->cpu);
    reference_ = std::move(tiny->reference);
    model_ = std::move(tiny->model);
    if (!OpenTestGpu(0, *model_, gpus_[0]).ok()) GTEST_SKIP() << "needs a GPU";
    if (!OpenTestGpu(1, *model_, gpus_[1]).ok()) ASSERT_EQ(OpenTestGpu(0, *model_, gpus_[1]), absl::OkStatus());
    for (const auto& [from, to] : {std::pair(0, 1), std::pair(1, 0)})
      ASSERT_TRUE(gpus_[from].device->ReachPeer(*gpus_[to].device).ok());
  }

  // `bytes`: of each KV cache. `ranks`: compute workers that divide a prompt.
  void Start(uint64_t bytes, int ranks, scheduler::PlacementPolicy placement) {
    engine::EmbeddedClusterOptions options;
    options.kv_dtype = DType::kBF16;
    options.poison_freed_kv = true;
    options.compute.dense = gpus_[0].weights.get();
    options.compute_workers = 2;
    options.more_compute_devices = {{gpus_[1].device.get(), gpus_[1].weights.get()}};
    for (const TestGpu& gpu : gpus_) options.attention_places.push_back({gpu.device.get(), [bytes] { return bytes; }});
    options.scheduler.max_model_len = 1024;
    options.scheduler.max_num_seqs = 16;
    options.scheduler.max_num_batched_tokens = 256;
    options.scheduler.placement = placement;
    options.scheduler.prefill_ranks = ranks;
    options.scheduler.prefill_rank_tokens = 64;
    // What `serve` takes (server/cli/compute_devices.h).
    options.scheduler.prefill_exchange =
        GetParam() ? std::nullopt : std::optional(proto::PrefixExchange::kGatherDirect);
    auto cluster = engine::EmbeddedCluster::Create(*model_, *gpus_[0].device, options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  void Start() { Start(uint64_t{16} << 20, 1, scheduler::PlacementPolicy::kRequest); }

  double ErrorOf(const std::vector<TokenId>& prompt) {
    requests::GenerationRequest request = GreedyRequest(prompt, 1);
    request.logits_last = static_cast<int>(prompt.size());
    const auto ours = Generate(*cluster_, request), theirs = Generate(*reference_, request);
    EXPECT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
    if (!ours.ok() || !theirs.ok()) return 1;
    return RelativeRms((*ours)->prompt_logits(), (*theirs)->prompt_logits());
  }

  void ExpectChoicesOfACpu(const std::vector<TokenId>& prompt, const std::vector<TokenId>& tokens) {
    ExpectChoicesOf(*reference_, prompt, tokens);
  }

  struct Stream {
    std::vector<TokenId> prompt;
    std::shared_ptr<cli::CollectingSink> sink;
  };
  std::vector<Stream> SubmitStreams(int count, int tokens) {
    std::vector<Stream> streams;
    for (int i = 0; i < count; ++i) {
      const std::vector<TokenId> prompt = UnlikeTokens(50 + 9 * i, 5 + i);
      streams.push_back({prompt, Submit(*cluster_, GreedyRequest(prompt, tokens))});
    }
    return streams;
  }
  void ExpectChoicesOfACpu(const std::vector<Stream>& streams, size_t tokens) {
    for (const Stream& stream : streams) {
      ASSERT_EQ(stream.sink->WaitForEnd(), absl::OkStatus());
      EXPECT_EQ(stream.sink->protocol_errors(), 0);
      ASSERT_EQ(stream.sink->choices()[0].tokens.size(), tokens);
      ExpectChoicesOfACpu(stream.prompt, stream.sink->choices()[0].tokens);
    }
  }

  std::unique_ptr<TestModel> cpu_;
  std::unique_ptr<model::LoadedModel> model_;
  TestGpu gpus_[2];
  std::unique_ptr<engine::EmbeddedCluster> reference_, cluster_;
};

TEST_P(GpuPairs, EachStepsItsOwnSequences) {
  Start();
  const std::vector<Stream> streams = SubmitStreams(6, 40);
  for (const Stream& stream : streams) stream.sink->WaitForTokens(10);  // all of them run
  cluster_->TakeStepSamples();
  for (const Stream& stream : streams) stream.sink->WaitForTokens(25);
  for (const engine::StepSample& step : cluster_->TakeStepSamples()) {
    EXPECT_LE(step.sequences, 4) << "half of them, or nearly";
    EXPECT_EQ(step.prompt_us, 0);
  }
  ExpectChoicesOfACpu(streams, 40);
}

TEST_P(GpuPairs, PromptsOfOneAreAttendedWhereTheyLie) {
  Start();
  EXPECT_LE(ErrorOf(UnlikeTokens(400, 9)), kBudget);
  EXPECT_LE(ErrorOf(UnlikeTokens(333, 11)), kBudget);
}

TEST_P(GpuPairs, BothDivideAPromptBesideStreams) {
  Start(uint64_t{16} << 20, 2, scheduler::PlacementPolicy::kRequest);
  const std::vector<Stream> streams = SubmitStreams(4, 120);
  for (const Stream& stream : streams) stream.sink->WaitForTokens(5);
  for (int i = 0; i < 3; ++i) EXPECT_LE(ErrorOf(UnlikeTokens(500 + 30 * i, 20 + i)), kBudget);
  // Not each prompt: a GPU whose first steps were slow gets no part of the next one.
  EXPECT_GE(cluster_->stats().scheduler.prefill_groups, 1u);
  ExpectChoicesOfACpu(streams, 120);
}

TEST_P(GpuPairs, AnswersToPromptsThatBothDividedAreThoseOfACpu) {
  Start(uint64_t{16} << 20, 2, scheduler::PlacementPolicy::kRequest);
  std::vector<Stream> streams;
  for (int i = 0; i < 4; ++i) {  // some lie on either GPU
    const std::vector<TokenId> prompt = UnlikeTokens(400 + 70 * i, 40 + i);
    streams.push_back({prompt, Submit(*cluster_, GreedyRequest(prompt, 30))});
  }
  ExpectChoicesOfACpu(streams, 30);
  EXPECT_GE(cluster_->stats().scheduler.prefill_groups, 1u);
}

// One that outgrows a GPU's memory continues on the other.
TEST_P(GpuPairs, ASequenceMayLieOnBoth) {
  if (GetParam()) GTEST_SKIP() << "states lie whole on one attention worker";
  constexpr int kTokens = 256;  // that each GPU has room for
  const auto table = compute::AttentionTableOf(model_->config(), DType::kBF16);
  ASSERT_TRUE(table.ok()) << table.status();
  const uint64_t segment =
      proto::BlocksPerSegment(*table) * attention::KvBlockBytes(*table, attention::KvStorage::kAsSent);
  Start(segment * kTokens / kSegmentTokens, 1, scheduler::PlacementPolicy::kTiers);
  const std::vector<TokenId> prompt = UnlikeTokens(kTokens * 3 / 2, 3);
  EXPECT_LE(ErrorOf(prompt), kBudget);
  const auto sink = Submit(*cluster_, GreedyRequest(prompt, 40));
  ASSERT_EQ(sink->WaitForEnd(), absl::OkStatus());
  ExpectChoicesOfACpu(prompt, sink->choices()[0].tokens);
}

TEST_P(GpuPairs, AGpuThatStillComputesHoldsUpNoOther) {
  const TellGpu hold = EmulatedGpus("HoldEmulatedGpu");
  if (hold == nullptr) GTEST_SKIP() << "needs emulated GPUs";
  Start();
  const std::vector<Stream> streams = SubmitStreams(6, 60);
  for (const Stream& stream : streams) stream.sink->WaitForTokens(5);
  hold(1);
  EXPECT_TRUE(Eventually([&] { return cluster_->stats().scheduler.running_sequences <= 3; })) << "half of them end";
  hold(-1);
  ExpectChoicesOfACpu(streams, 60);
}

TEST_P(GpuPairs, TheOtherGoesOnWhereAGpuIsLost) {
  const TellGpu lose = EmulatedGpus("LoseEmulatedGpu");
  if (lose == nullptr) GTEST_SKIP() << "needs emulated GPUs";
  Start();
  const std::vector<Stream> streams = SubmitStreams(6, 60);
  for (const Stream& stream : streams) stream.sink->WaitForTokens(5);
  lose(1);
  ExpectChoicesOfACpu(streams, 60);
  EXPECT_TRUE(cluster_->stats().healthy);
  ExpectChoicesOfACpu(SubmitStreams(4, 20), 20);
  lose(0);
  const auto last = Submit(*cluster_, GreedyRequest(UnlikeTokens(40, 1), 20));
  EXPECT_TRUE(absl::IsUnavailable(last->WaitForEnd()));
  EXPECT_FALSE(cluster_->stats().healthy);
  cluster_.reset();
  lose(-1);  // all are well again, for other tests
}

INSTANTIATE_TEST_SUITE_P(, GpuPairs, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "WithLinearLayers" : "Softmax"); });

}  // namespace
}  // namespace dovetail::test
