#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/cuda/cuda_model.h"
#include "model/checkpoint.h"
#include "proto/state_blocks.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// Linear layers of prompts on a compute worker's GPU: states cross, and no tokens. The logits are those of the same
// model with these layers on attention workers (--linear-prompts attention), and those of a CPU, within a budget. Runs
// on a GPU, and on the emulated one (emulated_gpu).

namespace dovetail::test {
namespace {

using kernels::cuda::CudaDevice;
using scheduler::PlacementPolicy;

// Both ways have activations in bf16; the states of one are on a CPU in f32, those of the other on tensor cores. The
// largest error that was measured is 9.5e-3, and 1.7e-2 against a CPU, whose activations are f32 between products.
constexpr double kBudget = 1.5e-2, kBudgetOfCpu = 3.5e-2;
// Where attention workers are on the GPU, too, the same state kernels run. What remains are dense products: each
// cluster times cuBLASLt's algorithms for itself. At most 8.4e-4 was measured, and 1.2e-6 on the emulated GPU.
constexpr double kBudgetOnOneGpu = 2e-3;

std::string KdaConfig() {
  return R"({"model_type": "kimi_linear", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "model_max_length": 1024,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": true,
    "first_k_dense_replace": 3, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
    "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "head_dim": 16, "num_heads": 4,
                           "short_conv_kernel_size": 4}})";
}

// One expert, so that no row goes to another one for a rounding.
std::string LightningConfig() {
  std::string config = TinyLightningConfig();
  for (const auto& [from, to] :
       {std::pair<std::string, std::string>("\"num_local_experts\": 4", "\"num_local_experts\": 1"),
        std::pair<std::string, std::string>("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 1")})
    config.replace(config.find(from), from.size(), to);
  return config;
}

struct Case {
  const char* name;
  std::string (*config)();
  bool attention_on_cpu = true;
  int attention_workers = 1;
  PlacementPolicy placement = PlacementPolicy::kRequest;
  int step_tokens = 64;
  int micro_batches = 1;
  int ranks = 1;       // that divide each prompt
  bool chain = false;  // and hand on states to each other; else by way of the attention workers
  bool ring = false;   // and K and V of softmax layers, which else are asked for
  bool heads = false;  // or they exchange tokens for heads in those; on a CPU in linear layers, too

  friend std::ostream& operator<<(std::ostream& out, const Case& how) { return out << how.name; }
};

std::vector<TokenId> Tokens(int count, int seed) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(1 + (17 * i * i + (31 + seed) * i) % 90));
  return tokens;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenGpu() {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = 0, .host_threads = 2});
}

// A GPU with the model's weights. The workers of one cluster share its stream (CudaDevice::WorkerStream), so a cluster
// needs one of its own, and so does each rank.
struct GpuWithWeights {
  std::unique_ptr<CudaDevice> gpu;
  std::unique_ptr<compute::CudaModel> weights;
};

class GpuLinearPrompts : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const auto gpu = OpenGpu(); !gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.status().message();
    const auto path = WriteTinyFolder(GetParam().config(), 5, TempFolder());
    auto cpu = TestModel::Load(path, model::WeightFormat::kBF16);
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    cpu_ = *std::move(cpu);
    auto checkpoint = model::OpenCheckpoint(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto loaded = model::LoadModel(*std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    model_ = *std::move(loaded);
    for (int i = 0; i < 2 * GetParam().ranks; ++i) LoadOnGpu();
    ASSERT_FALSE(HasFatalFailure());
    auto table = compute::AttentionTableOf(model_->config(), DType::kBF16);
    ASSERT_TRUE(table.ok()) << table.status();
    table_ = *std::move(table);
    reference_ = Start(*cpu_->model, *cpu_->device, Options(/*first_gpu=*/std::nullopt, /*compute=*/true));
    compute_ = Start(*model_, *gpus_[0].gpu, Options(0, /*compute=*/true));
    attention_ = Start(*model_, *gpus_[GetParam().ranks].gpu, Options(GetParam().ranks, /*compute=*/false));
  }

  void LoadOnGpu() {
    auto gpu = OpenGpu();
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    auto weights = compute::CudaModel::Load(**gpu, *model_, DType::kBF16, false, compute::GpuWeights::kDequantise, {});
    ASSERT_TRUE(weights.ok()) << weights.status();
    gpus_.push_back({*std::move(gpu), *std::move(weights)});
  }

  static std::unique_ptr<engine::EmbeddedCluster> Start(const model::LoadedModel& model, kernels::Device& device,
                                                        const engine::EmbeddedClusterOptions& options) {
    auto cluster = engine::EmbeddedCluster::Create(model, device, options);
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    return cluster.ok() ? *std::move(cluster) : nullptr;
  }

  // Of a cluster whose ranks have gpus_ from `first_gpu` on, or of one on the CPU.
  engine::EmbeddedClusterOptions Options(std::optional<int> first_gpu, bool compute) {
    const Case& how = GetParam();
    engine::EmbeddedClusterOptions options;
    options.kv_dtype = DType::kBF16;
    options.kv_cache_bytes = 64 << 20;
    options.poison_freed_kv = true;
    options.attention_workers = how.attention_workers;
    if (first_gpu && how.attention_on_cpu) options.attention_device = cpu_->device.get();
    if (first_gpu) options.compute.dense = gpus_[*first_gpu].weights.get();
    options.compute.prompt_scratch_bytes = 64 << 20;
    options.compute.linear_prompts = compute;
    options.scheduler.max_model_len = 1024;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = how.step_tokens;
    options.scheduler.micro_batches = how.micro_batches;
    options.scheduler.placement = how.placement;
    options.scheduler.prefill_exchange = proto::PrefixExchange::kAsk;
    options.scheduler.prefill_ranks = options.compute_workers = how.ranks;
    if (how.ranks > 1) options.scheduler.prefill_rank_tokens = 64;
    if (compute && how.ring) options.scheduler.prefill_exchange = proto::PrefixExchange::kRing;
    if (compute && how.chain) options.scheduler.linear_exchange = proto::LinearExchange::kChain;
    if (compute && how.heads) {
      options.scheduler.prefill_exchange = proto::PrefixExchange::kSwitch;
      options.scheduler.linear_exchange = proto::LinearExchange::kSwitch;  // a chain on GPUs
    }
    for (int rank = 1; first_gpu && rank < how.ranks; ++rank) {
      const GpuWithWeights& other = gpus_[*first_gpu + rank];
      options.more_compute_devices.push_back({other.gpu.get(), other.weights.get()});
    }
    return options;
  }

  std::vector<float> LogitsOf(engine::EmbeddedCluster& cluster, const std::vector<TokenId>& prompt, int rows) {
    requests::GenerationRequest request = GreedyRequest(prompt, 1);
    request.logits_last = rows;
    const auto done = Generate(cluster, request);
    EXPECT_TRUE(done.ok()) << done.status();
    if (!done.ok()) return {};
    EXPECT_EQ((*done)->protocol_errors(), 0);
    return (*done)->prompt_logits();
  }
  // Of the last `rows` tokens of a prompt. `same_cuts`: both ways cut it into the same parts.
  void Compare(const char* what, const std::vector<TokenId>& prompt, int rows, bool same_cuts = true) {
    const std::vector<float> ours = LogitsOf(*compute_, prompt, rows);
    const double error = RelativeRms(ours, LogitsOf(*attention_, prompt, rows));
    const double of_cpu = RelativeRms(ours, LogitsOf(*reference_, prompt, rows));
    std::printf("measured %s %s %.3g, %.3g of a CPU\n", GetParam().name, what, error, of_cpu);
    EXPECT_LE(error, GetParam().attention_on_cpu || !same_cuts ? kBudget : kBudgetOnOneGpu) << what;
    EXPECT_LE(of_cpu, kBudgetOfCpu) << what;
  }
  // Of all steps so far: those of a later request, which has too few tokens to leave a state, are counted after them.
  static uint64_t StateBytes(engine::EmbeddedCluster& cluster) {
    EXPECT_TRUE(Generate(cluster, GreedyRequest(Tokens(3, 0), 1)).ok());
    return cluster.stats().scheduler.prefix_state_bytes;
  }
  // What a part of a prompt leaves, by the formula of the wire.
  uint64_t BytesLeft(Position ctx_len, Position end) const {
    int64_t bytes = 0;
    for (const LayerGroup group : table_.op_group)
      if (const proto::LinearSpec* const spec = table_.linear(group))
        bytes += spec->heads * proto::BytesOf(proto::StatesLeft(ctx_len, end), table_.softmax(group));
    return static_cast<uint64_t>(bytes);
  }

  std::unique_ptr<TestModel> cpu_;
  std::unique_ptr<model::LoadedModel> model_;
  std::vector<GpuWithWeights> gpus_;  // those of compute_, then those of attention_
  proto::AttentionTable table_;
  std::unique_ptr<engine::EmbeddedCluster> reference_, compute_, attention_;
};

TEST_P(GpuLinearPrompts, OfManyPartsHaveTheLogitsOfBothOtherWays) {
  Compare("one part", Tokens(45, 1), 45);
  Compare("five parts", Tokens(300, 2), 300);
  Compare("a part that ends a block", Tokens(128, 3), 128);
  Compare("too few tokens to run here", Tokens(12, 8), 12);
  // Ranks are cut by rates that each cluster measures, and a cut says which blocks are open.
  if (GetParam().ranks == 1) {
    EXPECT_EQ(StateBytes(*compute_), StateBytes(*reference_)) << "the same states cross as from a CPU";
  } else {
    EXPECT_GT(StateBytes(*compute_), 0u);
  }
  EXPECT_EQ(StateBytes(*attention_), 0u);
  EXPECT_EQ(compute_->stats().scheduler.prefix_chain_bytes > 0, GetParam().chain);
  EXPECT_EQ(compute_->stats().scheduler.prefix_ring_bytes > 0, GetParam().ring);
  EXPECT_EQ(compute_->stats().scheduler.prefix_switch_bytes > 0, GetParam().heads);
}

TEST_P(GpuLinearPrompts, LeaveStatesWhoseBytesDoNotDependOnTheLength) {
  const Position step = GetParam().step_tokens;
  ASSERT_TRUE(Generate(*compute_, GreedyRequest(Tokens(40, 1), 1)).ok());
  const uint64_t first = StateBytes(*compute_);
  EXPECT_EQ(first, BytesLeft(0, 40));
  EXPECT_EQ(BytesLeft(512, 512 + 64 * 4), BytesLeft(512, 512 + 64 * 7));
  if (GetParam().ranks > 1) return;  // each rank asks for the state of the one before, or has it from there
  ASSERT_TRUE(Generate(*compute_, GreedyRequest(Tokens(3 * static_cast<int>(step), 2), 1)).ok());
  EXPECT_EQ(StateBytes(*compute_) - first,
            BytesLeft(0, step) + BytesLeft(step, 2 * step) + BytesLeft(2 * step, 3 * step))
      << "later parts ask for nothing: the state is in a slot";
}

// The state before the step comes from the attention worker, in mid-sequence.
TEST_P(GpuLinearPrompts, AfterACachedPrefixHaveTheLogitsOfBothOtherWays) {
  std::vector<TokenId> prompt = Tokens(200, 3);
  for (auto* const cluster : {compute_.get(), attention_.get(), reference_.get()})
    ASSERT_TRUE(Generate(*cluster, GreedyRequest(prompt, 1)).ok());
  const std::vector<TokenId> more = Tokens(150, 4);
  prompt.insert(prompt.end(), more.begin(), more.end());
  Compare("after a prefix", prompt, 150);
  EXPECT_GE(compute_->stats().scheduler.prefix_hits, 128u);
  // One that parts from another in its middle begins at a snapshot.
  std::vector<TokenId> parted(prompt.begin(), prompt.begin() + 150);
  parted.insert(parted.end(), more.begin(), more.begin() + 33);
  const uint64_t hits = compute_->stats().scheduler.prefix_hits;
  Compare("parted from another", parted, 33);
  EXPECT_GE(compute_->stats().scheduler.prefix_hits, hits + 128u);
  if (GetParam().ranks == 1) {
    EXPECT_EQ(StateBytes(*compute_), StateBytes(*reference_));
  }
}

// Steps then have rows whose states are here, and rows of sequences that attention workers advance.
TEST_P(GpuLinearPrompts, BesideDecodesHaveTheLogitsOfBothOtherWays) {
  std::vector<std::shared_ptr<cli::CollectingSink>> decodes;
  for (int i = 0; i < 3; ++i) decodes.push_back(Submit(*compute_, GreedyRequest(Tokens(20 + i, 5 + i), 90)));
  for (const auto& sink : decodes) sink->WaitForTokens(1);
  Compare("with decodes", Tokens(333, 9), 333, /*same_cuts=*/false);
  Compare("a short one with decodes", Tokens(17, 10), 17, /*same_cuts=*/false);
  for (size_t i = 0; i < decodes.size(); ++i) {
    ASSERT_TRUE(decodes[i]->WaitForEnd().ok());
    EXPECT_EQ(decodes[i]->choices()[0].tokens.size(), 90u);
    EXPECT_EQ(decodes[i]->protocol_errors(), 0);
  }
}

// Decodes go on from the states that crossed: no token is far from what the other way says.
TEST_P(GpuLinearPrompts, LeaveStatesThatDecodesGoOnFrom) {
  for (const int length : {63, 64, 65, 150}) {
    const auto ours = Generate(*compute_, GreedyRequest(Tokens(length, 11), 20));
    ASSERT_TRUE(ours.ok()) << ours.status();
    std::vector<TokenId> all = Tokens(length, 11);
    const std::vector<TokenId>& tokens = (*ours)->choices()[0].tokens;
    all.insert(all.end(), tokens.begin(), tokens.end() - 1);
    const std::vector<float> logits = LogitsOf(*attention_, all, static_cast<int>(tokens.size()));
    const size_t vocabulary = model_->config().vocab_size;
    ASSERT_EQ(logits.size(), tokens.size() * vocabulary);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const float* const row = logits.data() + i * vocabulary;
      const float best = *std::max_element(row, row + vocabulary);
      double squares = 0;
      for (size_t t = 0; t < vocabulary; ++t) squares += row[t] * row[t];
      EXPECT_GE(row[tokens[i]], best - 4 * kBudget * std::sqrt(squares / vocabulary)) << length << ", token " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuLinearPrompts,
    ::testing::Values(Case{"GatedDelta", TinyGatedDeltaConfig},  //
                      Case{"Kda", KdaConfig},                    //
                      Case{"Lightning", LightningConfig},        //
                      Case{"Mamba2", TinyMamba2Config},
                      Case{"GatedDeltaInOddParts", TinyGatedDeltaConfig, true, 1, PlacementPolicy::kRequest, 50},
                      Case{"KdaDivided", KdaConfig, true, 2, PlacementPolicy::kHeads, 50, 2},
                      Case{"LightningDivided", LightningConfig, true, 2, PlacementPolicy::kHeads, 64, 2},
                      Case{"GatedDeltaOnTheGpu", TinyGatedDeltaConfig, false, 2, PlacementPolicy::kHeads, 64, 2},
                      Case{"Mamba2OnTheGpu", TinyMamba2Config, false, 2, PlacementPolicy::kRequest, 50},
                      Case{"GatedDeltaOfTwoRanks", TinyGatedDeltaConfig, true, 1, PlacementPolicy::kRequest, 64, 1, 2},
                      Case{"KdaHandedOn", KdaConfig, true, 2, PlacementPolicy::kHeads, 64, 1, 2, true},
                      Case{"GatedDeltaInARing", TinyGatedDeltaConfig, true, 1, PlacementPolicy::kRequest, 64, 1, 3,
                           true, true},
                      Case{"GatedDeltaWithHeads", TinyGatedDeltaConfig, true, 1, PlacementPolicy::kRequest, 64, 1, 2,
                           true, false, true},
                      Case{"KdaWithHeads", KdaConfig, true, 2, PlacementPolicy::kHeads, 64, 1, 2, true, false, true},
                      Case{"Mamba2HandedOn", TinyMamba2Config, true, 1, PlacementPolicy::kRequest, 64, 1, 2, true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
