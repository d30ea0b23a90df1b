#include <gtest/gtest.h>

#include "tests/cluster/alone.h"
#include "tests/cluster/mini_cluster.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/frail_device.h"
#include "tests/support/test_data.h"

// A device is lost under a worker that runs on. The steps that it did not finish are repeated by another worker.

namespace dovetail::test {
namespace {

class LostDevice : public ::testing::Test {
 protected:
  LostDevice() : model_(WriteTinyModel({}, TempFolder())), alone_(model_) {}

  MiniClusterOptions Options() const {
    MiniClusterOptions options;
    options.model = model_;
    options.weights = model::WeightFormat::kF32;
    options.kv = DType::kF32;
    options.scheduler.max_model_len = 512;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 256;
    return options;
  }

  static requests::GenerationRequest Request(int prompt, int max_tokens) {
    requests::GenerationRequest request = GreedyRequest({1}, max_tokens);
    for (int i = 1; i < prompt; ++i) request.prompt.push_back(3 + (17 * i * i + 31 * i) % 90);
    request.logits_of_output = true;
    return request;
  }

  // Streams go on while `name` loses its device, which a longer prompt than any before brings to light; then `add`
  // brings another worker.
  template <typename Add>
  void LoseTheDeviceOf(MiniCluster& cluster, const std::string& name, Add add) {
    const requests::GenerationRequest running = Request(20, 300), longer = Request(240, 20);
    const auto first = Submit(cluster.engine(), running);
    first->WaitForTokens(5);
    cluster.LoseDevice(name);
    const auto second = Submit(cluster.engine(), longer);
    EXPECT_EQ(cluster.WaitForEnd(name).message(), "the test's device is lost");
    ASSERT_EQ(add(), absl::OkStatus());
    ASSERT_EQ(first->WaitForEnd(), absl::OkStatus());
    ASSERT_EQ(second->WaitForEnd(), absl::OkStatus());
    alone_.Expect(running, *first);
    alone_.Expect(longer, *second);
    EXPECT_TRUE(Eventually([&] { return cluster.engine().stats().kv_blocks_in_use == 0; }));
  }

  const std::filesystem::path model_;
  Alone alone_;
};

TEST_F(LostDevice, AnAttentionWorkersEndsItAndItsSequencesAreRebuiltElsewhere) {
  const auto cluster = MiniCluster::Start(Options());
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  LoseTheDeviceOf(**cluster, "a1", [&] { return (*cluster)->AddAttentionWorker("a2"); });
}

TEST_F(LostDevice, AComputeWorkersEndsItAndItsStepIsDoneByAnother) {
  const auto cluster = MiniCluster::Start(Options());
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  LoseTheDeviceOf(**cluster, "c1", [&] { return (*cluster)->AddComputeWorker("c2"); });
}

TEST_F(LostDevice, InOneProcessStreamsEndWithTheReasonAndTheEngineSaysThatItIsNotWell) {
  const auto model = TestModel::Load(model_, model::WeightFormat::kF32);
  ASSERT_TRUE(model.ok()) << model.status();
  auto cpu = kernels::CreateCpuDevice({.threads = 1});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  FrailDevice device(*std::move(cpu));
  const auto engine =
      engine::EmbeddedCluster::Create(*(*model)->model, device, ClusterOptionsFor(**model, DType::kF32));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto first = Submit(**engine, Request(20, 500));
  first->WaitForTokens(5);
  EXPECT_TRUE((*engine)->stats().healthy);
  device.Lose();
  const auto second = Submit(**engine, Request(240, 20));
  for (const auto& sink : {first, second}) EXPECT_EQ(sink->WaitForEnd().message(), "the test's device is lost");
  EXPECT_FALSE((*engine)->stats().healthy);
  EXPECT_EQ((*engine)->stats().error, "the test's device is lost");
  const auto refused = (*engine)->Submit(Request(20, 5), std::make_shared<cli::CollectingSink>(1));
  EXPECT_TRUE(absl::IsUnavailable(refused.status())) << refused.status();
}

}  // namespace
}  // namespace dovetail::test
