#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/support/test_data.h"

// What attention workers hold of contexts of a thousand to a million tokens. Prompts are beginnings of each other, so
// each goes on from the snapshot that the one before it left. The table is printed.

namespace dovetail::test {
namespace {

// The shape of the mamba2 golden.
std::string Mamba2Config() {
  return R"({"model_type": "mamba2", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8,
    "head_dim": 16, "n_groups": 2, "state_size": 16, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5,
    "use_conv_bias": true, "use_bias": false, "tie_word_embeddings": false})";
}

// One softmax layer with 2 KV heads between two with states.
std::string LongHybridConfig() {
  std::string config = TinyGatedDeltaConfig();
  const std::string before = "\"max_position_embeddings\": 1024";
  return config.replace(config.find(before), before.size(), "\"max_position_embeddings\": 131072");
}

int64_t ResidentBytes() {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

struct Held {
  int64_t tokens = 0;
  uint64_t blocks = 0;   // while it is continued token by token
  int64_t resident = 0;  // bytes of this process
};

constexpr size_t kAnswer = 256;

std::vector<Held> Measure(const std::string& config, int vocab, const std::vector<int>& lengths, uint64_t kv_bytes) {
  std::vector<Held> all;
  const auto folder = WriteTinyFolder(config, 7, TempFolder() / "long");
  const auto model = TestModel::Load(folder, model::WeightFormat::kF32, {.threads = 1});
  EXPECT_TRUE(model.ok()) << model.status();
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(**model, DType::kF32);
  options.kv_cache_bytes = kv_bytes;
  const auto cluster = StartCluster(**model, options);
  EXPECT_TRUE(cluster.ok()) << cluster.status();
  std::vector<TokenId> prompt;
  for (const int length : lengths) {
    for (int64_t i = static_cast<int64_t>(prompt.size()); i < length; ++i)
      prompt.push_back(static_cast<TokenId>(3 + (17 * i % 1009 * i + 31 * i) % (vocab - 3)));
    const absl::Time begun = SystemClock().Now();
    auto sink = std::make_shared<cli::CollectingSink>();
    const auto id = (*cluster)->Submit(GreedyRequest(prompt, 2 * kAnswer), sink);
    EXPECT_TRUE(id.ok()) << id.status();
    sink->WaitForTokens(1);
    const double seconds = absl::ToDoubleSeconds(SystemClock().Now() - begun);
    // The most that two blocks of tokens need, so that it does not matter where in a block the prompt ended.
    engine::EngineStats stats;
    uint64_t most = 0;
    for (size_t tokens = kAnswer / 2; tokens < kAnswer; ++tokens) {
      sink->WaitForTokens(tokens);
      stats = (*cluster)->stats();
      most = std::max(most, stats.kv_blocks_in_use);
    }
    all.push_back({length, most, ResidentBytes()});
    std::printf("%8d tokens: %6llu KvBlocks held, process %7.1f MiB, prompt in %7.2f s (%llu tokens found so far)\n",
                length, static_cast<unsigned long long>(most), static_cast<double>(all.back().resident) / (1 << 20),
                seconds, static_cast<unsigned long long>(stats.scheduler.prefix_hits));
    (*cluster)->Cancel(*id);
    (void)sink->WaitForEnd();
  }
  return all;
}

TEST(LongContext, AStateIsAsLargeAfterAMillionTokensAsAfterAThousand) {
  const std::vector<Held> held =
      Measure(Mamba2Config(), 320, {1'000, 4'000, 16'000, 64'000, 256'000, 1'000'000}, uint64_t{8} << 20);
  for (const Held& at : held) EXPECT_EQ(at.blocks, held[0].blocks) << at.tokens << " tokens";
  // Prompts, their tokens and hashes are kept by the server and the scheduler: 8 bytes a token and more, but no state.
  EXPECT_LT(held.back().resident - held[0].resident, int64_t{64} * 1'000'000);
}

TEST(LongContext, AHybridGrowsInItsSoftmaxLayersOnly) {
  const std::vector<Held> held = Measure(LongHybridConfig(), 97, {1'000, 4'000, 16'000, 64'000}, uint64_t{128} << 20);
  // 2 KV heads; when the answer was read the next tokens may have been there already.
  for (const Held& at : held)
    EXPECT_NEAR(static_cast<double>(at.blocks - held[0].blocks),
                static_cast<double>(at.tokens - held[0].tokens) / 64 * 2, 2 * (kAnswer / 64 + 1))
        << at.tokens << " tokens";
}

}  // namespace
}  // namespace dovetail::test
