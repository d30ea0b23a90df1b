#include "tests/cluster/gpu_rank_nodes.h"

#include <cstdio>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "model/checkpoint.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace {

using kernels::cuda::CudaDevice;

constexpr double kBudget = 2.5e-2;  // as in gpu_prompts_test
constexpr int kFramesBetween = 2;   // deaths

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenGpu(int index) {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = index, .host_threads = 2});
}

}  // namespace

void GpuRankNodes::SetUp() {
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
  spec.heads = GetParam().heads;
  spec.kv_heads = GetParam().kv_heads;
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

RankClusterOptions GpuRankNodes::Options(uint64_t seed) const {
  RankClusterOptions options;
  options.exchange = exchange_;
  options.compute_workers = GetParam().ranks;
  if (!GetParam().rows_on_device) options.seed = seed;  // faulty ports read what they send
  for (size_t i = 0; i < gpus_.size(); ++i) options.on.push_back({gpus_[i].get(), weights_[i].get()});
  options.rows_on_device = GetParam().rows_on_device;
  options.offering = GetParam().offering;
  if (!GetParam().room) options.scratch_bytes = 4 << 10;  // a block
  return options;
}

void GpuRankNodes::ExpectLogitsOfACpu(const Stream& ours, const Stream& of_cpu) {
  ASSERT_EQ(ours.error, "");
  ASSERT_EQ(ours.logits.size(), of_cpu.logits.size());
  const double error = RelativeRms(ours.logits[0], of_cpu.logits[0]);
  EXPECT_LE(error, kBudget);
  worst_ = std::max(worst_, error);
}

void GpuRankNodes::ExpectThatTheOthersRepeatTheGroup() {
  const requests::GenerationRequest request = NodeRequest(300, 1, 1);
  RankCluster on_cpu(*model_, {});
  ASSERT_TRUE(on_cpu.UntilFinished(on_cpu.Submit(request)));
  const Stream of_cpu = on_cpu.stream(1);
  const int ranks = GetParam().ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    bool died = true;
    int deaths = 0, repeated = 0;
    for (int frames = rank; died; frames += kFramesBetween) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " dies after ", frames, " frames to other ranks"));
      RankCluster cluster(*model_, Options(/*seed=*/1 + static_cast<uint64_t>(frames)));
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
      if (ranks > 2 || !died) {
        EXPECT_EQ(cluster.stats().*crossed_ > 0, GetParam().room);
      }
      EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.WhatIsHeld();
      for (int r = 0; r < ranks; ++r) names_ += cluster.port(r).names();
      repeated += cluster.stats().prefill_groups > 1 ? 1 : 0;
    }
    EXPECT_GE(deaths, 2) << "it sends or answers so many tensors";
    if (ranks > 2) {
      EXPECT_GE(repeated, 2);  // else one is left
    }
  }
  ExpectNamesWhereTheyCanBeOpened();
  std::printf("measured %s %.3g\n", GetParam().name, worst_);
}

// A process does not open its own memory on a real GPU. With a rank that is not reached all goes through pinned memory,
// unless that rank has died.
void GpuRankNodes::ExpectNamesWhereTheyCanBeOpened() const {
  const bool emulated = std::string_view(gpus_[0]->info().name) == "CPU emulation";
  const bool named = emulated && !GetParam().rows_on_device && GetParam().offering > 1;
  EXPECT_EQ(names_ > 0, named) << names_;
}

void GpuRankNodes::ExpectLogitsBehindPartOfASegment() {
  const requests::GenerationRequest request = NodeRequest(480, 1, 1);
  RankCluster on_cpu(*model_, {});
  ASSERT_TRUE(on_cpu.UntilFinished(on_cpu.Submit(request)));
  RankClusterOptions options = Options(/*seed=*/5);
  options.step_tokens = 100;
  options.known_workers = 1;
  RankCluster cluster(*model_, options);
  const uint64_t id = cluster.Submit(request);
  ASSERT_TRUE(cluster.Until([&] { return cluster.TokensAttendedBy(0) > 0; }));
  for (int rank = 1; rank < GetParam().ranks; ++rank) cluster.Join(rank);
  ASSERT_TRUE(cluster.UntilFinished(id));
  ASSERT_NO_FATAL_FAILURE(ExpectLogitsOfACpu(cluster.stream(id), on_cpu.stream(1)));
  EXPECT_GE(cluster.stats().prefill_groups, 1u);
  EXPECT_GT(cluster.stats().*crossed_, 0u);
  EXPECT_GT(cluster.stats().prefix_gathered_bytes, 0u);
  EXPECT_GT(cluster.stats().prefix_asked_bytes, 0u);
  EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.WhatIsHeld();
  std::printf("measured %s behind a part %.3g\n", GetParam().name, worst_);
}

void GpuRankNodes::ExpectLogitsOfSeveralPromptsAndCachedPrefixes() {
  std::vector<requests::GenerationRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(NodeRequest(250 + 31 * i, 1, /*salt=*/i % 2));
  RankCluster on_cpu(*model_, {}), cluster(*model_, Options(/*seed=*/3));
  for (const requests::GenerationRequest& request : requests) {
    const uint64_t there = on_cpu.Submit(request), here = cluster.Submit(request);
    ASSERT_TRUE(on_cpu.UntilFinished(there) && cluster.UntilFinished(here));
    ASSERT_NO_FATAL_FAILURE(ExpectLogitsOfACpu(cluster.stream(here), on_cpu.stream(there)));
  }
  EXPECT_GT(cluster.stats().prefix_hits, 0u);
  EXPECT_GE(cluster.stats().prefill_groups, 2u);
  EXPECT_EQ(cluster.stats().*crossed_ > 0, GetParam().room);
  EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.WhatIsHeld();
  std::printf("measured %s prefixes %.3g\n", GetParam().name, worst_);
}

}  // namespace dovetail::test
