#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>

#include "compute_worker/attention_specs.h"
#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/prompt_scratch_size.h"
#include "model/checkpoint.h"
#include "tests/cluster/test_engine.h"
#include "tests/golden/converted_gguf.h"
#include "tests/golden/golden.h"
#include "tests/golden/smollm2.h"
#include "tests/support/test_data.h"

// Models on a GPU: dense layers, experts, attention, linear states and sampling there, in bf16, against float32 passes
// of transformers and against the CPU. Skipped by name where there is no GPU; ./check counts those skips.

namespace dovetail::test {
namespace {

namespace fs = std::filesystem;
using kernels::cuda::CudaDevice;

// How a step's tensors cross: all in device memory, each step planned when the one before is known or (kAhead) before
// that; or through pinned host memory to workers that hold sequences whole, by heads and by tokens in turn. Prompts are
// then attended by the compute worker, and (kJoined) all that is earlier than a step by the others.
enum class Seam { kDevice, kAhead, kHost, kJoined };

const char* Name(Seam seam) {
  switch (seam) {
    case Seam::kDevice: return "device";
    case Seam::kAhead: return "ahead";
    case Seam::kHost: return "host";
    case Seam::kJoined: return "joined";
  }
  return "";
}

// A model served on a GPU. Members are destroyed in reverse order.
struct OnGpu {
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<model::LoadedModel> model;
  std::unique_ptr<compute::CudaModel> on_gpu;
  std::unique_ptr<engine::EmbeddedCluster> cluster;

  Matrix LogitsFrom(const std::vector<TokenId>& tokens, size_t first) {
    requests::GenerationRequest request = GreedyRequest(tokens, 1);
    request.logits_last = static_cast<int>(tokens.size() - first);
    Matrix logits{request.logits_last, model->config().vocab_size, {}};
    const auto done = Generate(*cluster, std::move(request));
    EXPECT_TRUE(done.ok()) << done.status();
    if (done.ok()) logits.values = (*done)->prompt_logits();
    return logits;
  }
};

absl::StatusOr<std::unique_ptr<CudaDevice>> OpenGpu() {
  DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open());
  return CudaDevice::Create(std::move(library), {.index = 0, .host_threads = 4});
}

absl::StatusOr<OnGpu> Serve(const fs::path& path, Seam seam, DType type = DType::kBF16, int max_model_len = 0,
                            attention::KvStorage storage = attention::KvStorage::kAsSent,
                            compute::GpuWeights weights = compute::GpuWeights::kDequantise) {
  OnGpu run;
  DT_ASSIGN_OR_RETURN(run.device, OpenGpu());
  DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenCheckpoint(path));
  DT_ASSIGN_OR_RETURN(run.model, model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
  DT_ASSIGN_OR_RETURN(run.on_gpu, compute::CudaModel::Load(*run.device, *run.model, type, false, weights, {}));
  engine::EmbeddedClusterOptions options;
  options.kv_dtype = type;
  options.kv_storage = storage;
  options.kv_room = [] { return uint64_t{1} << 30; };
  options.poison_freed_kv = true;  // reading memory that no sequence holds gives NaN
  options.compute.dense = run.on_gpu.get();
  options.compute.prompt_scratch_bytes = 16 << 20;
  options.scheduler.max_model_len =
      max_model_len > 0 ? max_model_len : static_cast<int>(run.model->config().max_positions);
  options.scheduler.max_num_seqs = 8;
  options.scheduler.max_num_batched_tokens = max_model_len > 0 ? 512 : 48;
  options.scheduler.micro_batches = seam == Seam::kAhead ? 1 : 2;
  if (seam == Seam::kHost || seam == Seam::kJoined) {
    options.attention_workers = 3;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
  }
  if (seam == Seam::kJoined) {
    constexpr int kStep = 64;  // so that each begins on a segment
    options.scheduler.max_num_batched_tokens = kStep;
    DT_ASSIGN_OR_RETURN(const auto table, compute::AttentionTableOf(run.model->config(), type));
    options.compute.prompt_scratch_bytes = compute::PromptScratchBytesOfAStep(table, kStep);
  }
  DT_ASSIGN_OR_RETURN(run.cluster, engine::EmbeddedCluster::Create(*run.model, *run.device, options));
  return run;
}

#define SKIP_WITHOUT_GPU()                                                                                \
  do {                                                                                                    \
    if (const auto gpu = OpenGpu(); !gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.status().message(); \
  } while (false)

class CudaGolden : public ::testing::TestWithParam<std::tuple<CudaBudget, Seam>> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    const fs::path folder = GoldenFolder(std::string(budget_.group), budget_.model);
    if (folder.empty()) GTEST_SKIP() << "missing test data: goldens/" << budget_.group;
    golden_ = ReadGolden(folder);
    auto run = Serve(golden_.folder, std::get<1>(GetParam()), budget_.type);
    ASSERT_TRUE(run.ok()) << run.status();
    run_ = *std::move(run);
  }

  bool IsDynamic() const {
    const auto& ropes = run_.model->config().ropes;
    return !ropes.empty() && ropes[0].kind == model::RopeKind::kDynamic;
  }
  // Of the rows that went to the reference's experts; how many need not have is in the budget, and which did not is
  // added to `elsewhere`.
  double ErrorOfRows(const Matrix& ours, const Matrix& reference, std::set<int>* elsewhere = nullptr) const {
    EXPECT_EQ(ours.values.size(), reference.values.size());
    std::vector<std::pair<double, int>> rows;
    for (int row = 0; row < reference.rows; ++row)
      rows.emplace_back(RelativeRms(ours.row(row), reference.row(row)), row);
    std::sort(rows.begin(), rows.end());
    std::vector<float> kept, wanted;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + budget_.other_experts >= rows.size() && rows[i].first > budget_.logits) {
        std::printf("measured %s row %d elsewhere %.3g\n", budget_.model, rows[i].second, rows[i].first);
        EXPECT_LE(rows[i].first, kRowOfOtherExperts);
        if (elsewhere != nullptr) elsewhere->insert(rows[i].second);
        continue;
      }
      const auto append = [&](std::vector<float>& to, std::span<const float> row) {
        to.insert(to.end(), row.begin(), row.end());
      };
      append(kept, ours.row(rows[i].second));
      append(wanted, reference.row(rows[i].second));
    }
    return RelativeRms(kept, wanted);
  }
  void Measured(const char* what, double error) {
    RecordProperty(what, absl::StrCat(error));
    std::printf("measured %s %s %.3g\n", budget_.model, what, error);
  }

  const CudaBudget budget_ = std::get<0>(GetParam());
  Golden golden_;
  OnGpu run_;
};

TEST_P(CudaGolden, TheLogitsOfALongAndOfAShortPromptAreTheReferences) {
  // Frequencies of dynamic NTK depend on the longest sequence that the reference had run before.
  const size_t length = golden_.prompt.size() + (IsDynamic() ? golden_.greedy.size() - 1 : 0);
  Matrix last = run_.LogitsFrom(golden_.Tokens(length), golden_.prompt.size() - 4);
  last.values.resize(std::min<size_t>(last.values.size(), 4 * last.cols));
  const double last4 = ErrorOfRows(last, golden_.tensors["logits_last4"]);
  const Matrix short_logits = run_.LogitsFrom(golden_.Tokens(golden_.short_len), golden_.short_len - 4);
  const double short4 = ErrorOfRows(short_logits, golden_.tensors["short_logits_last4"]);
  Measured("logits", std::max(last4, short4));
  EXPECT_LE(last4, budget_.logits);
  EXPECT_LE(short4, budget_.logits);
}

TEST_P(CudaGolden, EveryCertainTokenIsChosenWhenTheReferencesTokensAreGiven) {
  if (IsDynamic()) GTEST_SKIP() << "each step has frequencies of its own: the test above has one of them";
  const Matrix& reference = golden_.tensors["step_logits"];
  const size_t prompt = golden_.prompt.size(), steps = golden_.greedy.size();
  const Matrix ours = run_.LogitsFrom(golden_.Tokens(prompt + steps - 1), prompt - 1);
  std::set<int> elsewhere;
  const double error = ErrorOfRows(ours, reference, &elsewhere);
  Measured("steps", error);
  for (size_t step = 0; step < steps; ++step) {
    const double off = RelativeRms(ours.row(step), reference.row(step));
    if (off > budget_.logits) std::printf("measured %s step %zu off by %.3g\n", budget_.model, step, off);
  }
  ASSERT_LE(error, budget_.logits);
  int certain = 0;
  for (size_t step = 0; step < steps; ++step) {
    if (!IsCertain(reference.row(step), budget_.logits) || elsewhere.contains(static_cast<int>(step))) continue;
    ++certain;
    EXPECT_EQ(ArgMax(ours.row(step)), golden_.greedy[step]) << "step " << step;
  }
  EXPECT_GE(certain, 20) << "too few steps say anything";
}

TEST_P(CudaGolden, GreedyDecodingGivesTheReferencesTokensUpToTheFirstUncertainOne) {
  const Matrix& reference = golden_.tensors["step_logits"];
  const int steps = IsDynamic() ? 1 : static_cast<int>(golden_.greedy.size());
  const auto done = Generate(*run_.cluster, GreedyRequest(golden_.prompt, steps));  // drawn on the GPU
  ASSERT_TRUE(done.ok()) << done.status();
  const std::vector<TokenId>& tokens = (*done)->choices()[0].tokens;
  ASSERT_EQ(tokens.size(), static_cast<size_t>(steps));
  for (int step = 0; step < steps; ++step) {
    if (tokens[step] == golden_.greedy[step]) continue;
    EXPECT_FALSE(IsCertain(reference.row(step), budget_.logits)) << "step " << step;
    break;  // from here on the contexts differ
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaGolden,
                         ::testing::Combine(::testing::ValuesIn(kCudaBudgets),
                                            ::testing::Values(Seam::kDevice, Seam::kAhead, Seam::kHost, Seam::kJoined)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).model, "_", Name(std::get<1>(info.param)));
                         });

INSTANTIATE_TEST_SUITE_P(Hybrids, CudaGolden,
                         ::testing::Combine(::testing::ValuesIn(kCudaHybridBudgets),
                                            ::testing::Values(Seam::kDevice, Seam::kHost, Seam::kJoined)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).model, "_", Name(std::get<1>(info.param)));
                         });

// Every token of what the CPU says after each chat is given; at each position both say what comes next.
TEST(CudaSmolLm2, AgreesWithTheCpuWhereverTheMarginExceedsTwiceTheBudget) {
  SKIP_WITHOUT_GPU();
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/smollm2-135m-instruct");
  ASSERT_TRUE(fs::exists(FetchedSmolLm2())) << "scripts/fetch_model gets it: " << FetchedSmolLm2();
  const auto cpu = TestModel::Load(FetchedSmolLm2(), model::WeightFormat::kAuto, {.threads = 0});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(**cpu, DType::kF32);
  options.scheduler.max_model_len = 2048 + 128;
  const auto reference = StartCluster(**cpu, options);
  ASSERT_TRUE(reference.ok()) << reference.status();
  for (const auto& [seam, weights] : {std::pair{Seam::kAhead, compute::GpuWeights::kDequantise},
                                      {Seam::kHost, compute::GpuWeights::kDequantise},
                                      {Seam::kAhead, compute::GpuWeights::kKeep}}) {
    SCOPED_TRACE(absl::StrCat(Name(seam), weights == compute::GpuWeights::kKeep ? ", kept in 4 and 8 bits" : ""));
    auto run = Serve(FetchedSmolLm2(), seam, DType::kBF16, 2048 + 128, attention::KvStorage::kAsSent, weights);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->on_gpu->keeps(), weights == compute::GpuWeights::kKeep);
    int certain = 0, agreed = 0, positions = 0, near_ties_apart = 0;
    double worst = 0;
    for (const SmolLm2Case& text : ReadSmolLm2Cases(folder)) {
      std::vector<TokenId> tokens = text.prompt;
      tokens.insert(tokens.end(), text.greedy.begin(), text.greedy.end());
      const size_t first = text.prompt.size() - 1, rows = tokens.size() - first;
      requests::GenerationRequest request = GreedyRequest(tokens, 1);
      request.logits_last = static_cast<int>(rows);
      const auto theirs = Generate(**reference, std::move(request));
      ASSERT_TRUE(theirs.ok()) << theirs.status();
      const Matrix want{static_cast<int64_t>(rows), (*cpu)->config().vocab_size, (*theirs)->prompt_logits()};
      const Matrix got = run->LogitsFrom(tokens, first);
      ASSERT_EQ(got.values.size(), want.values.size());
      worst = std::max(worst, RelativeRms(got.values, want.values));
      for (size_t row = 0; row < rows; ++row) {
        const bool is_certain = IsCertain(want.row(row), kSmolLm2OnGpu);
        const bool same = ArgMax(got.row(row)) == ArgMax(want.row(row));
        ++positions;
        certain += is_certain;
        agreed += is_certain && same;
        near_ties_apart += !is_certain && !same;
        EXPECT_TRUE(same || !is_certain) << "position " << first + row;
      }
    }
    std::printf("measured smollm2: %d positions, %d certain, %d of them agree, %d near-ties differ; logits %.3g\n",
                positions, certain, agreed, near_ties_apart, worst);
    EXPECT_LE(worst, kSmolLm2OnGpu);
    EXPECT_GE(certain, 150) << "of " << positions;
  }
}

TEST(CudaEightBits, KAndVInE4M3KeepTheLogitsOfEveryGoldenWithinTheirBudget) {
  SKIP_WITHOUT_GPU();
  for (const EightBitsBudget& budget : kInEightBits) {
    SCOPED_TRACE(budget.model);
    const fs::path folder = GoldenFolder("dense", budget.model);
    if (folder.empty()) GTEST_SKIP() << "missing test data: goldens/dense";
    const auto prompt = ReadGolden(folder).prompt;
    auto run = Serve(folder, Seam::kAhead, DType::kBF16, 0, attention::KvStorage::kE4M3);
    ASSERT_TRUE(run.ok()) << run.status();
    auto wide = Serve(folder, Seam::kAhead);
    ASSERT_TRUE(wide.ok()) << wide.status();
    const size_t first = prompt.size() / 2;
    const double error = RelativeRms(run->LogitsFrom(prompt, first).values, wide->LogitsFrom(prompt, first).values);
    std::printf("measured %s E4M3 against bfloat16 %.3g\n", budget.model, error);
    EXPECT_LE(error, budget.rounding * kBesideRounding);
    EXPECT_GE(error, budget.rounding / kBesideRounding);
  }
}

// The same texts, given to a model whose K and V lie in 8 bits: what that costs against bfloat16 on the same GPU.
TEST(CudaSmolLm2, KAndVInEightBitsStayWithinTheirBudget) {
  SKIP_WITHOUT_GPU();
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/smollm2-135m-instruct");
  ASSERT_TRUE(fs::exists(FetchedSmolLm2())) << "scripts/fetch_model gets it: " << FetchedSmolLm2();
  auto wide = Serve(FetchedSmolLm2(), Seam::kAhead, DType::kBF16, 2048 + 128);
  ASSERT_TRUE(wide.ok()) << wide.status();
  for (const Seam seam : {Seam::kAhead, Seam::kHost}) {
    SCOPED_TRACE(Name(seam));
    auto narrow = Serve(FetchedSmolLm2(), seam, DType::kBF16, 2048 + 128, attention::KvStorage::kE4M3);
    ASSERT_TRUE(narrow.ok()) << narrow.status();
    int certain = 0, positions = 0, apart = 0;
    double worst = 0;
    for (const SmolLm2Case& text : ReadSmolLm2Cases(folder)) {
      std::vector<TokenId> tokens = text.prompt;
      tokens.insert(tokens.end(), text.greedy.begin(), text.greedy.end());
      const size_t first = text.prompt.size() - 1;
      const Matrix want = wide->LogitsFrom(tokens, first), got = narrow->LogitsFrom(tokens, first);
      ASSERT_EQ(got.values.size(), want.values.size());
      worst = std::max(worst, RelativeRms(got.values, want.values));
      for (int64_t row = 0; row < want.rows; ++row) {
        const bool same = ArgMax(got.row(row)) == ArgMax(want.row(row));
        ++positions;
        apart += !same;
        if (!IsCertain(want.row(row), kSmolLm2InEightBits)) continue;
        ++certain;
        EXPECT_TRUE(same) << "position " << first + static_cast<size_t>(row);
      }
    }
    std::printf("measured smollm2, K and V in E4M3: %d positions, %d certain, %d differ; logits %.3g\n", positions,
                certain, apart, worst);
    EXPECT_LE(worst, kSmolLm2InEightBits);
    EXPECT_GE(certain, 60) << "of " << positions;
  }
}

// Experts of a file in few bits, kept so: their logits of a prompt whose rows read codes, and of one for which
// mixtral's are unpacked, against the CPU with the same weights in f32.
struct KeptExpertsCase {
  const char* name;
  const char* golden;
  const char* arch;
  model::GgmlType type;
  DType wire;
  double logits;
};

std::vector<TokenId> AnyTokens(int count, int64_t vocab) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>((i * 37 + i * i % 11 + 5) % vocab));
  return tokens;
}

Matrix CpuLogits(const fs::path& path, const std::vector<TokenId>& tokens, size_t first) {
  const auto cpu = TestModel::Load(path, model::WeightFormat::kF32, {.threads = 0});
  EXPECT_TRUE(cpu.ok()) << cpu.status();
  const auto cluster = StartCluster(**cpu, ClusterOptionsFor(**cpu, DType::kF32));
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  requests::GenerationRequest request = GreedyRequest(tokens, 1);
  request.logits_last = static_cast<int>(tokens.size() - first);
  Matrix logits{request.logits_last, (*cpu)->config().vocab_size, {}};
  const auto done = Generate(**cluster, std::move(request));
  EXPECT_TRUE(done.ok()) << done.status();
  if (done.ok()) logits.values = (*done)->prompt_logits();
  return logits;
}

TEST(CudaExperts, InTheirCodesGiveTheLogitsOfTheCpu) {
  SKIP_WITHOUT_GPU();
  using model::GgmlType;
  for (const KeptExpertsCase& c :
       {KeptExpertsCase{"mixtral in Q8_0", "mixtral", "llama", GgmlType::kQ8_0, DType::kF16, 2.5e-3},
        {"mixtral in Q4_0", "mixtral", "llama", GgmlType::kQ4_0, DType::kF16, 2.5e-3},
        {"qwen3_moe in Q4_0, its downs in f32", "qwen3_moe", "qwen3moe", GgmlType::kQ4_0, DType::kF16, 1.4e-3},
        {"mixtral in MXFP4", "mixtral", "llama", GgmlType::kMXFP4, DType::kF16, 2.5e-3},
        {"minimax_m2 in Q8_0", "minimax_m2", "minimax-m2", GgmlType::kQ8_0, DType::kF16, 1.1e-3}}) {
    SCOPED_TRACE(c.name);
    const fs::path folder = GoldenFolder("moe", c.golden);
    if (folder.empty()) GTEST_SKIP() << "missing test data: goldens/moe";
    const fs::path path = TempFolder() / "model.gguf";
    std::ofstream(path, std::ios::binary) << ConvertedGguf(folder, c.arch, LatentKeys::kAsTheyAre, c.type);
    auto run = Serve(path, Seam::kAhead, c.wire, 192, attention::KvStorage::kAsSent, compute::GpuWeights::kKeep);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_TRUE(run->on_gpu->keeps());
    EXPECT_GT(run->on_gpu->expert_scratch_bytes(), 0u);
    for (const int count : {9, 180}) {
      const std::vector<TokenId> tokens = AnyTokens(count, run->model->config().vocab_size);
      const Matrix got = run->LogitsFrom(tokens, 0), want = CpuLogits(path, tokens, 0);
      ASSERT_EQ(got.values.size(), want.values.size());
      const double error = RelativeRms(got.values, want.values);
      std::printf("measured %s, %d tokens: %.3g\n", c.name, count, error);
      EXPECT_LE(error, c.logits);
    }
  }
}

TEST(CudaServing, StepsAheadGiveTheSameTokensWhateverEndsAStream) {
  SKIP_WITHOUT_GPU();
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
  auto run = Serve(folder / "hf", Seam::kAhead, DType::kBF16, 512);
  ASSERT_TRUE(run.ok()) << run.status();
  const auto whole = Generate(*run->cluster, GreedyRequest({1, 403, 407, 261}, 96));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::vector<TokenId>& tokens = (*whole)->choices()[0].tokens;
  ASSERT_EQ(tokens.size(), 96u);
  for (const int length : {1, 2, 3, 63, 64, 65}) {
    const auto cut = Generate(*run->cluster, GreedyRequest({1, 403, 407, 261}, length));
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_EQ((*cut)->choices()[0].tokens, std::vector<TokenId>(tokens.begin(), tokens.begin() + length)) << length;
  }
  // A token that ends a stream: nothing after its first place is shown.
  requests::GenerationRequest request = GreedyRequest({1, 403, 407, 261}, 96);
  request.stop_token_ids = {tokens[20]};
  const auto stopped = Generate(*run->cluster, request);
  ASSERT_TRUE(stopped.ok()) << stopped.status();
  const auto first = std::find(tokens.begin(), tokens.end(), tokens[20]);
  EXPECT_EQ((*stopped)->choices()[0].tokens, std::vector<TokenId>(tokens.begin(), first + 1));
  // The step that was ahead of the stream's end may still run.
  EXPECT_TRUE(Eventually([&] { return run->cluster->stats().scheduler.running_sequences == 0; }));
}

TEST(CudaServing, SeededDrawsRepeatThemselvesAndStreamsDoNotDisturbEachOther) {
  SKIP_WITHOUT_GPU();
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
  auto run = Serve(folder / "hf", Seam::kDevice, DType::kBF16, 512);
  ASSERT_TRUE(run.ok()) << run.status();
  const auto request = [](int seed) {
    requests::GenerationRequest request = GreedyRequest({1, 403, 407, 261}, 48);
    request.sampling.temperature = 0.8f;
    request.sampling.top_p = 0.9f;
    request.sampling.seed = seed;
    return request;
  };
  std::vector<std::vector<TokenId>> alone;
  for (int seed = 0; seed < 8; ++seed) {
    const auto done = Generate(*run->cluster, request(seed));
    ASSERT_TRUE(done.ok()) << done.status();
    alone.push_back((*done)->choices()[0].tokens);
  }
  std::vector<std::shared_ptr<cli::CollectingSink>> together;
  for (int seed = 0; seed < 8; ++seed) {
    together.push_back(std::make_shared<cli::CollectingSink>());
    ASSERT_TRUE(run->cluster->Submit(request(seed), together.back()).ok());
  }
  int equal = 0;
  for (int seed = 0; seed < 8; ++seed) {
    ASSERT_TRUE(together[seed]->WaitForEnd().ok());
    EXPECT_EQ(together[seed]->choices()[0].tokens.size(), alone[seed].size());
    equal += together[seed]->choices()[0].tokens == alone[seed];
  }
  EXPECT_GE(equal, 6) << "products of other sizes round otherwise, so a draw at a near-tie may differ, but not many";
  EXPECT_NE(alone[0], alone[1]);
}

}  // namespace
}  // namespace dovetail::test
