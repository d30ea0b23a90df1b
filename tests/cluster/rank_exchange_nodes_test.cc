#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/cluster/node_cluster.h"
#include "tests/cluster/rank_cluster.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// Compute workers that give each other linear states, or K and V, a scheduler and an attention worker, all real nodes,
// in one thread and with time by hand. A rank dies at every frame that it sends to another rank, while frames come late
// and twice: the survivors repeat the group, no bit of any logit differs, and nothing is held at the end.

namespace dovetail::test {
namespace {

constexpr int kRanks = 3;
struct Kind {
  const char* name;
  std::filesystem::path (*write)(const std::filesystem::path& folder);
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  bool states = true;  // it has linear layers
  proto::LinearExchange linear = proto::LinearExchange::kChain;
};

template <std::string (*config)()>
std::filesystem::path Hybrid(const std::filesystem::path& folder) {
  return WriteTinyFolder(config(), 7, folder);
}
std::filesystem::path Softmax(const std::filesystem::path& folder) {
  return WriteTinyModel({.layers = 6}, folder.parent_path());
}
std::filesystem::path Windows(const std::filesystem::path& folder) {
  return WriteTinyModel({.architecture = "gemma3", .window = 40}, folder.parent_path());
}

// Four KV heads, which three ranks do not divide.
std::filesystem::path FourHeads(const std::filesystem::path& folder) {
  return WriteTinyModel({.layers = 3, .heads = 8, .kv_heads = 4, .seed = 3}, folder.parent_path());
}
std::filesystem::path WindowsOfThreeHeads(const std::filesystem::path& folder) {
  return WriteTinyModel({.architecture = "gemma3", .heads = 6, .kv_heads = 3, .window = 40, .seed = 4},
                        folder.parent_path());
}
std::filesystem::path HybridOfFourHeads(const std::filesystem::path& folder) {
  return WriteTinyFolder(
      absl::StrReplaceAll(TinyGatedDeltaConfig(), {{"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"}}), 7,
      folder);
}

std::filesystem::path LightningOfFourHeads(const std::filesystem::path& folder) {
  return WriteTinyFolder(
      absl::StrReplaceAll(TinyLightningConfig(), {{"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"}}), 7,
      folder);
}

class RankExchangeNodes : public testing::TestWithParam<Kind> {
 protected:
  RankExchangeNodes() : model_(GetParam().write(TempFolder() / GetParam().name)) {}

  static void ExpectBytes(const scheduler::SchedulerStats& stats) {
    EXPECT_EQ(stats.prefix_chain_bytes > 0, GetParam().states && GetParam().linear == proto::LinearExchange::kChain);
    EXPECT_EQ(stats.prefix_direct_bytes > 0, GetParam().exchange == proto::PrefixExchange::kGatherDirect);
    EXPECT_EQ(stats.prefix_ring_bytes > 0, GetParam().exchange == proto::PrefixExchange::kRing);
    EXPECT_EQ(stats.prefix_switch_bytes > 0, GetParam().exchange == proto::PrefixExchange::kSwitch);
    EXPECT_EQ(stats.prefix_pass_q_bytes > 0, GetParam().exchange == proto::PrefixExchange::kPassQ);
  }

  // As one compute worker alone gives it.
  Stream Alone(const requests::GenerationRequest& request) {
    RankCluster cluster(model_, {.exchange = proto::PrefixExchange::kAsk, .compute_workers = 1});
    const uint64_t id = cluster.Submit(request);
    EXPECT_TRUE(cluster.UntilFinished(id));
    EXPECT_EQ(cluster.stats().prefill_groups, 0u);
    return cluster.stream(id);
  }

  NodeModel model_;
};

TEST_P(RankExchangeNodes, ARankDiesAtEveryFrameAndNoBitDiffers) {
  const requests::GenerationRequest request = NodeRequest(300, 3, 1);
  const Stream alone = Alone(request);
  ASSERT_EQ(alone.tokens.size(), 3u);
  for (int rank = 0; rank < kRanks; ++rank) {
    bool died = true;
    int deaths = 0, repeated = 0;
    for (int frames = 0; died; ++frames) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " dies after ", frames, " frames to other ranks"));
      RankCluster cluster(model_, {.exchange = GetParam().exchange,
                                   .linear = GetParam().linear,
                                   .compute_workers = kRanks,
                                   .seed = 1 + static_cast<uint64_t>(frames)});
      cluster.port(rank).lives_for = frames;
      const uint64_t id = cluster.Submit(request);
      ASSERT_TRUE(cluster.Until([&] { return cluster.port(rank).dead() || cluster.stream(id).finished; }));
      died = cluster.port(rank).dead();
      if (died) {
        cluster.Lose(rank);
        ++deaths;
      }
      ASSERT_TRUE(cluster.UntilFinished(id));
      ASSERT_TRUE(cluster.stream(id) == alone) << cluster.stream(id).error;
      ExpectBytes(cluster.stats());
      EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.Held();
      repeated += cluster.stats().prefill_groups > 1 ? 1 : 0;
    }
    EXPECT_GE(deaths, 2) << "it sends or answers at least two tensors";
    EXPECT_GE(repeated, 2);
  }
}

// Prompts that begin alike: the later ones begin in the middle, and several groups are in flight at a time, in which a
// compute worker is one rank here and another there.
TEST_P(RankExchangeNodes, SeveralPromptsAndCachedPrefixesWithFramesThatComeLateAndTwice) {
  uint64_t groups = 0;
  // Where all ranks end together, no group begins while the last ranks of another are at work.
  const bool together =
      GetParam().exchange == proto::PrefixExchange::kSwitch || GetParam().exchange == proto::PrefixExchange::kPassQ;
  const uint64_t seeds = together ? 8 : 4;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RankCluster cluster(
        model_, {.exchange = GetParam().exchange, .linear = GetParam().linear, .compute_workers = 4, .seed = seed});
    std::vector<requests::GenerationRequest> requests;
    for (int i = 0; i < 6; ++i) {
      requests.push_back(NodeRequest(250 + 31 * i, 2, /*salt=*/i % 2));
      cluster.Submit(requests.back());
      if (i % 2 == 1) {
        ASSERT_TRUE(cluster.UntilFinished(static_cast<uint64_t>(i)));
      }
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_TRUE(cluster.UntilFinished(i + 1));
      EXPECT_TRUE(cluster.stream(i + 1) == Alone(requests[i])) << "request " << i << cluster.stream(i + 1).error;
    }
    groups += cluster.stats().prefill_groups;
    EXPECT_GT(cluster.stats().prefix_hits, 0u);
    ExpectBytes(cluster.stats());
    EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.Held();
  }
  EXPECT_GE(groups, 6u);
}

class RanksThatGiveBack : public RankExchangeNodes {};

// A prompt of two groups: what later ranks computed in the first one is with all of them in the second.
TEST_P(RanksThatGiveBack, TheNextGroupGathersNothing) {
  const requests::GenerationRequest request = NodeRequest(500, 3, 1);
  const Stream alone = Alone(request);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    RankCluster cluster(model_, {.exchange = GetParam().exchange, .compute_workers = kRanks, .seed = seed});
    const uint64_t id = cluster.Submit(request);
    ASSERT_TRUE(cluster.UntilFinished(id));
    EXPECT_TRUE(cluster.stream(id) == alone) << cluster.stream(id).error;
    const scheduler::SchedulerStats stats = cluster.stats();
    EXPECT_EQ(stats.prefill_groups, 2u);
    EXPECT_EQ(stats.prefill_group_tokens, 500u);
    EXPECT_GT(stats.prefix_direct_bytes, 0u);
    EXPECT_EQ(stats.prefix_gathered_bytes, 0u);
    EXPECT_EQ(stats.prefix_asked_bytes, 0u);
    EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.Held();
  }
}

TEST_P(RanksThatGiveBack, ARankDiesAtEveryFrameAndNoBitDiffers) {
  const requests::GenerationRequest request = NodeRequest(500, 3, 1);
  const Stream alone = Alone(request);
  for (int rank = 0; rank < kRanks; ++rank) {
    bool died = true;
    int deaths = 0;
    for (int frames = 0; died; ++frames) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " dies after ", frames, " frames to other ranks"));
      RankCluster cluster(
          model_,
          {.exchange = GetParam().exchange, .compute_workers = kRanks, .seed = 1 + static_cast<uint64_t>(frames)});
      cluster.port(rank).lives_for = frames;
      const uint64_t id = cluster.Submit(request);
      ASSERT_TRUE(cluster.Until([&] { return cluster.port(rank).dead() || cluster.stream(id).finished; }));
      died = cluster.port(rank).dead();
      if (died) cluster.Lose(rank);
      deaths += died ? 1 : 0;
      ASSERT_TRUE(cluster.UntilFinished(id));
      ASSERT_TRUE(cluster.stream(id) == alone) << cluster.stream(id).error;
      EXPECT_TRUE(cluster.Until([&] { return cluster.Held() == 0; })) << cluster.Held();
    }
    EXPECT_GE(deaths, 10) << "each rank sends or answers so many in two groups";
  }
}

constexpr auto kDirect = proto::PrefixExchange::kGatherDirect, kRing = proto::PrefixExchange::kRing,
               kSwitch = proto::PrefixExchange::kSwitch, kPassQ = proto::PrefixExchange::kPassQ;
constexpr auto kStatesSwitch = proto::LinearExchange::kSwitch;

INSTANTIATE_TEST_SUITE_P(
    Models, RankExchangeNodes,
    testing::Values(Kind{"gated_delta", Hybrid<TinyGatedDeltaConfig>}, Kind{"lightning", Hybrid<TinyLightningConfig>},
                    Kind{"mamba2", Hybrid<TinyMamba2Config>}, Kind{"softmax_direct", Softmax, kDirect, false},
                    Kind{"windows_direct", Windows, kDirect, false}, Kind{"softmax_ring", Softmax, kRing, false},
                    Kind{"windows_ring", Windows, kRing, false},
                    Kind{"gated_delta_ring", Hybrid<TinyGatedDeltaConfig>, kRing},
                    Kind{"softmax_switch", FourHeads, kSwitch, false},
                    Kind{"windows_switch", WindowsOfThreeHeads, kSwitch, false},
                    Kind{"gated_delta_switch", HybridOfFourHeads, kSwitch},
                    Kind{"gated_delta_all_switch", HybridOfFourHeads, kSwitch, true, kStatesSwitch},
                    Kind{"lightning_all_switch", LightningOfFourHeads, kSwitch, true, kStatesSwitch},
                    Kind{"mamba2_all_switch", Hybrid<TinyMamba2Config>, kSwitch, true, kStatesSwitch},
                    Kind{"softmax_pass_q", Softmax, kPassQ, false}, Kind{"windows_pass_q", Windows, kPassQ, false},
                    Kind{"gated_delta_pass_q", Hybrid<TinyGatedDeltaConfig>, kPassQ},
                    Kind{"gated_delta_direct", Hybrid<TinyGatedDeltaConfig>, kDirect},
                    Kind{"lightning_direct", Hybrid<TinyLightningConfig>, kDirect}),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(Models, RanksThatGiveBack,
                         testing::Values(Kind{"softmax", Softmax, kDirect, false},
                                         Kind{"windows", Windows, kDirect, false},
                                         Kind{"gated_delta", Hybrid<TinyGatedDeltaConfig>, kDirect}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
