#include <gtest/gtest.h>

#include "tests/cluster/alone.h"
#include "tests/cluster/mini_cluster.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// KV that is not what was written, in a whole cluster: it is found, the request is computed again where it must be, and
// every stream has the bits that it has alone.

namespace dovetail::test {
namespace {

class Corruption : public ::testing::TestWithParam<bool> {  // of a model with linear states
 protected:
  Corruption()
      : model_(GetParam() ? WriteTinyFolder(TinyGatedDeltaConfig(), 1, TempFolder())
                          : WriteTinyModel({}, TempFolder())),
        alone_(model_) {}

  MiniClusterOptions Options() const {
    MiniClusterOptions options;
    options.model = model_;
    options.weights = model::WeightFormat::kF32;
    options.kv = DType::kF32;
    options.scheduler.max_model_len = 512;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 256;
    options.digests = attention::Digests::kOfFinishedBlocks;
    return options;
  }

  static requests::GenerationRequest Request(int prompt, int max_tokens, int salt = 0) {
    requests::GenerationRequest request = GreedyRequest({1}, max_tokens);
    for (int i = 1; i < prompt; ++i) request.prompt.push_back(3 + (17 * i * i + 31 * i + 7 * salt) % 90);
    request.logits_of_output = true;
    return request;
  }

  // How many of the prompt's tokens came from the prefix cache.
  static int CachedBy(MiniCluster& cluster, Alone& alone, const requests::GenerationRequest& request) {
    const auto sink = Submit(cluster.engine(), request);
    EXPECT_EQ(sink->WaitForEnd(), absl::OkStatus());
    alone.Expect(request, *sink);
    return sink->cached_tokens();
  }

  const std::filesystem::path model_;
  Alone alone_;
};

TEST_P(Corruption, BitsThatChangeInCachedBlocksAreFoundAndThePromptIsComputedAgain) {
  auto cluster = MiniCluster::Start(Options());
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const requests::GenerationRequest request = Request(300, 20);
  EXPECT_EQ(CachedBy(**cluster, alone_, request), 0);
  EXPECT_EQ(CachedBy(**cluster, alone_, request), 256) << "what is well is taken from the cache";
  ASSERT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
  (*cluster)->FlipBits("a1", 256);
  EXPECT_EQ(CachedBy(**cluster, alone_, request), 0);
  EXPECT_EQ(CachedBy(**cluster, alone_, request), 256) << "what was computed again is well";
  const auto damaged = [&] { return (*cluster)->engine().stats().damaged_blocks; };
  EXPECT_TRUE(Eventually([&] { return damaged().size() == 1 && damaged()[0].blocks > 0; }));
}

TEST_P(Corruption, WithoutChecksumsTheSameBitsGiveAnotherAnswer) {
  MiniClusterOptions options = Options();
  options.digests = attention::Digests::kNone;
  auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const requests::GenerationRequest request = Request(300, 20);
  const auto before = Submit((*cluster)->engine(), request);
  ASSERT_EQ(before->WaitForEnd(), absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
  (*cluster)->FlipBits("a1", 4);  // of every float
  const auto after = Submit((*cluster)->engine(), request);
  ASSERT_EQ(after->WaitForEnd(), absl::OkStatus());
  EXPECT_EQ(after->cached_tokens(), 256);
  EXPECT_NE(before->choices()[0].logits, after->choices()[0].logits);
}

// Without checksums the answer is wrong; a replay, which takes nothing from the cache, finds it.
TEST_P(Corruption, AReplayFindsTokensThatDamagedBlocksGave) {
  MiniClusterOptions options = Options();
  options.digests = attention::Digests::kNone;
  options.attention_workers = 2;
  options.scheduler.replay_one_in = 1;
  auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto replays = [&] { return (*cluster)->engine().stats().scheduler; };
  const requests::GenerationRequest request = Request(300, 40);
  const auto before = Submit((*cluster)->engine(), request);
  ASSERT_EQ(before->WaitForEnd(), absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return replays().replays_same == 1; })) << "what is well is found to be the same";
  ASSERT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
  (*cluster)->FlipSigns("a1");
  (*cluster)->FlipSigns("a2");
  const auto after = Submit((*cluster)->engine(), request);
  ASSERT_EQ(after->WaitForEnd(), absl::OkStatus());
  ASSERT_NE(before->choices()[0].tokens, after->choices()[0].tokens);
  EXPECT_TRUE(Eventually([&] { return replays().replays_different == 1; }));
  EXPECT_EQ(replays().replays_same, 1u);
}

TEST_P(Corruption, BlocksThatAreExchangedInAMoveAreRefusedAndTheStreamGoesOnAllTheSame) {
  MiniClusterOptions options = Options();
  options.attention_workers = 2;
  options.faults.swap = 1;
  auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(Request(150 + i, 300, i));
    sinks.push_back(Submit((*cluster)->engine(), requests.back()));
  }
  for (const auto& sink : sinks) sink->WaitForTokens(5);
  ASSERT_TRUE((*cluster)->Drain("a1").ok());
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    alone_.Expect(requests[i], *sinks[i]);
  }
  EXPECT_GT((*cluster)->faults().swapped, 0);
}

INSTANTIATE_TEST_SUITE_P(, Corruption, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "LinearStates" : "Softmax"; });

}  // namespace
}  // namespace dovetail::test
