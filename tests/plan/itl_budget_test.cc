// --prefill-itl-budget in virtual time: 32 streams decode while prompts of 32k tokens arrive, on devices with about the
// rates of an H200 and a model with about the shape of Llama 3 8B. The scheduler is the real one; it learns the rates.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "plan/simulation.h"

namespace dovetail::plan {
namespace {

using ::testing::Each;
using ::testing::Gt;
using ::testing::Le;

constexpr int kStreams = 32;
constexpr scheduler::ItlBudget kAuto{.automatic = true}, kOff{};

ModelWork Llama8B() {
  const proto::SoftmaxSpec spec{.query_heads = 32, .kv_heads = 8, .key_dim = 128, .value_dim = 128, .scale = 1};
  ModelWork work;
  work.name = "8B";
  work.products = {{.weights = "bf16", .outputs = 53248, .inputs = 4096, .count = 32},
                   {.weights = "bf16", .outputs = 128256, .inputs = 4096, .head = true}};
  work.layers = 32;
  work.vocabulary = 128256;
  work.max_positions = 131072;
  work.attention = *proto::AttentionTable::Build(std::vector<proto::AttentionSpec>(32, spec));
  work.kv_block_bytes = 64 * 512;
  return work;
}

// Weights at 4 TB/s, products of many rows at 600 TFLOP/s, K and V at 3.5 TB/s, prompts' attention at 400 TFLOP/s.
DeviceProfile Gpu() {
  DeviceProfile profile;
  profile.name = "gpu";
  profile.memory_gb = 141;
  profile.reads = {{1, 4e12}};
  profile.products = {{"bf16", 2, {{1, 5e-13}, {150, 5.1e-13}, {8192, 2.73e-11}}}};
  profile.attention = {{DType::kBF16, 128, 4, 3.5e12, 4e14}};
  profile.steps = {.step_s = 3e-4};
  return profile;
}

struct Setting {
  scheduler::ItlBudget budget = kAuto;
  bool split = false;
  int compute_workers = 1, attention_workers = 1, micro_batches = 1;
  int prompts = 4;
  double every_s = 5;     // some arrive
  int at_once = 1;        // so many
  double most_ttft = 3;   // over what it is without a budget
  double most_itl = 1.5;  // over what it is without prompts
};

struct Outcome {
  double undisturbed_p99_s = 0, disturbed_p99_s = 0;  // gaps between tokens of the streams
  std::vector<double> ttft_s;                         // of the prompts
  uint64_t shortened = 0;
};

double P99(std::vector<double> values) {
  EXPECT_THAT(values, testing::SizeIs(Gt(100)));
  std::sort(values.begin(), values.end());
  return values[values.size() * 99 / 100];
}

// The streams run for two seconds before the first prompt comes.
Outcome Load(const Setting& setting) {
  constexpr double kFirst = 4;
  SimulatedCluster cluster;
  cluster.compute_workers = setting.compute_workers;
  cluster.attention_workers = setting.attention_workers;
  cluster.kv_blocks = 10'000'000;
  cluster.options.max_num_batched_tokens = 8192;
  cluster.options.max_model_len = 131072;
  cluster.options.micro_batches = setting.micro_batches;
  cluster.options.enable_prefix_caching = false;
  cluster.options.prefill_itl_budget = setting.budget;
  cluster.options.attention = Llama8B().attention;
  std::optional<OtherDevice> other;
  if (setting.split) other = OtherDevice{Gpu(), {"device", 2e-6, 4e11}};
  const StepModel steps = *StepModel::Create(Llama8B(), Gpu(), other);

  std::vector<SimulatedRequest> requests(kStreams, {0, 2000, 3000});
  for (int i = 0; i < setting.prompts; ++i)
    requests.push_back({kFirst + setting.every_s * (i / setting.at_once), 32000, 2});
  std::vector<std::vector<double>> tokens(requests.size());
  const auto result = Simulate(steps, cluster, requests, {}, [&](size_t r, double at_s) { tokens[r].push_back(at_s); });
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return {};
  Outcome outcome;
  outcome.shortened = result->shortened_chunks;
  for (size_t r = kStreams; r < requests.size(); ++r) outcome.ttft_s.push_back(result->requests[r].ttft_s);
  const auto while_read = [&](double at_s) {
    for (size_t p = 0; p < outcome.ttft_s.size(); ++p) {
      const double begin = requests[kStreams + p].at_s;
      if (at_s > begin && at_s < begin + outcome.ttft_s[p] + 0.05) return true;
    }
    return false;
  };
  std::vector<double> undisturbed, disturbed;
  for (int s = 0; s < kStreams; ++s)
    for (size_t t = 1; t < tokens[s].size(); ++t)
      if (tokens[s][t - 1] > 2)
        (while_read(tokens[s][t]) ? disturbed : undisturbed).push_back(tokens[s][t] - tokens[s][t - 1]);
  outcome.undisturbed_p99_s = P99(undisturbed);
  outcome.disturbed_p99_s = P99(disturbed);
  return outcome;
}

void Print(const char* what, const Outcome& outcome) {
  std::printf("%s: itl p99 %.1f ms, undisturbed %.1f ms (%.2fx); ttft %.2f s .. %.2f s; shortened %d\n", what,
              1e3 * outcome.disturbed_p99_s, 1e3 * outcome.undisturbed_p99_s,
              outcome.disturbed_p99_s / outcome.undisturbed_p99_s,
              *std::min_element(outcome.ttft_s.begin(), outcome.ttft_s.end()),
              *std::max_element(outcome.ttft_s.begin(), outcome.ttft_s.end()), static_cast<int>(outcome.shortened));
}

class ItlBudget : public testing::TestWithParam<Setting> {};

TEST_P(ItlBudget, StreamsGoOnWhilePromptsAreRead) {
  Setting setting = GetParam();
  const Outcome with = Load(setting);
  setting.budget = kOff;
  const Outcome without = Load(setting);
  Print("auto", with);
  Print("off", without);
  EXPECT_LE(with.disturbed_p99_s, setting.most_itl * with.undisturbed_p99_s);
  EXPECT_GE(without.disturbed_p99_s, 5 * without.undisturbed_p99_s) << "else this shows nothing";
  for (size_t p = 0; p < with.ttft_s.size(); ++p) EXPECT_LE(with.ttft_s[p], setting.most_ttft * without.ttft_s[p]);
  EXPECT_GT(with.shortened, 100u);
  EXPECT_EQ(without.shortened, 0u);
}

// Two micro-batches share the time for prompts.
Setting TwoMicroBatches() { return {.split = true, .micro_batches = 2, .most_ttft = 3.5}; }
// Both have a prompt, and the least chunk of each.
Setting TwoPromptsAtOnce() {
  return {.split = true, .micro_batches = 2, .prompts = 4, .every_s = 10, .at_once = 2, .most_itl = 1.75};
}
// Prompts are divided, and a group is fast where nothing else runs.
Setting TwoOfEach(int micro_batches) {
  return {.split = true, .compute_workers = 2, .attention_workers = 2, .micro_batches = micro_batches, .most_ttft = 4};
}

INSTANTIATE_TEST_SUITE_P(Layouts, ItlBudget,
                         testing::Values(Setting{}, Setting{.micro_batches = 2}, Setting{.split = true},
                                         TwoMicroBatches(), TwoPromptsAtOnce(), TwoOfEach(1), TwoOfEach(2)));

TEST(ItlBudgetOverload, PromptsThatComeTooFastTakeNoMoreThanEightTimesAsLongAsAlone) {
  const double alone_s = Load({.budget = kOff, .prompts = 1}).ttft_s[0];
  const Outcome with = Load({.prompts = 12, .every_s = 1.5 * alone_s});
  Print("overload", with);
  EXPECT_THAT(with.ttft_s, Each(Le(8.5 * alone_s)));
}

TEST(ItlBudgetGiven, IsKept) {
  const Outcome with = Load({.budget = {.seconds = 0.025}});
  Print("25 ms", with);
  EXPECT_LE(with.disturbed_p99_s, 0.025 * 1.05);
  EXPECT_GE(with.disturbed_p99_s, 0.025 * 0.8) << "what streams can bear goes to prompts";
}

}  // namespace
}  // namespace dovetail::plan
