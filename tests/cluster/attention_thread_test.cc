#include <gtest/gtest.h>

#include "tests/cluster/alone.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/frail_device.h"
#include "tests/support/test_data.h"

// Attention workers that have a CPU to themselves, in a thread of their own next to the engine's. In a product layers
// run on GPUs then; here they run on a second CPU, so that ThreadSanitizer sees both threads.

namespace dovetail::test {
namespace {

class AttentionThread : public ::testing::Test {
 protected:
  AttentionThread() : path_(WriteTinyModel({}, TempFolder())), alone_(path_) {
    auto model = TestModel::Load(path_, model::WeightFormat::kF32);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto cpu = kernels::CreateCpuDevice({.threads = 2});
    EXPECT_TRUE(cpu.ok()) << cpu.status();
    attending_ = std::make_unique<FrailDevice>(*std::move(cpu));
  }

  absl::StatusOr<std::unique_ptr<engine::EmbeddedCluster>> Start(int attention_workers) {
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(*model_, DType::kF32);
    options.attention_device = attending_.get();
    options.attention_workers = attention_workers;
    return StartCluster(*model_, options);
  }

  static requests::GenerationRequest Request(int prompt, int max_tokens) {
    requests::GenerationRequest request = GreedyRequest({1}, max_tokens);
    for (int i = 1; i < prompt; ++i) request.prompt.push_back(3 + (17 * i * i + 31 * i) % 90);
    request.logits_of_output = true;
    return request;
  }

  const std::filesystem::path path_;
  Alone alone_;
  std::unique_ptr<TestModel> model_;
  std::unique_ptr<FrailDevice> attending_;
};

TEST_F(AttentionThread, GivesTheLogitsOfOneThreadAndFreesItsKv) {
  for (const int workers : {1, 3}) {
    const auto engine = Start(workers);
    ASSERT_TRUE(engine.ok()) << engine.status();
    std::vector<requests::GenerationRequest> requests;
    std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
    for (int i = 0; i < 6; ++i) {
      requests.push_back(Request(10 + 30 * i, 40));
      sinks.push_back(Submit(**engine, requests.back()));
    }
    EXPECT_TRUE(Eventually([&] { return (*engine)->stats().kv_blocks_in_use > 0; }));
    for (size_t i = 0; i < sinks.size(); ++i) {
      ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
      alone_.Expect(requests[i], *sinks[i]);
    }
    EXPECT_TRUE(Eventually([&] { return (*engine)->stats().kv_blocks_in_use == 0; }));
    EXPECT_GT((*engine)->stats().kv_blocks_total, 0u);
  }
}

TEST_F(AttentionThread, EndsStreamsWithTheReasonWhenItsDeviceIsLost) {
  const auto engine = Start(2);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto first = Submit(**engine, Request(20, 450));
  first->WaitForTokens(5);
  EXPECT_TRUE((*engine)->stats().healthy);
  attending_->Lose();
  const auto second = Submit(**engine, Request(240, 20));
  for (const auto& sink : {first, second}) EXPECT_EQ(sink->WaitForEnd().message(), "the test's device is lost");
  EXPECT_FALSE((*engine)->stats().healthy);
  EXPECT_EQ((*engine)->stats().error, "the test's device is lost");
}

TEST_F(AttentionThread, EndsWithTheClusterWhileStreamsRun) {
  for (int i = 0; i < 5; ++i) {
    std::shared_ptr<cli::CollectingSink> sink;
    {
      const auto engine = Start(2);
      ASSERT_TRUE(engine.ok()) << engine.status();
      sink = Submit(**engine, Request(20, 450));
      sink->WaitForTokens(1 + i);
    }
    EXPECT_EQ(sink->WaitForEnd(), absl::OkStatus());
  }
}

}  // namespace
}  // namespace dovetail::test
