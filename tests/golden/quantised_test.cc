#include <gtest/gtest.h>

#include "kernels/cpu/isa.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/golden/budgets.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// The two ways of computing with quantised weights, for every block type: directly on the blocks, and dequantised
// once to f32 (which is bit-exact, tests/model/dequantize_test.cc). A random model of one type, through the whole
// engine, with exact K, V and wire.

namespace dovetail::test {
namespace {

using model::GgmlType;

class QuantisedPaths : public ::testing::TestWithParam<std::tuple<GgmlType, kernels::Isa>> {};

TEST_P(QuantisedPaths, BlocksUsedDirectlyGiveTheLogitsOfDequantisedOnes) {
  const auto [type, isa] = GetParam();
  if (kernels::DetectIsa() < isa) GTEST_SKIP() << "this CPU lacks " << kernels::Name(isa);
  TinyModelSpec spec;
  spec.hidden = spec.mlp = 256;
  spec.head_dim = 64;
  spec.vocab = 256;
  spec.types = {type};
  const std::filesystem::path file = WriteTinyModel(spec, TempFolder());

  std::vector<TokenId> prompt;
  for (int i = 0; i < 70; ++i) prompt.push_back((i * 37 + 11) % spec.vocab);
  std::vector<std::vector<float>> prompt_logits;
  for (const model::WeightFormat format : {model::WeightFormat::kAuto, model::WeightFormat::kF32}) {
    const auto model = TestModel::Load(file, format, {.threads = 2, .max_isa = isa});
    ASSERT_TRUE(model.ok()) << model.status();
    const auto cluster = StartCluster(**model, ClusterOptionsFor(**model, DType::kF32));
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    requests::GenerationRequest request = GreedyRequest(prompt, 1);
    request.logits_last = 32;
    const auto done = Generate(**cluster, std::move(request));
    ASSERT_TRUE(done.ok()) << done.status();
    prompt_logits.push_back((*done)->prompt_logits());
  }
  const double error = RelativeRms(prompt_logits[0], prompt_logits[1]);
  RecordProperty("logits", absl::StrCat(error));
  EXPECT_LE(error, kDirectOnRandomBlocks);
  EXPECT_GT(error, 0) << "both ways are the same one";
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedPaths,
                         ::testing::Combine(::testing::Values(GgmlType::kQ4_0, GgmlType::kQ4_1, GgmlType::kQ5_0,
                                                              GgmlType::kQ5_1, GgmlType::kQ8_0, GgmlType::kQ4_K,
                                                              GgmlType::kQ5_K, GgmlType::kQ6_K, GgmlType::kMXFP4),
                                            ::testing::Values(kernels::Isa::kAvx2, kernels::Isa::kAvx512,
                                                              kernels::Isa::kAmx)),
                         [](const auto& info) {
                           return absl::StrCat(std::string(model::Name(std::get<0>(info.param))), "_",
                                               kernels::Name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace dovetail::test
