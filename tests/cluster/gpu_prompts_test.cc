#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/cuda/prompt_step_times.h"
#include "compute_worker/prompt_scratch_size.h"
#include "model/checkpoint.h"
#include "proto/kv_blocks.h"
#include "tests/cluster/near_ties.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// Prompts that a compute worker on a GPU attends itself, with K and V on attention workers on a CPU or on a GPU. The
// logits are those of the same model on a CPU within a budget. Runs on a GPU, and on the emulated one (emulated_gpu).

namespace dovetail::test {
namespace {

using kernels::cuda::CudaDevice;

// Both have weights, K, V and wire in bf16; on a CPU activations are f32 between products, on a GPU bf16. The largest
// error that was measured is 1.1e-2.
constexpr double kBudget = 2.5e-2;

enum class Scratch { kAmple, kStep, kNone };

struct Case {
  const char* name;
  const char* architecture = "llama";
  bool attention_on_cpu = true;
  int attention_workers = 1;
  scheduler::PlacementPolicy placement = scheduler::PlacementPolicy::kRequest;
  Scratch scratch = Scratch::kAmple;
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  int step_tokens = 64;
  int micro_batches = 1;
  int window = 70;      // of gemma3
  int ranks = 1;        // compute workers that divide each prompt, the second on another GPU if there is one
  int piece = 2 << 20;  // bytes of K and V of earlier tokens that come at once
  int kv_heads = 2;     // half as many as there are heads
  int gpu_tokens = 0;   // not 0: one attention worker is on the GPU, with room for so many, and one on the CPU

  friend std::ostream& operator<<(std::ostream& out, const Case& how) { return out << how.name; }
};

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenGpu(int index = 0) {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = index, .host_threads = 2});
}

std::vector<TokenId> Tokens(int count, int seed) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(1 + (17 * i * i + (31 + seed) * i) % 90));
  return tokens;
}

class GpuPrompts : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto gpu = OpenGpu();
    if (!gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.status().message();
    gpu_ = *std::move(gpu);
    const Case& how = GetParam();
    TinyModelSpec spec;
    spec.architecture = how.architecture;
    spec.layers = 4;
    spec.heads = 2 * how.kv_heads;
    spec.kv_heads = how.kv_heads;
    if (spec.architecture == "gemma3") spec.window = how.window;
    const auto path = WriteTinyModel(spec, TempFolder());
    auto cpu = TestModel::Load(path, model::WeightFormat::kBF16);
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    cpu_ = *std::move(cpu);
    auto reference = StartCluster(*cpu_, ClusterOptionsFor(*cpu_, DType::kBF16));
    ASSERT_TRUE(reference.ok()) << reference.status();
    reference_ = *std::move(reference);
    auto checkpoint = model::OpenCheckpoint(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto loaded = model::LoadModel(*std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    model_ = *std::move(loaded);
    auto weights = compute::CudaModel::Load(*gpu_, *model_, DType::kBF16, false, compute::GpuWeights::kDequantise, {});
    ASSERT_TRUE(weights.ok()) << weights.status();
    weights_ = *std::move(weights);
    if (how.ranks > 1) {
      auto other = OpenGpu(1);
      if (!other.ok()) other = OpenGpu(0);
      ASSERT_TRUE(other.ok()) << other.status();
      other_gpu_ = *std::move(other);
      for (const auto& [from, to] : {std::pair(gpu_.get(), other_gpu_.get()), std::pair(other_gpu_.get(), gpu_.get())})
        ASSERT_TRUE(from->ReachPeer(*to).ok());
      auto there =
          compute::CudaModel::Load(*other_gpu_, *model_, DType::kBF16, false, compute::GpuWeights::kDequantise, {});
      ASSERT_TRUE(there.ok()) << there.status();
      other_weights_ = *std::move(there);
    }
    auto cluster = engine::EmbeddedCluster::Create(*model_, *gpu_, Options());
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }

  engine::EmbeddedClusterOptions Options() {
    const Case& how = GetParam();
    engine::EmbeddedClusterOptions options;
    options.kv_dtype = DType::kBF16;
    options.kv_cache_bytes = 64 << 20;
    options.poison_freed_kv = true;
    options.attention_workers = how.attention_workers;
    if (how.attention_on_cpu) options.attention_device = cpu_->device.get();
    options.compute.dense = weights_.get();
    options.compute.gather_piece_bytes = how.piece;
    const auto table = compute::AttentionTableOf(model_->config(), DType::kBF16);
    EXPECT_TRUE(table.ok());
    if (how.gpu_tokens > 0) {
      const uint64_t set = proto::BlocksPerSegment(*table) * attention::KvBlockBytes(*table, options.kv_storage);
      const uint64_t bytes = set * how.gpu_tokens / kSegmentTokens;
      options.attention_places = {{gpu_.get(), [bytes] { return bytes; }, 40},
                                  {cpu_->device.get(), [] { return uint64_t{64} << 20; }, 1}};
    }
    options.compute.prompt_scratch_bytes = how.scratch == Scratch::kAmple ? 64 << 20
                                           : how.scratch == Scratch::kStep
                                               ? compute::PromptScratchBytesOfAStep(*table, how.step_tokens)
                                               : 0;
    options.scheduler.max_model_len = 1024;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = how.step_tokens;
    options.scheduler.micro_batches = how.micro_batches;
    options.scheduler.placement = how.placement;
    options.scheduler.prefill_exchange = how.exchange;
    options.scheduler.prefill_ranks = options.compute_workers = how.ranks;
    options.scheduler.prefill_rank_tokens = how.ranks > 1 ? 64 : options.scheduler.prefill_rank_tokens;
    if (how.ranks > 1) options.more_compute_devices = {{other_gpu_.get(), other_weights_.get()}};
    return options;
  }

  // How far the logits of the last `rows` tokens of a prompt are from those on the CPU.
  double ErrorOf(const std::vector<TokenId>& prompt, int rows) {
    requests::GenerationRequest request = GreedyRequest(prompt, 1);
    request.logits_last = rows;
    const auto ours = Generate(*cluster_, request), theirs = Generate(*reference_, request);
    EXPECT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
    if (!ours.ok() || !theirs.ok()) return 1;
    EXPECT_EQ((*ours)->protocol_errors(), 0);
    return RelativeRms((*ours)->prompt_logits(), (*theirs)->prompt_logits());
  }
  // Of attention over prompts on the compute worker, since the last call.
  bool AttendedHere() {
    const auto samples = cluster_->TakeStepSamples();
    return std::any_of(samples.begin(), samples.end(), [](const auto& step) { return step.prompt_us > 0; });
  }
  void Measured(const char* what, double error) {
    std::printf("measured %s %s %.3g\n", GetParam().name, what, error);
    EXPECT_LE(error, kBudget) << what;
  }

  std::unique_ptr<CudaDevice> gpu_, other_gpu_;
  std::unique_ptr<TestModel> cpu_;
  std::unique_ptr<model::LoadedModel> model_;
  std::unique_ptr<compute::CudaModel> weights_, other_weights_;
  std::unique_ptr<engine::EmbeddedCluster> reference_, cluster_;
};

TEST_P(GpuPrompts, OfManyPartsHaveTheLogitsOfACpu) {
  Measured("one part", ErrorOf(Tokens(45, 1), 45));
  Measured("five parts", ErrorOf(Tokens(300, 2), 300));
  Measured("too few tokens to be attended here", ErrorOf(Tokens(12, 8), 12));
  EXPECT_EQ(AttendedHere(), GetParam().scratch != Scratch::kNone);
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  if (GetParam().scratch == Scratch::kAmple) {
    EXPECT_EQ(stats.prefix_asked_bytes + stats.prefix_gathered_bytes, 0u) << "earlier parts stay in the scratch";
  } else if (GetParam().scratch == Scratch::kStep) {
    EXPECT_GT(stats.prefix_asked_bytes, 0u) << "earlier parts are on attention workers only";
    EXPECT_EQ(stats.prefix_gathered_bytes, 0u);
  }
}

TEST_P(GpuPrompts, AfterACachedPrefixHaveTheLogitsOfACpu) {
  std::vector<TokenId> prompt = Tokens(200, 3);
  ASSERT_TRUE(Generate(*cluster_, GreedyRequest(prompt, 1)).ok());
  const std::vector<TokenId> more = Tokens(150, 4);
  prompt.insert(prompt.end(), more.begin(), more.end());
  Measured("after a prefix", ErrorOf(prompt, 150));
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  EXPECT_GE(stats.prefix_hits, 128u);  // 192, unless the last of them would divide its shard
  if (GetParam().scratch != Scratch::kAmple) return;
  const bool gathers = GetParam().exchange == proto::PrefixExchange::kGather;
  EXPECT_EQ(stats.prefix_gathered_bytes > 0, gathers);
  EXPECT_EQ(stats.prefix_asked_bytes > 0, !gathers);
}

// Steps then have rows of prompts, and of sequences that attention workers attend.
TEST_P(GpuPrompts, BesideDecodesHaveTheLogitsOfACpu) {
  std::vector<std::shared_ptr<cli::CollectingSink>> decodes;
  for (int i = 0; i < 3; ++i) decodes.push_back(Submit(*cluster_, GreedyRequest(Tokens(20 + i, 5 + i), 90)));
  for (const auto& sink : decodes) sink->WaitForTokens(1);
  Measured("with decodes", ErrorOf(Tokens(333, 9), 333));
  Measured("a short one with decodes", ErrorOf(Tokens(17, 10), 17));
  for (size_t i = 0; i < decodes.size(); ++i) {
    ASSERT_TRUE(decodes[i]->WaitForEnd().ok());
    EXPECT_EQ(decodes[i]->choices()[0].tokens.size(), 90u);
    EXPECT_EQ(decodes[i]->protocol_errors(), 0);
  }
}

class GpuRanks : public GpuPrompts {};

TEST_P(GpuRanks, DivideAPromptThatHasTheLogitsOfACpu) {
  Measured("divided", ErrorOf(Tokens(300, 2), 300));
  EXPECT_TRUE(AttendedHere());
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  const bool direct = GetParam().exchange == proto::PrefixExchange::kGatherDirect;
  const bool ring = GetParam().exchange == proto::PrefixExchange::kRing;
  EXPECT_GE(stats.prefill_groups, 1u);
  EXPECT_EQ(stats.prefix_direct_bytes > 0, direct);
  EXPECT_EQ(stats.prefix_ring_bytes > 0, ring);
  const bool switches = GetParam().exchange == proto::PrefixExchange::kSwitch;
  EXPECT_EQ(stats.prefix_switch_bytes > 0, switches);
  if (!direct && !ring && !switches) return;
  // A prefix that is cached is on attention workers, and in the scratch of the worker that computed it.
  std::vector<TokenId> prompt = Tokens(200, 3);
  ASSERT_TRUE(Generate(*cluster_, GreedyRequest(prompt, 1)).ok());
  const std::vector<TokenId> more = Tokens(250, 4);
  prompt.insert(prompt.end(), more.begin(), more.end());
  Measured("divided behind a prefix", ErrorOf(prompt, 250));
  EXPECT_GE(cluster_->stats().scheduler.prefix_hits, 128u);
}

// Several groups at a time, each in micro-batches of its own, and steps of decodes between them.
TEST_P(GpuRanks, DivideSeveralPromptsBesideDecodes) {
  std::vector<std::shared_ptr<cli::CollectingSink>> decodes;
  for (int i = 0; i < 2; ++i) decodes.push_back(Submit(*cluster_, GreedyRequest(Tokens(20 + i, 5 + i), 60)));
  for (const auto& sink : decodes) sink->WaitForTokens(1);
  const auto other = Submit(*cluster_, GreedyRequest(Tokens(400, 8), 2));
  Measured("divided among others", ErrorOf(Tokens(333, 9), 333));
  ASSERT_TRUE(other->WaitForEnd().ok());
  for (const auto& sink : decodes) {
    ASSERT_TRUE(sink->WaitForEnd().ok());
    EXPECT_EQ(sink->choices()[0].tokens.size(), 60u);
  }
}

class GpuRings : public GpuPrompts {};

// Nothing comes from attention workers, though the scratch may have no room for more than a rank's own tokens.
TEST_P(GpuRings, AttendToAllTokensOfAGroupOnTheirGpus) {
  const Case& how = GetParam();
  const int tokens = how.step_tokens * how.ranks - 5;
  Measured("one group", ErrorOf(Tokens(tokens, 6), tokens));
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  EXPECT_EQ(stats.prefill_groups, 1u);
  EXPECT_GT(stats.prefix_ring_bytes, 0u);
  EXPECT_EQ(stats.prefix_asked_bytes + stats.prefix_gathered_bytes + stats.prefix_direct_bytes, 0u);
}

class GpuSwitches : public GpuPrompts {};

// Of one group nothing comes from attention workers, and the bytes are those of the formula.
TEST_P(GpuSwitches, AttendToSomeHeadsOfAllTokensOfAGroup) {
  const Case& how = GetParam();
  const int tokens = how.step_tokens * how.ranks;
  Measured("one group", ErrorOf(Tokens(tokens, 6), tokens));
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  EXPECT_EQ(stats.prefill_groups, 1u);
  EXPECT_EQ(stats.prefix_asked_bytes + stats.prefix_gathered_bytes + stats.prefix_direct_bytes, 0u);
  // f N / P (Hq + Hk) (dk + dv) e bytes for each of P ranks and 4 layers: heads of 16 dimensions of 2 bytes.
  if (how.kv_heads % how.ranks != 0) return;
  const int heads = 3 * how.kv_heads;
  EXPECT_EQ(stats.prefix_switch_bytes,
            static_cast<uint64_t>((how.ranks - 1) * tokens / how.ranks * heads * 32 * 2 * 4));
}

class RingsOfSeveralGroups : public GpuPrompts {};

// The second one begins in a segment of 64 tokens, the beginning of which rank 0's shard gets from attention workers.
TEST_P(RingsOfSeveralGroups, BeginWhereTheGroupBeforeEnded) {
  Measured("two groups", ErrorOf(Tokens(560, 7), 560));
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  EXPECT_GE(stats.prefill_groups, 2u);
  EXPECT_GT(stats.prefix_ring_bytes, 0u);
  EXPECT_GT(stats.prefix_gathered_bytes, 0u);
}

class SwitchesOfSeveralGroups : public GpuPrompts {};

// What lies before a group attention workers attend to; gpu_switch_nodes_test has groups that begin inside of a
// segment.
TEST_P(SwitchesOfSeveralGroups, BeginWhereTheGroupBeforeEnded) {
  Measured("several groups", ErrorOf(Tokens(560, 7), 560));
  const scheduler::SchedulerStats stats = cluster_->stats().scheduler;
  EXPECT_GE(stats.prefill_groups, 2u);
  EXPECT_GT(stats.prefix_switch_bytes, 0u);
  EXPECT_GT(stats.prefix_asked_bytes, 0u);
}

class OnOneGpu : public GpuPrompts {};

// A step that is too large to be recorded says how long its layers and attention took, and so does one whose prompts an
// attention worker on a CPU attends: the next prompt is predicted.
TEST_P(OnOneGpu, PromptsTeachTheSchedulerRates) {
  ASSERT_TRUE(Generate(*cluster_, GreedyRequest(Tokens(400, 1), 1)).ok());
  ASSERT_TRUE(Generate(*cluster_, GreedyRequest(Tokens(400, 2), 1)).ok());
  ASSERT_TRUE(Generate(*cluster_, GreedyRequest(Tokens(3, 3), 1)).ok());  // the step before has been counted
  EXPECT_GT(cluster_->stats().scheduler.last_prefill.predicted_s, 0);
  EXPECT_FALSE(AttendedHere());
}

class GpuAndHost : public GpuPrompts {
 protected:
  void ExpectChoicesOfACpu(const std::vector<TokenId>& prompt, const std::vector<TokenId>& tokens) {
    ExpectChoicesOf(*reference_, prompt, tokens);
  }
};

// Steps of sequences on the GPU stay there. Steps of the others cross to the host. Sequences that outgrow the GPU move.
TEST_P(GpuAndHost, SequencesInBothMemoriesSayWhatACpuSays) {
  std::vector<std::shared_ptr<cli::CollectingSink>> decodes;
  for (int i = 0; i < 6; ++i) decodes.push_back(Submit(*cluster_, GreedyRequest(Tokens(100 + 9 * i, 5 + i), 90)));
  for (const auto& sink : decodes) sink->WaitForTokens(1);
  Measured("in the host's memory, with others", ErrorOf(Tokens(333, 9), 333));
  EXPECT_TRUE(AttendedHere()) << "the host's prompts are attended on the GPU";
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(decodes[i]->WaitForEnd().ok());
    EXPECT_EQ(decodes[i]->protocol_errors(), 0);
    ExpectChoicesOfACpu(Tokens(100 + 9 * i, 5 + i), decodes[i]->choices()[0].tokens);
  }
  EXPECT_GT(cluster_->stats().scheduler.moves, 0u);
  cluster_->TakeStepSamples();
  Measured("on the GPU", ErrorOf(Tokens(200, 11), 200));
  EXPECT_FALSE(AttendedHere()) << "its prompts are attended where they lie";
}

// The host's steps follow each other without a pause. The compute worker takes the tokens that the GPU draws meanwhile.
TEST_P(GpuAndHost, StreamsOnTheGpuDoNotWaitForTheEndOfTheHosts) {
  const int fits = GetParam().gpu_tokens;
  const auto on_gpu = Submit(*cluster_, GreedyRequest(Tokens(fits - 100, 1), 90));
  on_gpu->WaitForTokens(1);
  const auto on_host = Submit(*cluster_, GreedyRequest(Tokens(70, 2), 300));
  on_host->WaitForTokens(1);
  absl::Time gpu_ended, host_ended;
  std::thread waits([&] {
    EXPECT_TRUE(on_host->WaitForEnd().ok());
    host_ended = absl::Now();
  });
  EXPECT_TRUE(on_gpu->WaitForEnd().ok());
  gpu_ended = absl::Now();
  waits.join();
  EXPECT_LT(gpu_ended, host_ended);
  ExpectChoicesOfACpu(Tokens(70, 2), on_host->choices()[0].tokens);
  ExpectChoicesOfACpu(Tokens(fits - 100, 1), on_gpu->choices()[0].tokens);
}

INSTANTIATE_TEST_SUITE_P(
    , GpuAndHost,
    testing::Values(Case{.name = "Tiers", .placement = scheduler::PlacementPolicy::kTiers, .gpu_tokens = 512},
                    Case{.name = "TiersWithTheScratchOfAStep",
                         .placement = scheduler::PlacementPolicy::kTiers,
                         .scratch = Scratch::kStep,
                         .micro_batches = 2,
                         .gpu_tokens = 384}),
    [](const auto& info) { return std::string(info.param.name); });

// What a rank waits for rows of other ranks is no work of its own: cuts follow what a token costs it.
TEST(PromptStepTimes, CountWhatARankWaitsForRowsAsWaiting) {
  auto gpu = OpenGpu();
  if (!gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.status().message();
  const auto stream = (*gpu)->CreateCudaStream();
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto times = compute::PromptStepTimes::Create(**gpu, 2);
  ASSERT_TRUE(times.ok()) << times.status();
  ASSERT_TRUE((*times)->Begin(**stream).ok());
  for (int op = 0; op < 2; ++op) {
    ASSERT_TRUE((*times)->Leaves(op, **stream).ok());
    ASSERT_TRUE((*stream)->SynchronizeStatus().ok());
    absl::SleepFor(absl::Milliseconds(30));  // for rows
    ASSERT_TRUE((*times)->Attends(op, **stream).ok());
    ASSERT_TRUE((*times)->Attended(op, **stream).ok());
    ASSERT_TRUE((*stream)->SynchronizeStatus().ok());
    absl::SleepFor(absl::Milliseconds(10));  // for answers
    ASSERT_TRUE((*times)->GoesOn(op, **stream).ok());
  }
  ASSERT_TRUE((*times)->End(**stream).ok());
  ASSERT_TRUE((*times)->Await().ok());
  const auto sum = (*times)->Sum();
  ASSERT_TRUE(sum.has_value());
  EXPECT_GE(sum->waited, absl::Milliseconds(80));
}

using scheduler::PlacementPolicy;
constexpr auto kGather = proto::PrefixExchange::kGather;
constexpr auto kAsk = proto::PrefixExchange::kAsk;

INSTANTIATE_TEST_SUITE_P(
    All, GpuPrompts,
    ::testing::Values(
        Case{"KvOnACpu"},
        Case{"KvOnACpuGathered", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kGather},
        Case{"KvOnACpuInPieces", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kGather, 64, 1, 70, 1,
             4000},
        Case{"KvOnCpusInPieces", "llama", true, 3, PlacementPolicy::kHeads, Scratch::kAmple, kGather, 50, 2, 70, 1,
             900},
        Case{"WindowsInPieces", "gemma3", true, 2, PlacementPolicy::kTokens, Scratch::kAmple, kGather, 64, 2, 70, 1,
             1000},
        Case{"KvOnTheGpuInPieces", "llama", false, 2, PlacementPolicy::kTokens, Scratch::kAmple, kGather, 64, 2, 70, 1,
             4000},
        Case{"KvOnACpuAsked", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kStep, kAsk},
        Case{"WindowsKvOnCpus", "gemma3", true, 2, PlacementPolicy::kRequest, Scratch::kAmple, kGather, 64, 2},
        Case{"WindowsAsked", "gemma3", true, 2, PlacementPolicy::kTokens, Scratch::kStep, kAsk, 64, 2},
        Case{"NarrowWindowsAsked", "gemma3", true, 1, PlacementPolicy::kRequest, Scratch::kStep, kAsk, 64, 1, 16},
        Case{"NarrowWindowsOnTheGpuAsked", "gemma3", false, 2, PlacementPolicy::kRequest, Scratch::kStep, kAsk, 64, 1,
             16},
        Case{"DividedKvOnCpus", "llama", true, 3, PlacementPolicy::kHeads, Scratch::kAmple, kGather, 50, 2},
        Case{"DividedKvOnCpusAsked", "llama", true, 3, PlacementPolicy::kTokens, Scratch::kStep, kAsk, 64, 2},
        Case{"KvOnTheGpuThroughHosts", "llama", false, 2, PlacementPolicy::kTokens, Scratch::kAmple, kGather, 64, 2},
        Case{"KvOnTheGpuAsked", "llama", false, 2, PlacementPolicy::kHeads, Scratch::kStep, kAsk, 64, 2},
        Case{"NoScratch", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kNone}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(All, OnOneGpu,
                         ::testing::Values(Case{"KvThere", "llama", false, 1, PlacementPolicy::kRequest, Scratch::kNone,
                                                kAsk, 512},
                                           Case{"KvOnACpuAttendedThere", "llama", true, 1, PlacementPolicy::kRequest,
                                                Scratch::kNone, kAsk, 512},
                                           Case{"KvOnACpuStoredByKernels", "llama", true, 1, PlacementPolicy::kRequest,
                                                Scratch::kNone, kAsk, 64}),
                         [](const auto& info) { return std::string(info.param.name); });

constexpr auto kDirect = proto::PrefixExchange::kGatherDirect;
constexpr auto kRing = proto::PrefixExchange::kRing;
constexpr auto kSwitch = proto::PrefixExchange::kSwitch;
constexpr int kPiece = 2 << 20;

INSTANTIATE_TEST_SUITE_P(
    All, GpuRanks,
    ::testing::Values(
        Case{"TwoAsk", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kAsk, 64, 1, 0, 2},
        Case{"TwoGather", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kGather, 64, 1, 0, 2},
        Case{"TwoGatherInPieces", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kGather, 64, 1, 0, 2,
             2000},
        Case{"TwoDirectlyAndInPieces", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple, kDirect, 64, 2, 0, 2,
             2000},
        Case{"TwoGatherDirectly", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kDirect, 64, 1, 0, 2},
        Case{"ThreeGatherDirectly", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple, kDirect, 64, 2, 0, 3},
        Case{"ThreeWithWindows", "gemma3", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kDirect, 64, 1, 70, 3},
        Case{"TwoWithNarrowWindows", "gemma3", true, 2, PlacementPolicy::kTokens, Scratch::kAmple, kDirect, 64, 1, 16,
             2},
        Case{"TwoWithRoomForAStep", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kStep, kDirect, 64, 1, 0, 2},
        Case{"TwoKvOnTheGpu", "llama", false, 1, PlacementPolicy::kRequest, Scratch::kAmple, kDirect, 64, 1, 0, 2},
        Case{"TwoInARing", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kRing, 64, 1, 0, 2},
        Case{"ThreeInARing", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple, kRing, 64, 2, 0, 3},
        Case{"FourInARing", "llama", true, 2, PlacementPolicy::kTokens, Scratch::kAmple, kRing, 64, 2, 0, 4},
        Case{"ThreeInARingWithWindows", "gemma3", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kRing, 64, 1, 70,
             3},
        Case{"FourInARingWithNarrowWindows", "gemma3", true, 2, PlacementPolicy::kTokens, Scratch::kAmple, kRing, 64, 1,
             16, 4},
        Case{"ThreeInARingWithRoomForAStep", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kStep, kRing, 64, 1,
             0, 3},
        Case{"TwoSwitch", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kSwitch, 64, 1, 0, 2},
        Case{"ThreeSwitch", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple, kSwitch, 64, 2, 0, 3, kPiece,
             4},
        Case{"FourSwitch", "llama", true, 2, PlacementPolicy::kTokens, Scratch::kAmple, kSwitch, 64, 2, 0, 4, kPiece,
             4},
        Case{"ThreeSwitchWithWindows", "gemma3", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kSwitch, 64, 1,
             70, 3, kPiece, 3},
        Case{"FourSwitchWithNarrowWindows", "gemma3", true, 3, PlacementPolicy::kHeads, Scratch::kAmple, kSwitch, 64, 1,
             16, 4, kPiece, 5},
        Case{"ThreeSwitchWithRoomForAStep", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kStep, kSwitch, 64, 1,
             0, 3, kPiece, 3},
        Case{"TwoSwitchKvOnTheGpu", "llama", false, 1, PlacementPolicy::kRequest, Scratch::kAmple, kSwitch, 64, 1, 0,
             2},
        Case{"TwoInARingKvOnTheGpu", "llama", false, 1, PlacementPolicy::kRequest, Scratch::kAmple, kRing, 64, 1, 0,
             2}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    All, GpuRings,
    ::testing::Values(Case{"OfTwo", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kRing, 128, 1, 0, 2},
                      Case{"OfThreeWithRoomForAStep", "llama", true, 1, PlacementPolicy::kHeads, Scratch::kStep, kRing,
                           128, 1, 0, 3},
                      Case{"OfFour", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple, kRing, 128, 1, 0, 4},
                      // What rank 0 computes is handed on in part.
                      Case{"OfThreeWithWindows", "gemma3", true, 1, PlacementPolicy::kRequest, Scratch::kAmple, kRing,
                           192, 1, 250, 3}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(All, GpuSwitches,
                         ::testing::Values(Case{"OfTwo", "llama", true, 1, PlacementPolicy::kRequest, Scratch::kAmple,
                                                kSwitch, 128, 1, 0, 2},
                                           Case{"OfThree", "llama", true, 1, PlacementPolicy::kHeads, Scratch::kStep,
                                                kSwitch, 128, 1, 0, 3, kPiece, 3},
                                           Case{"OfThreeThatDoNotDivideTheHeads", "llama", true, 2,
                                                PlacementPolicy::kHeads, Scratch::kAmple, kSwitch, 128, 1, 0, 3, kPiece,
                                                5},
                                           Case{"OfFourWithWindows", "gemma3", true, 1, PlacementPolicy::kRequest,
                                                Scratch::kAmple, kSwitch, 128, 1, 150, 4, kPiece, 4}),
                         [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(All, RingsOfSeveralGroups,
                         ::testing::Values(Case{"OfTwo", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple,
                                                kRing, 100, 2, 0, 2},
                                           Case{"OfThree", "gemma3", true, 1, PlacementPolicy::kRequest,
                                                Scratch::kAmple, kRing, 100, 1, 70, 3}),
                         [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(All, SwitchesOfSeveralGroups,
                         ::testing::Values(Case{"OfTwo", "llama", true, 2, PlacementPolicy::kHeads, Scratch::kAmple,
                                                kSwitch, 100, 2, 0, 2},
                                           Case{"OfThree", "llama", true, 3, PlacementPolicy::kHeads, Scratch::kAmple,
                                                kSwitch, 100, 1, 0, 3, kPiece, 4},
                                           Case{"OfThreeWithWindows", "gemma3", true, 1, PlacementPolicy::kRequest,
                                                Scratch::kAmple, kSwitch, 100, 1, 70, 3, kPiece, 4}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
