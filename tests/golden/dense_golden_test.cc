#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "kernels/cpu/isa.h"
#include "tests/cluster/test_engine.h"
#include "tests/golden/golden.h"

// Tiny random checkpoints, one for each thing that a family does differently (14 dense ones, and those with linear
// states and experts), against full float32 passes of transformers: the last logits of a long and of a short prompt,
// the residual stream after each layer, 32 greedy tokens. Everything runs through the frames, over three attention
// workers that hold sequences whole, by heads and by tokens in turn. What the checkpoints of the test data leave out
// is in tests/data/goldens, made by make_goldens.py.

namespace dovetail::test {
namespace {

namespace fs = std::filesystem;

struct Served {
  std::unique_ptr<TestModel> model;
  std::unique_ptr<engine::EmbeddedCluster> cluster;

  // The logits of positions [first, tokens.size()).
  Matrix LogitsFrom(const std::vector<TokenId>& tokens, size_t first) {
    requests::GenerationRequest request = GreedyRequest(tokens, 1);
    request.logits_last = static_cast<int>(tokens.size() - first);
    Matrix logits{request.logits_last, model->model->head.weights.rows(), {}};
    const auto done = Generate(*cluster, std::move(request));
    EXPECT_TRUE(done.ok()) << done.status();
    if (done.ok()) logits.values = (*done)->prompt_logits();
    return logits;
  }
};

// The index of the first step of a layer, or of what would come after the last one.
size_t FirstStepOf(const model::LoadedModel& model, size_t layer) {
  const auto begins = [&](const model::LayerStep& step, size_t l) {
    if (l >= model.config().layers.size() || model.config().layers[l].kind != model::LayerKind::kMlpOnly)
      return std::holds_alternative<model::InputNorm>(step);
    return std::holds_alternative<model::GatedMlp>(step) || std::holds_alternative<model::ExpertMlp>(step);
  };
  size_t at = 0;
  for (size_t l = 0; at < model.steps.size(); ++l, ++at) {
    while (at < model.steps.size() && !begins(model.steps[at], l)) ++at;
    if (l == layer) break;
  }
  return std::min(at, model.steps.size());
}

// A norm whose eps dwarfs every mean square is a multiplication by weight / sqrt(eps); with an identity for the head,
// the "logits" of what is left of the model are the residual stream itself.
absl::Status ShowResidual(TestModel& test, int layers, bool normed) {
  model::LoadedModel& model = *test.model;
  model.steps.resize(FirstStepOf(model, static_cast<size_t>(layers)));
  const int64_t hidden = model.config().hidden_size;
  if (normed) {
    for (float& weight : model.final_norm.weight) weight /= model.config().logits_scale;
  } else {
    constexpr float kScale = 1 << 20;
    model.final_norm = {std::vector<float>(hidden, kScale), kScale * kScale};
  }
  std::vector<float> identity(hidden * hidden, 0.0f);
  for (int64_t i = 0; i < hidden; ++i) identity[i * hidden + i] = 1;
  const auto row_at = [&](int64_t row) { return reinterpret_cast<const std::byte*>(identity.data() + row * hidden); };
  DT_ASSIGN_OR_RETURN(
      model.head.weights,
      kernels::PackWeights(kernels::PackedFormat::kF32,
                           kernels::RowSource{kernels::RowFormat::kF32, hidden, hidden, row_at}, nullptr));
  return absl::OkStatus();
}

class DenseGolden : public ::testing::TestWithParam<std::tuple<DenseBudget, kernels::Isa>> {
 protected:
  void SetUp() override {
    const kernels::Isa isa = std::get<1>(GetParam());
    if (kernels::DetectIsa() < isa) GTEST_SKIP() << "this CPU lacks " << kernels::Name(isa);
    const fs::path folder = GoldenFolder(std::string(budget_.group), budget_.model);
    if (folder.empty()) GTEST_SKIP() << "missing test data: goldens/" << budget_.group;
    golden_ = ReadGolden(folder);
  }

  // `residual_after` >= 0: a model that shows the residual stream after that many layers in place of logits.
  Served Start(int residual_after = -1) {
    const bool f32 = budget_.path == Path::kF32;
    Served run;
    auto model = TestModel::Load(golden_.folder, f32 ? model::WeightFormat::kF32 : model::WeightFormat::kAuto,
                                 {.threads = 2, .max_isa = std::get<1>(GetParam())});
    EXPECT_TRUE(model.ok()) << model.status();
    run.model = *std::move(model);
    if (residual_after >= 0) {
      const int layers = static_cast<int>(run.model->config().layers.size());
      const bool mamba2 = run.model->config().architecture == model::Architecture::kMamba2;
      // transformers' mamba2 shows no embeddings, but the last layer's result both ways.
      EXPECT_TRUE(
          ShowResidual(*run.model, std::min(layers, residual_after + (mamba2 ? 1 : 0)), residual_after == layers).ok());
    }
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(*run.model, f32 ? DType::kF32 : DType::kBF16);
    options.attention_workers = 3;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    options.scheduler.micro_batches = 2;
    options.scheduler.max_num_batched_tokens = 48;
    auto cluster = StartCluster(*run.model, options);
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    run.cluster = *std::move(cluster);
    return run;
  }

  // Shown with the test's results (--gtest_output): what budgets are frozen from.
  void Measured(const char* what, double error) { RecordProperty(what, absl::StrCat(error)); }

  bool IsDynamic(const Served& run) const {
    const auto& ropes = run.model->config().ropes;
    return !ropes.empty() && ropes[0].kind == model::RopeKind::kDynamic;
  }

  // The last four positions of the prompt, with the rope frequencies of a sequence of `length` >= that of the prompt.
  Matrix Last4(Served& run, size_t length) {
    Matrix last = run.LogitsFrom(golden_.Tokens(length), golden_.prompt.size() - 4);
    last.rows = 4;
    last.values.resize(std::min<size_t>(last.values.size(), 4 * last.cols));
    return last;
  }

  const DenseBudget budget_ = std::get<0>(GetParam());
  Golden golden_;
};

TEST_P(DenseGolden, TheLogitsOfALongAndOfAShortPromptAreTheReferences) {
  Served run = Start();
  // Frequencies of dynamic NTK depend on the longest sequence that the reference had run before, here the last greedy
  // step (model/rope.h).
  const size_t length = golden_.prompt.size() + (IsDynamic(run) ? golden_.greedy.size() - 1 : 0);
  const double last4 = RelativeRms(Last4(run, length).values, golden_.tensors["logits_last4"].values);
  const Matrix short_logits = run.LogitsFrom(golden_.Tokens(golden_.short_len), golden_.short_len - 4);
  const double short4 = RelativeRms(short_logits.values, golden_.tensors["short_logits_last4"].values);
  Measured("logits", std::max(last4, short4));
  EXPECT_LE(last4, budget_.logits);
  EXPECT_LE(short4, budget_.logits);
}

TEST_P(DenseGolden, TheResidualStreamAfterEachLayerIsTheReferences) {
  double worst = 0;
  for (int layer = 0; golden_.tensors.contains(absl::StrCat("hidden.", layer)); ++layer) {
    Served run = Start(layer);
    const double error =
        RelativeRms(Last4(run, golden_.prompt.size()).values, golden_.tensors[absl::StrCat("hidden.", layer)].values);
    EXPECT_LE(error, budget_.hidden) << "after " << layer << " layers";
    worst = std::max(worst, error);
  }
  Measured("hidden", worst);
  EXPECT_TRUE(golden_.tensors.contains("hidden.3"));
}

TEST_P(DenseGolden, VectorsArePooledFromTheReferencesHiddenStates) {
  Served run = Start(), shown = Start(static_cast<int>(Start().model->config().layers.size()));
  const auto pooled = [&](requests::Pooling pooling) {
    requests::GenerationRequest request = GreedyRequest(golden_.prompt, 0);
    request.pooling = pooling;
    const auto done = Generate(*run.cluster, std::move(request));
    EXPECT_TRUE(done.ok()) << done.status();
    return done.ok() ? (*done)->pooled() : std::vector<float>();
  };
  const size_t layers = run.model->config().layers.size();
  const Matrix& reference = golden_.tensors[absl::StrCat("hidden.", layers)];
  EXPECT_LE(RelativeRms(pooled(requests::Pooling::kLast), reference.row(3)), budget_.hidden);
  // A model whose logits are its hidden states gives those of all positions.
  const Matrix states = shown.LogitsFrom(golden_.prompt, 0);
  std::vector<double> sums(states.cols);
  for (int64_t row = 0; row < states.rows; ++row)
    for (int64_t i = 0; i < states.cols; ++i) sums[i] += states.row(row)[i];
  std::vector<float> mean(states.cols);
  for (int64_t i = 0; i < states.cols; ++i) mean[i] = static_cast<float>(sums[i] / static_cast<double>(states.rows));
  EXPECT_LE(RelativeRms(pooled(requests::Pooling::kMean), mean), budget_.hidden);
  EXPECT_LE(RelativeRms(pooled(requests::Pooling::kCls), states.row(0)), budget_.hidden);
}

TEST_P(DenseGolden, EveryCertainTokenIsChosenWhenTheReferencesTokensAreGiven) {
  Served run = Start();
  const Matrix& reference = golden_.tensors["step_logits"];
  const size_t prompt = golden_.prompt.size(), steps = golden_.greedy.size();
  Matrix ours{static_cast<int64_t>(steps), reference.cols, {}};
  if (IsDynamic(run)) {
    for (size_t step = 0; step < steps; ++step) {  // each at its own length, as the reference ran it
      const Matrix row = run.LogitsFrom(golden_.Tokens(prompt + step), prompt + step - 1);
      ours.values.insert(ours.values.end(), row.values.begin(), row.values.end());
    }
  } else {
    ours = run.LogitsFrom(golden_.Tokens(prompt + steps - 1), prompt - 1);
  }
  const double error = RelativeRms(ours.values, reference.values);
  Measured("steps", error);
  ASSERT_LE(error, budget_.logits);
  int certain = 0;
  for (size_t step = 0; step < steps; ++step) {
    if (!IsCertain(reference.row(step), budget_.logits)) continue;
    ++certain;
    EXPECT_EQ(ArgMax(ours.row(step)), golden_.greedy[step]) << "step " << step;
  }
  EXPECT_GE(certain, budget_.path == Path::kF32 ? 32 : 24) << "too few steps say anything";
}

TEST_P(DenseGolden, GreedyDecodingGivesTheReferencesTokensUpToTheFirstUncertainOne) {
  Served run = Start();
  const Matrix& reference = golden_.tensors["step_logits"];
  // Later steps of dynamic NTK keep the frequencies of the prompt's length here, not so in the reference.
  const int steps = IsDynamic(run) ? 1 : static_cast<int>(golden_.greedy.size());
  requests::GenerationRequest request = GreedyRequest(golden_.prompt, steps);
  request.logits_of_output = true;
  const auto done = Generate(*run.cluster, std::move(request));
  ASSERT_TRUE(done.ok()) << done.status();
  const auto& choice = (*done)->choices()[0];
  ASSERT_EQ(choice.tokens.size(), static_cast<size_t>(steps));
  ASSERT_EQ(choice.logits.size(), static_cast<size_t>(steps));
  std::vector<float> ours, theirs;
  for (int step = 0; step < steps; ++step) {
    ours.insert(ours.end(), choice.logits[step].begin(), choice.logits[step].end());
    theirs.insert(theirs.end(), reference.row(step).begin(), reference.row(step).end());
    if (choice.tokens[step] == golden_.greedy[step]) continue;
    EXPECT_FALSE(IsCertain(reference.row(step), budget_.logits)) << "step " << step;
    break;  // from here on the contexts differ
  }
  const double error = RelativeRms(ours, theirs);
  Measured("decode", error);
  EXPECT_LE(error, budget_.logits);
}

INSTANTIATE_TEST_SUITE_P(All, DenseGolden,
                         ::testing::Combine(::testing::ValuesIn(kDenseBudgets),
                                            ::testing::Values(kernels::Isa::kAvx2, kernels::Isa::kAvx512,
                                                              kernels::Isa::kAmx)),
                         [](const auto& info) {
                           const DenseBudget& budget = std::get<0>(info.param);
                           return absl::StrCat(budget.model, "_", Name(budget.path), "_",
                                               kernels::Name(std::get<1>(info.param)));
                         });

INSTANTIATE_TEST_SUITE_P(Hybrid, DenseGolden,
                         ::testing::Combine(::testing::ValuesIn(kHybridBudgets),
                                            ::testing::Values(kernels::Isa::kAvx2, kernels::Isa::kAvx512,
                                                              kernels::Isa::kAmx)),
                         [](const auto& info) {
                           const DenseBudget& budget = std::get<0>(info.param);
                           return absl::StrCat(budget.model, "_", Name(budget.path), "_",
                                               kernels::Name(std::get<1>(info.param)));
                         });

INSTANTIATE_TEST_SUITE_P(Ours, DenseGolden,
                         ::testing::Combine(::testing::ValuesIn(kOurBudgets),
                                            ::testing::Values(kernels::Isa::kAvx2, kernels::Isa::kAvx512,
                                                              kernels::Isa::kAmx)),
                         [](const auto& info) {
                           const DenseBudget& budget = std::get<0>(info.param);
                           return absl::StrCat(budget.model, "_", Name(budget.path), "_",
                                               kernels::Name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace dovetail::test
