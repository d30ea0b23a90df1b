#include <gtest/gtest.h>

#include "tests/cluster/alone.h"
#include "tests/cluster/mini_cluster.h"
#include "tests/support/test_data.h"

// K and V in 8 bits in clusters whose workers come, go and hand over what they hold: the bits are those of a request
// that is alone, since what was rounded once is rounded to the same again (kernels/kv_eight_bits.h).

namespace dovetail::test {
namespace {

struct Cluster {
  Deployment deployment;
  KvStorage storage;
};

class MiniClusterInEightBits : public testing::TestWithParam<Cluster> {
 protected:
  void SetUp() override {
    DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
    model_ = folder / "stories260K-f32.gguf";
    alone_ = std::make_unique<Alone>(model_, DType::kF32, GetParam().storage);
  }

  MiniClusterOptions Options() const {
    MiniClusterOptions options;
    options.deployment = GetParam().deployment;
    options.model = model_;
    options.weights = model::WeightFormat::kF32;
    options.kv = DType::kBF16;
    options.compute.kv_storage = GetParam().storage;
    options.scheduler.max_model_len = 512;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 128;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    return options;
  }

  static requests::GenerationRequest Request(int prompt, int max_tokens, int salt) {
    requests::GenerationRequest request = GreedyRequest({1, 403, 407, 261, 378}, max_tokens);
    for (int i = 0; static_cast<int>(request.prompt.size()) < prompt; ++i)
      request.prompt.push_back(3 + (17 * i * i + 31 * i + 5 * salt) % 500);
    request.logits_of_output = true;
    return request;
  }

  std::filesystem::path model_;
  std::unique_ptr<Alone> alone_;
};

TEST_P(MiniClusterInEightBits, StreamsGoOnWithTheSameBitsWhileWorkersAreLost) {
  const auto cluster = MiniCluster::Start(Options());
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto before = Submit((*cluster)->engine(), Request(100, 250, 1));
  before->WaitForTokens(10);
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a2").ok());
  (*cluster)->Stop("a1");  // what lay on it is computed again on the other
  ASSERT_EQ(before->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(100, 250, 1), *before);
  const auto after = Submit((*cluster)->engine(), Request(70, 250, 2));
  after->WaitForTokens(5);
  (*cluster)->Stop("c1");
  ASSERT_TRUE((*cluster)->AddComputeWorker("c2").ok());
  ASSERT_EQ(after->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(70, 250, 2), *after);
}

TEST_P(MiniClusterInEightBits, ADrainedWorkerGivesWhatItHoldsToTheOthersWhileStreamsGoOn) {
  MiniClusterOptions options = Options();
  options.attention_workers = 3;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(Request(30 + 40 * i, 200, i));
    sinks.push_back(Submit((*cluster)->engine(), requests.back()));
  }
  for (const auto& sink : sinks) sink->WaitForTokens(2);
  ASSERT_TRUE((*cluster)->Drain("a2").ok());
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone_->Expect(requests[i], *sinks[i]);
  }
  // Processes on a busy machine may take each other for dead.
  if (GetParam().deployment < Deployment::kProcesses) {
    EXPECT_EQ((*cluster)->engine().stats().scheduler.preemptions, 0u) << "computed again, not moved";
  }
  EXPECT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Clusters, MiniClusterInEightBits,
                         testing::Values(Cluster{Deployment::kThreads, KvStorage::kInt8},
                                         Cluster{Deployment::kThreads, KvStorage::kE4M3},
                                         Cluster{Deployment::kProcesses, KvStorage::kInt8}),
                         [](const testing::TestParamInfo<Cluster>& info) {
                           return absl::StrCat(Name(info.param.deployment), "_",
                                               std::string(dovetail::Name(info.param.storage)));
                         });

}  // namespace
}  // namespace dovetail::test
