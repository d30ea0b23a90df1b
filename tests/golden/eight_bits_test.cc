#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/cluster/test_engine.h"
#include "tests/golden/golden.h"
#include "tests/golden/smollm2.h"

// What K and V in 8 bits cost on a CPU: logits against those of the same model with K and V in bfloat16.

namespace dovetail::test {
namespace {

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

absl::StatusOr<Served> Serve(const std::filesystem::path& path, KvStorage storage) {
  Served run;
  DT_ASSIGN_OR_RETURN(run.model, TestModel::Load(path, model::WeightFormat::kAuto));
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(*run.model, DType::kBF16);
  options.kv_storage = storage;
  options.attention_workers = 3;
  options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
  options.scheduler.max_model_len = std::min(options.scheduler.max_model_len, 2048 + 128);
  DT_ASSIGN_OR_RETURN(run.cluster, StartCluster(*run.model, options));
  return run;
}

// What E4M3 does alone is the same as on a GPU (budgets.h); int8 is better everywhere.
TEST(EightBitsOnCpus, KeepTheLogitsOfEveryGoldenWithinTheirBudget) {
  for (const EightBitsBudget& budget : kInEightBits) {
    SCOPED_TRACE(budget.model);
    const std::filesystem::path folder = GoldenFolder("dense", budget.model);
    if (folder.empty()) GTEST_SKIP() << "missing test data: goldens/dense";
    const auto prompt = ReadGolden(folder).prompt;
    const size_t first = prompt.size() / 2;
    auto wide = Serve(folder, KvStorage::kAsSent);
    ASSERT_TRUE(wide.ok()) << wide.status();
    const Matrix expected = wide->LogitsFrom(prompt, first);
    double errors[2];
    for (const KvStorage storage : {KvStorage::kE4M3, KvStorage::kInt8}) {
      auto narrow = Serve(folder, storage);
      ASSERT_TRUE(narrow.ok()) << narrow.status();
      errors[storage == KvStorage::kInt8] = RelativeRms(narrow->LogitsFrom(prompt, first).values, expected.values);
    }
    std::printf("measured %s E4M3 %.3g int8 %.3g against bfloat16\n", budget.model, errors[0], errors[1]);
    EXPECT_LE(errors[0], budget.rounding * kBesideRounding);
    EXPECT_GE(errors[0], budget.rounding / kBesideRounding) << "nothing was rounded";
    EXPECT_LE(errors[1], budget.int8 * kBesideRounding);
    EXPECT_GE(errors[1], budget.int8 / kBesideRounding) << "nothing was rounded, or twice";
  }
}

// The chats and the long text of smollm2_golden_test.cc.
TEST(EightBitsOnCpus, KeepTheLogitsOfSmolLm2WithinTheirBudget) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/smollm2-135m-instruct");
  ASSERT_TRUE(std::filesystem::exists(FetchedSmolLm2())) << "scripts/fetch_model gets it: " << FetchedSmolLm2();
  auto wide = Serve(FetchedSmolLm2(), KvStorage::kAsSent);
  ASSERT_TRUE(wide.ok()) << wide.status();
  for (const KvStorage storage : {KvStorage::kE4M3, KvStorage::kInt8}) {
    auto narrow = Serve(FetchedSmolLm2(), storage);
    ASSERT_TRUE(narrow.ok()) << narrow.status();
    int positions = 0, same = 0;
    double worst = 0;
    for (const SmolLm2Case& text : ReadSmolLm2Cases(folder)) {
      std::vector<TokenId> tokens = text.prompt;
      tokens.insert(tokens.end(), text.greedy.begin(), text.greedy.end());
      const size_t first = text.prompt.size() - 1;
      const Matrix want = wide->LogitsFrom(tokens, first), got = narrow->LogitsFrom(tokens, first);
      ASSERT_EQ(got.values.size(), want.values.size());
      const double error = RelativeRms(got.values, want.values);
      worst = std::max(worst, error);
      std::printf("measured smollm2 %s, a text of %zu tokens: logits %.3g\n", std::string(Name(storage)).c_str(),
                  tokens.size(), error);
      for (int64_t row = 0; row < want.rows; ++row, ++positions) {
        const auto most = [](auto values) { return std::max_element(values.begin(), values.end()) - values.begin(); };
        same += most(got.row(row)) == most(want.row(row));
      }
    }
    std::printf("measured smollm2 %s: logits %.3g; %d of %d likeliest tokens are the same\n",
                std::string(Name(storage)).c_str(), worst, same, positions);
    EXPECT_LE(worst, storage == KvStorage::kInt8 ? kSmolLm2InInt8 : kSmolLm2InEightBits * kBesideRounding);
  }
}

}  // namespace
}  // namespace dovetail::test
