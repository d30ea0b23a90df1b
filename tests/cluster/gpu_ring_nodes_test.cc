#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compute_worker/cuda/cuda_model.h"
#include "model/checkpoint.h"
#include "tests/cluster/rank_cluster.h"
#include "tests/cluster/tiny_model.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// Ranks of a ring on GPUs that die at frames that they send to others: the survivors repeat the group, the logits stay
// within the budget of those on a CPU, and nothing is held at the end. K and V go from GPU to GPU, or through pinned
// memory, as between processes; there frames come late and twice. Runs on a GPU, and on the emulated one
// (emulated_gpu).

namespace dovetail::test {
namespace {

using kernels::cuda::CudaDevice;

constexpr double kBudget = 2.5e-2;  // as in gpu_prompts_test
constexpr int kRanks = 3;
constexpr int kFramesBetween = 2;  // deaths

struct Case {
  const char* name;
  const char* architecture;
  int window;  // of gemma3
  bool rows_on_device;
  bool room = true;  // in each rank's scratch for its own tokens

  friend std::ostream& operator<<(std::ostream& out, const Case& how) { return out << how.name; }
};

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenGpu(int index) {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = index, .host_threads = 2});
}

class GpuRingNodes : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    for (int index = 0; index < 2; ++index) {
      auto gpu = OpenGpu(index);
      if (!gpu.ok() && index > 0) gpu = OpenGpu(0);  // two devices of one GPU
      if (!gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.status().message();
      gpus_.push_back(*std::move(gpu));
    }
    ASSERT_TRUE(gpus_[0]->ReachPeer(*gpus_[1]).ok() && gpus_[1]->ReachPeer(*gpus_[0]).ok());
    TinyModelSpec spec;
    spec.architecture = GetParam().architecture;
    spec.layers = 3;
    if (spec.architecture == "gemma3") spec.window = GetParam().window;
    const auto path = WriteTinyModel(spec, TempFolder());
    model_ = std::make_unique<NodeModel>(path, model::WeightFormat::kBF16, DType::kBF16);
    for (const auto& gpu : gpus_) {
      auto checkpoint = model::OpenCheckpoint(path);
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      auto loaded = model::LoadModel(*std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {});
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      loaded_.push_back(*std::move(loaded));
      auto weights =
          compute::CudaModel::Load(*gpu, *loaded_.back(), DType::kBF16, false, compute::GpuWeights::kDequantise, {});
      ASSERT_TRUE(weights.ok()) << weights.status();
      weights_.push_back(*std::move(weights));
    }
  }

  RankClusterOptions Ring(uint64_t seed) const {
    RankClusterOptions options;
    options.exchange = proto::PrefixExchange::kRing;
    options.compute_workers = kRanks;
    if (!GetParam().rows_on_device) options.seed = seed;  // faulty ports read what they send
    for (size_t i = 0; i < gpus_.size(); ++i) options.on.push_back({gpus_[i].get(), weights_[i].get()});
    options.rows_on_device = GetParam().rows_on_device;
    if (!GetParam().room) options.scratch_bytes = 4 << 10;  // a block
    return options;
  }

  void ExpectLogitsOfACpu(const Stream& ours, const Stream& of_cpu) {
    ASSERT_EQ(ours.error, "");
    ASSERT_EQ(ours.logits.size(), of_cpu.logits.size());
    const double error = RelativeRms(ours.logits[0], of_cpu.logits[0]);
    EXPECT_LE(error, kBudget);
    worst_ = std::max(worst_, error);
  }

  std::vector<std::unique_ptr<CudaDevice>> gpus_;
  std::unique_ptr<NodeModel> model_;
  std::vector<std::unique_ptr<model::LoadedModel>> loaded_;
  std::vector<std::unique_ptr<compute::CudaModel>> weights_;
  double worst_ = 0;
};

TEST_P(GpuRingNodes, ARankDiesAndTheOthersHaveTheLogitsOfACpu) {
  const requests::GenerationRequest request = NodeRequest(300, 1, 1);
  RankCluster on_cpu(*model_, {});
  ASSERT_TRUE(on_cpu.UntilFinished(on_cpu.Submit(request)));
  const Stream of_cpu = on_cpu.stream(1);
  for (int rank = 0; rank < kRanks; ++rank) {
    bool died = true;
    int deaths = 0, repeated = 0;
    for (int frames = rank; died; frames += kFramesBetween) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " dies after ", frames, " frames to other ranks"));
      RankCluster cluster(*model_, Ring(/*seed=*/1 + static_cast<uint64_t>(frames)));
      cluster.port(rank).lives_for = frames;
      const uint64_t id = cluster.Submit(request);
      ASSERT_TRUE(cluster.Until([&] { return cluster.port(rank).dead() || cluster.stream(id).finished; }));
      died = cluster.port(rank).dead();
      if (died) {
        cluster.Lose(rank);
        ++deaths;
      } else {
        cluster.port(rank).lives_for = 1 << 30;  // it may still answer
      }
      ASSERT_TRUE(cluster.UntilFinished(id));
      ASSERT_NO_FATAL_FAILURE(ExpectLogitsOfACpu(cluster.stream(id), of_cpu));
      EXPECT_EQ(cluster.stats().prefix_ring_bytes > 0, GetParam().room);
      EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.WhatIsHeld();
      repeated += cluster.stats().prefill_groups > 1 ? 1 : 0;
    }
    EXPECT_GE(deaths, 2) << "it sends or answers so many tensors";
    EXPECT_GE(repeated, 2);
  }
  std::printf("measured %s %.3g\n", GetParam().name, worst_);
}

// Prompts that begin alike: the later ones begin in the middle.
TEST_P(GpuRingNodes, SeveralPromptsAndCachedPrefixes) {
  std::vector<requests::GenerationRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(NodeRequest(250 + 31 * i, 1, /*salt=*/i % 2));
  RankCluster on_cpu(*model_, {}), cluster(*model_, Ring(/*seed=*/3));
  for (const requests::GenerationRequest& request : requests) {
    const uint64_t there = on_cpu.Submit(request), here = cluster.Submit(request);
    ASSERT_TRUE(on_cpu.UntilFinished(there) && cluster.UntilFinished(here));
    ASSERT_NO_FATAL_FAILURE(ExpectLogitsOfACpu(cluster.stream(here), on_cpu.stream(there)));
  }
  EXPECT_GT(cluster.stats().prefix_hits, 0u);
  EXPECT_GE(cluster.stats().prefill_groups, 2u);
  EXPECT_EQ(cluster.stats().prefix_ring_bytes > 0, GetParam().room);
  EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.WhatIsHeld();
}

INSTANTIATE_TEST_SUITE_P(All, GpuRingNodes,
                         ::testing::Values(Case{"FromGpuToGpu", "llama", 0, true},
                                           Case{"ThroughPinnedMemory", "llama", 0, false},
                                           // A rank asks attention workers, and hands on all the same.
                                           Case{"WithoutRoom", "llama", 0, false, false},
                                           Case{"WithWindows", "gemma3", 90, true}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
