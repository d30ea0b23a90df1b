#include <gtest/gtest.h>

#include <string>

#include "base/mutex.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// A cluster that is destroyed while requests run: each is told its end once, and none is run to its last token.

namespace dovetail::test {
namespace {

constexpr int kPositions = 1 << 16;

// Counts what it is told.
class CountingSink final : public engine::GenerationSink {
 public:
  void OnUpdate(requests::GenerationUpdate update) override {
    MutexLock lock(mutex_);
    tokens_ += update.tokens.size();
    updates_after_end_ += ends_;
    ends_ += update.request_finished;
    reason_ = update.reason;
    changed_.notify_all();
  }
  void WaitForTokens(size_t tokens) {
    MutexLock lock(mutex_);
    while (tokens_ < tokens && ends_ == 0) changed_.wait(lock);
  }
  // Once the cluster is destroyed.
  void ExpectCancelledOnce() {
    MutexLock lock(mutex_);
    EXPECT_EQ(ends_, 1);
    EXPECT_EQ(updates_after_end_, 0);
    EXPECT_EQ(reason_, requests::FinishReason::kCancelled);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  size_t tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  int ends_ ABSL_GUARDED_BY(mutex_) = 0, updates_after_end_ ABSL_GUARDED_BY(mutex_) = 0;
  requests::FinishReason reason_ ABSL_GUARDED_BY(mutex_) = requests::FinishReason::kStop;
};

struct Shape {
  int compute_workers = 1, attention_workers = 1;
  bool apart = false;  // attention workers have a thread of their own
};

class ClusterEnd : public ::testing::TestWithParam<Shape> {
 protected:
  ClusterEnd() {
    auto model = TestModel::Load(WriteTinyModel({.positions = kPositions}, TempFolder()), model::WeightFormat::kF32);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto cpu = kernels::CreateCpuDevice({.threads = 1});
    EXPECT_TRUE(cpu.ok()) << cpu.status();
    attending_ = *std::move(cpu);
  }

  std::unique_ptr<engine::EmbeddedCluster> Start(int max_num_seqs) {
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(*model_, DType::kBF16);
    options.compute_workers = GetParam().compute_workers;
    options.attention_workers = GetParam().attention_workers;
    if (GetParam().apart) options.attention_device = attending_.get();
    options.kv_cache_bytes = uint64_t{20 << 20} * options.attention_workers;  // one request of kPositions on each
    options.scheduler.max_num_seqs = max_num_seqs;
    auto cluster = StartCluster(*model_, options);
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    return *std::move(cluster);
  }

  // Of a request that takes minutes.
  static std::shared_ptr<CountingSink> SubmitLong(engine::Engine& engine, int prompt = 20, int choices = 1) {
    requests::GenerationRequest request = GreedyRequest({}, kPositions / 2);
    for (int i = 0; i < prompt; ++i) request.prompt.push_back(3 + 31 * i % 90);
    request.choices = choices;
    auto sink = std::make_shared<CountingSink>();
    const auto id = engine.Submit(std::move(request), sink);
    EXPECT_TRUE(id.ok()) << id.status();
    return sink;
  }

  std::unique_ptr<TestModel> model_;
  std::unique_ptr<kernels::Device> attending_;
};

TEST_P(ClusterEnd, ALongGenerationIsCancelledAndNotAwaited) {
  auto cluster = Start(8);
  const auto sink = SubmitLong(*cluster);
  sink->WaitForTokens(5);
  cluster.reset();
  sink->ExpectCancelledOnce();
}

TEST_P(ClusterEnd, PromptsChoicesAndRequestsThatWaitAreToldToo) {
  auto cluster = Start(4);
  std::vector<std::shared_ptr<CountingSink>> sinks;
  sinks.push_back(SubmitLong(*cluster, 20, /*choices=*/3));
  sinks.push_back(SubmitLong(*cluster, 12000));
  sinks.front()->WaitForTokens(5);
  for (int i = 0; i < 5; ++i) sinks.push_back(SubmitLong(*cluster, 20 + 100 * i, 1 + i % 3));
  cluster.reset();
  for (const auto& sink : sinks) sink->ExpectCancelledOnce();
}

TEST_P(ClusterEnd, RequestsThatTheEngineHasNotSeenYetAreToldToo) {
  for (int round = 0; round < 10; ++round) {
    auto cluster = Start(8);
    std::vector<std::shared_ptr<CountingSink>> sinks;
    for (int i = 0; i < 4; ++i) sinks.push_back(SubmitLong(*cluster));
    cluster.reset();
    for (const auto& sink : sinks) sink->ExpectCancelledOnce();
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ClusterEnd,
                         testing::Values(Shape{}, Shape{2, 3}, Shape{.attention_workers = 2, .apart = true}),
                         [](const auto& info) {
                           const Shape& shape = info.param;
                           return std::to_string(shape.compute_workers) + "Compute" +
                                  std::to_string(shape.attention_workers) + (shape.apart ? "Apart" : "Attention");
                         });

}  // namespace
}  // namespace dovetail::test
