#include <gtest/gtest.h>

#include "tests/cluster/alone.h"
#include "tests/cluster/mini_cluster.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/support/test_data.h"

// Linear states in a cluster: what a request gets is to the bit what the embedded engine gives it alone, though workers
// die, are stopped, come and are drained while it runs.

namespace dovetail::test {
namespace {

struct Hybrid {
  const char* name;
  std::string (*config)();
  Deployment deployment;
  const char* lanes;
  DType state = DType::kF32;
};

class MiniClusterHybrid : public testing::TestWithParam<Hybrid> {
 protected:
  void SetUp() override {
    folder_ = WriteTinyFolder(GetParam().config(), 7, TempFolder() / GetParam().name);
    alone_ = std::make_unique<Alone>(folder_, GetParam().state);
  }

  MiniClusterOptions Options() const {
    MiniClusterOptions options;
    options.deployment = GetParam().deployment;
    options.lanes = GetParam().lanes;
    options.model = folder_;
    options.weights = model::WeightFormat::kF32;
    options.kv = DType::kF32;
    options.state = GetParam().state;
    options.scheduler.max_model_len = 512;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 128;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    return options;
  }

  void DivideAmongWorkersThatComeAndGo(proto::LinearExchange exchange,
                                       proto::PrefixExchange softmax = proto::PrefixExchange::kAsk);

  static requests::GenerationRequest Request(int prompt, int max_tokens, int salt) {
    requests::GenerationRequest request = GreedyRequest({1}, max_tokens);
    for (int i = 1; i < prompt; ++i) request.prompt.push_back(3 + (17 * i * i + 31 * i + 5 * salt) % 90);
    request.logits_of_output = true;
    return request;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Alone> alone_;
};

TEST_P(MiniClusterHybrid, StreamsGoOnWithTheSameBitsWhileStateWorkersComeAndGo) {
  MiniClusterOptions options = Options();
  options.attention_workers = 2;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 3; ++i) {
    requests.push_back(Request(40 + 70 * i, 200, i));
    sinks.push_back(Submit((*cluster)->engine(), requests.back()));
  }
  for (const auto& sink : sinks) sink->WaitForTokens(10);
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a3").ok());
  (*cluster)->Stop("a1");  // its states are computed again from the token log
  for (const auto& sink : sinks) sink->WaitForTokens(60);
  ASSERT_TRUE((*cluster)->Drain("a2").ok());
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone_->Expect(requests[i], *sinks[i]);
  }
  EXPECT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
}

// Three compute workers divide each prompt; one of them goes, another comes, and an attention worker goes.
void MiniClusterHybrid::DivideAmongWorkersThatComeAndGo(proto::LinearExchange exchange, proto::PrefixExchange softmax) {
  MiniClusterOptions options = Options();
  options.scheduler.prefill_exchange = softmax;
  options.scheduler.linear_exchange = exchange;
  options.attention_workers = 2;
  options.compute_workers = 3;
  options.scheduler.max_num_batched_tokens = 64;
  options.scheduler.prefill_rank_tokens = 64;
  // Whatever is predicted; these models have two KV heads.
  options.scheduler.prefill_ranks = softmax == proto::PrefixExchange::kSwitch ? 2 : 3;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  const auto submit = [&](int prompts) {
    for (int i = 0; i < prompts; ++i) {
      requests.push_back(Request(380 + 7 * i, 6, static_cast<int>(requests.size()) + 1));
      sinks.push_back(Submit((*cluster)->engine(), requests.back()));
    }
  };
  submit(1);
  ASSERT_EQ(sinks[0]->WaitForEnd(), absl::OkStatus());  // alone, it has all three
  submit(4);
  sinks[1]->WaitForTokens(1);
  (*cluster)->Stop("c2");
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a3").ok());
  submit(3);
  ASSERT_TRUE((*cluster)->AddComputeWorker("c4").ok());
  sinks[5]->WaitForTokens(1);
  (*cluster)->Stop("a1");
  submit(3);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone_->Expect(requests[i], *sinks[i]);
  }
  engine::EngineStats stats;
  EXPECT_TRUE(Eventually([&] {
    stats = (*cluster)->engine().stats();
    return stats.kv_blocks_in_use == 0 && stats.scheduler.running_sequences == 0;
  })) << stats.kv_blocks_in_use;
  EXPECT_GE(stats.scheduler.prefill_groups, 2u);
  EXPECT_GT(stats.scheduler.prefix_state_bytes, 0u);
  EXPECT_EQ(stats.scheduler.prefix_chain_bytes > 0, exchange == proto::LinearExchange::kChain);
  EXPECT_EQ(stats.scheduler.prefix_switch_bytes > 0, exchange == proto::LinearExchange::kSwitch);
}

TEST_P(MiniClusterHybrid, StatesGoFromRankToRankByWayOfAttentionWorkersWhileWorkersComeAndGo) {
  DivideAmongWorkersThatComeAndGo(proto::LinearExchange::kStates);
}

TEST_P(MiniClusterHybrid, StatesGoFromRankToRankItselfWhileWorkersComeAndGo) {
  DivideAmongWorkersThatComeAndGo(proto::LinearExchange::kChain);
}

TEST_P(MiniClusterHybrid, KeysAndValuesAndStatesGoFromRankToRankWhileWorkersComeAndGo) {
  DivideAmongWorkersThatComeAndGo(proto::LinearExchange::kChain, proto::PrefixExchange::kGatherDirect);
}

TEST_P(MiniClusterHybrid, QueriesAndStatesGoFromRankToRankWhileWorkersComeAndGo) {
  DivideAmongWorkersThatComeAndGo(proto::LinearExchange::kChain, proto::PrefixExchange::kPassQ);
}

TEST_P(MiniClusterHybrid, RanksExchangeTokensForHeadsInAllLayersWhileWorkersComeAndGo) {
  DivideAmongWorkersThatComeAndGo(proto::LinearExchange::kSwitch, proto::PrefixExchange::kSwitch);
}

INSTANTIATE_TEST_SUITE_P(
    Models, MiniClusterHybrid,
    testing::Values(Hybrid{"gated_delta_threads", TinyGatedDeltaConfig, Deployment::kThreads, "memory"},
                    Hybrid{"lightning_threads", TinyLightningConfig, Deployment::kThreads, "memory"},
                    Hybrid{"mamba2_threads", TinyMamba2Config, Deployment::kThreads, "memory"},
                    Hybrid{"gated_delta_processes", TinyGatedDeltaConfig, Deployment::kProcesses, "shm"},
                    Hybrid{"lightning_tcp", TinyLightningConfig, Deployment::kProcesses, "tcp"},
                    Hybrid{"gated_delta_bf16_threads", TinyGatedDeltaConfig, Deployment::kThreads, "memory",
                           DType::kBF16},
                    Hybrid{"mamba2_bf16_processes", TinyMamba2Config, Deployment::kProcesses, "shm", DType::kBF16}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
