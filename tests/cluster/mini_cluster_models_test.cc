#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "nlohmann/json.hpp"
#include "tests/cluster/mini_cluster.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// Whole models through a cluster of real processes: SmolLM2-135M-Instruct, the file the quickstart serves, and the tiny
// checkpoints of which every family has one. tests/golden compares the embedded engine with references; here what a
// request gets from processes must be what it gets there, greedy and drawn with a seed: the same tokens, and of the
// tiny ones the same bits of every logit.

namespace dovetail::test {
namespace {

namespace fs = std::filesystem;

using Requests = std::vector<requests::GenerationRequest>;
using Sinks = std::vector<std::shared_ptr<cli::CollectingSink>>;

// All at once, so that they share steps.
Sinks RunAll(engine::Engine& engine, const Requests& requests) {
  Sinks sinks;
  for (const requests::GenerationRequest& request : requests) {
    sinks.push_back(std::make_shared<cli::CollectingSink>(request.choices));
    const auto id = engine.Submit(request, sinks.back());
    EXPECT_TRUE(id.ok()) << id.status();
  }
  for (const auto& sink : sinks) EXPECT_EQ(sink->WaitForEnd(), absl::OkStatus());
  return sinks;
}

void ExpectSame(const cli::CollectingSink& ours, const cli::CollectingSink& expected) {
  EXPECT_EQ(ours.protocol_errors(), 0);
  ASSERT_EQ(ours.choices().size(), expected.choices().size());
  ASSERT_EQ(ours.prompt_logits(), expected.prompt_logits());
  for (size_t i = 0; i < ours.choices().size(); ++i) {
    const cli::CollectingSink::Choice &choice = ours.choices()[i], &want = expected.choices()[i];
    ASSERT_EQ(choice.tokens, want.tokens) << "choice " << i;
    ASSERT_EQ(choice.logits.size(), want.logits.size());
    for (size_t token = 0; token < choice.logits.size(); ++token)
      ASSERT_EQ(std::memcmp(choice.logits[token].data(), want.logits[token].data(),
                            want.logits[token].size() * sizeof(float)),
                0)
          << "choice " << i << ": logits of token " << token;
  }
}

// Each prompt greedily, with a seed, and as two samples of one prompt.
Requests RequestsOf(const std::vector<std::vector<TokenId>>& prompts, int max_tokens, bool logits) {
  Requests requests;
  for (size_t i = 0; i < prompts.size(); ++i) {
    requests::GenerationRequest request = GreedyRequest(prompts[i], max_tokens);
    request.logits_of_output = logits;
    request.logits_last = 1;
    requests.push_back(request);
    request.sampling.temperature = 0.9f;
    request.sampling.top_p = 0.95f;
    request.sampling.seed = 40 + i;
    request.choices = i % 2 == 0 ? 1 : 2;
    requests.push_back(request);
  }
  return requests;
}

// Each alone, in one process; then all at once over processes. `max_model_len` 0: what the model allows.
void CompareWithEmbedded(const fs::path& path, model::WeightFormat weights, DType kv, const Requests& requests,
                         const std::vector<std::string>& lanes, uint64_t kv_bytes, int max_model_len) {
  Sinks expected;
  {
    const auto model = TestModel::Load(path, weights, {.threads = 2});
    ASSERT_TRUE(model.ok()) << model.status();
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(**model, kv);
    options.scheduler.enable_prefix_caching = false;
    if (max_model_len > 0) options.scheduler.max_model_len = max_model_len;
    const auto alone = StartCluster(**model, options);
    ASSERT_TRUE(alone.ok()) << alone.status();
    for (const requests::GenerationRequest& request : requests) expected.push_back(RunAll(**alone, {request}).front());
  }
  for (const std::string& lane : lanes) {
    SCOPED_TRACE(lane);
    MiniClusterOptions options;
    options.deployment = Deployment::kProcesses;
    options.lanes = lane;
    options.model = path;
    options.weights = weights;
    options.kv = kv;
    options.kv_bytes = kv_bytes;
    options.attention_workers = 3;
    options.scheduler.max_model_len = max_model_len;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 128;
    options.scheduler.micro_batches = 2;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    const auto cluster = MiniCluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    const Sinks sinks = RunAll((*cluster)->engine(), requests);
    for (size_t i = 0; i < sinks.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("request ", i));
      ExpectSame(*sinks[i], *expected[i]);
    }
    EXPECT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
  }
}

// Where scripts/fetch_model puts it.
fs::path FetchedModel() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const fs::path base =
      cache != nullptr && *cache != '\0' ? fs::path(cache) : fs::path(home == nullptr ? "" : home) / ".cache";
  return base / "dovetail" / "smollm2-135m-instruct.gguf";
}

TEST(MiniClusterModels, SmolLm2SaysOverProcessesWhatItSaysInOne) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/smollm2-135m-instruct");
  ASSERT_TRUE(fs::exists(FetchedModel())) << "scripts/fetch_model gets it: " << FetchedModel();
  std::vector<std::vector<TokenId>> prompts;
  for (const auto& json : nlohmann::json::parse(ReadFile(folder / "golden.json")))
    if (json["prompt_ids"].size() <= 200) prompts.push_back(json["prompt_ids"].get<std::vector<TokenId>>());
  ASSERT_GE(prompts.size(), 4u);
  CompareWithEmbedded(FetchedModel(), model::WeightFormat::kAuto, DType::kBF16, RequestsOf(prompts, 48, false),
                      {"shm", "tcp"}, uint64_t{64} << 20, 512);
}

class MiniClusterGoldens : public testing::TestWithParam<const char*> {};

TEST_P(MiniClusterGoldens, EveryFamilySaysOverProcessesWhatItSaysInOne) {
  DOVETAIL_DATA_OR_SKIP(const auto archive, absl::StrCat("goldens/goldens_", GetParam(), ".tar.gz"));
  int served = 0;
  for (const auto& entry : fs::directory_iterator(Unpack(archive) / GetParam())) {
    if (!fs::exists(entry.path() / "golden.json")) continue;
    SCOPED_TRACE(entry.path().filename().string());
    if (const auto model = TestModel::Load(entry.path(), model::WeightFormat::kF32); !model.ok()) {
      EXPECT_TRUE(absl::IsUnimplemented(model.status())) << model.status();  // named when it is loaded
      continue;
    }
    const auto json = nlohmann::json::parse(ReadFile(entry.path() / "golden.json"));
    const auto prompt = json["prompt_ids"].get<std::vector<TokenId>>();
    const std::vector<TokenId> beginning(prompt.begin(), prompt.begin() + json["short_len"].get<int>());
    CompareWithEmbedded(entry.path(), model::WeightFormat::kF32, DType::kF32, RequestsOf({prompt, beginning}, 32, true),
                        {served % 2 == 0 ? "shm" : "tcp"}, uint64_t{16} << 20, 0);
    if (HasFatalFailure()) return;
    ++served;
  }
  EXPECT_GE(served, 3) << "families of " << GetParam();
}

INSTANTIATE_TEST_SUITE_P(Groups, MiniClusterGoldens, testing::Values("dense", "hybrid", "moe"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace dovetail::test
