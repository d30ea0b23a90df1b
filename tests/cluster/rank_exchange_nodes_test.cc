#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "proto/rank_frames.h"
#include "tests/cluster/node_cluster.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// Compute workers that give each other linear states, or K and V, a scheduler and an attention worker, all real nodes,
// in one thread and with time by hand. A rank dies at every frame that it sends to another rank, while frames come late
// and twice: the survivors repeat the group, no bit of any logit differs, and nothing is held at the end.

namespace dovetail::test {
namespace {

constexpr int kRanks = 3;
constexpr uint32_t kBlocks = 20000;
constexpr int kMicroBatches = 16;
constexpr int kStepTokens = 128;

// Sends nothing any more once it has sent so many frames to other ranks: the process ended there.
class MortalPort final : public transport::Port {
 public:
  explicit MortalPort(transport::Port& port) : port_(port) {}
  NodeId id() const override { return port_.id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    return Dies(header) ? absl::OkStatus() : port_.SendMessage(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    return Dies(header) ? absl::OkStatus() : port_.SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override {
    return dead() ? 0 : port_.Poll(handler, max_frames);
  }

  bool dead() const { return rank_frames_ > lives_for; }
  int lives_for = 1 << 30;  // frames to other ranks

 private:
  bool Dies(const proto::FrameHeader& header) {
    if (proto::IsRankFrame(header.type)) ++rank_frames_;
    return dead();
  }

  transport::Port& port_;
  int rank_frames_ = 0;
};

// Node 0 is the scheduler, node 1 the attention worker, node 2 + r compute worker r.
class Cluster {
 public:
  Cluster(NodeModel& model, proto::PrefixExchange exchange, int compute_workers, uint64_t seed = 0) : model_(model) {
    for (int i = 0; i < 2 + compute_workers; ++i) {
      ports_.push_back(fabric_.CreatePort(nullptr));
      faulty_.push_back(std::make_unique<transport::FaultyPort>(*ports_.back(), clock_, seed * 100 + i));
      if (seed > 0)
        faulty_.back()->Set({.duplicate = 0.1, .echo = 0.2, .delay = 0.05, .delay_max = absl::Milliseconds(2)});
      mortal_.push_back(std::make_unique<MortalPort>(*faulty_.back()));
    }
    scheduler::SchedulerOptions options;
    options.max_num_seqs = 8;
    options.max_num_batched_tokens = kStepTokens;
    options.max_model_len = 512;
    options.prefill_rank_tokens = 64;
    options.prefill_ranks = proto::kMaxPrefillRanks;  // whatever is predicted
    options.prefill_exchange = exchange;
    options.linear_exchange = proto::LinearExchange::kChain;
    options.attention = model.table;
    options.model_digest = 7;
    scheduler_ = std::make_unique<scheduler::SchedulerNode>(
        options, 0, *mortal_[0], clock_,
        [this](requests::GenerationUpdate update) { streams_[update.request.value() - 1].Take(std::move(update)); },
        [](const proto::StepResult&, int, int) {});
    attention::AttentionWorkerOptions attention{WorkerId(0), Epoch(1), kBlocks, kMicroBatches};
    attention.model_digest = 7;
    attention_ = *attention::AttentionWorkerNode::Create(model.table, attention, *model.device, *mortal_[1], clock_);
    for (int r = 0; r < compute_workers; ++r) AddCompute(r);
    for (int r = 0; r < compute_workers; ++r)
      for (int other = 0; other < compute_workers; ++other)
        if (other != r) compute_[r]->AddComputeWorker({IdOf(other), Epoch(1), NodeOf(other)});
    scheduler_->AddAttentionWorker(WorkerId(0), Epoch(1), NodeId(1), kBlocks);
  }

  MortalPort& port(int rank) { return *mortal_[2 + rank]; }
  // The scheduler and the others hear that it has gone.
  void Lose(int rank) {
    lost_.insert(rank);
    scheduler_->LoseComputeWorker(IdOf(rank));
    for (int other = 0; other < static_cast<int>(compute_.size()); ++other)
      if (other != rank) compute_[other]->LoseComputeWorker(IdOf(rank), Epoch(1));
  }

  uint64_t Submit(requests::GenerationRequest request) {
    request.id = RequestId(streams_.size() + 1);
    streams_.emplace_back();
    scheduler_->Handle(scheduler::RequestArrived{std::make_shared<requests::GenerationRequest>(std::move(request))});
    return streams_.size();
  }
  // False: not in a time that only a hang takes.
  bool Until(const std::function<bool()>& condition) {
    for (int turn = 0; turn < 100'000; ++turn) {
      if (condition()) return true;
      clock_.now += absl::Microseconds(20);
      scheduler_->Poll();
      attention_->Poll();
      for (int r = 0; r < static_cast<int>(compute_.size()); ++r)
        if (!lost_.contains(r)) compute_[r]->Poll();
    }
    return false;
  }
  bool UntilFinished(uint64_t request) {
    return Until([&] { return streams_[request - 1].finished; });
  }
  const Stream& stream(uint64_t request) { return streams_[request - 1]; }
  scheduler::SchedulerStats stats() const { return scheduler_->stats(); }

  // Blocks, and what survivors keep of ranks and for them.
  uint64_t Held() const {
    uint64_t held = attention_->core().status().blocks_in_use;
    for (int r = 0; r < static_cast<int>(compute_.size()); ++r)
      if (!lost_.contains(r)) held += compute_[r]->core().rank_bytes() + compute_[r]->rank_links().held();
    return held;
  }

 private:
  static WorkerId IdOf(int rank) { return WorkerId(static_cast<uint32_t>(10 + rank)); }
  static NodeId NodeOf(int rank) { return NodeId(static_cast<uint32_t>(2 + rank)); }

  void AddCompute(int rank) {
    compute::ComputeWorkerOptions options;
    options.micro_batches = kMicroBatches;
    options.max_step_tokens = kStepTokens;
    options.vocab_size = static_cast<int32_t>(model_.loaded->config().vocab_size);
    compute_.push_back(std::make_unique<compute::ComputeWorkerNode>(*model_.loaded, model_.table, options, NodeId(0),
                                                                    *model_.device, *mortal_[2 + rank], clock_));
    compute_.back()->AddAttentionWorker({WorkerId(0), Epoch(1), NodeId(1)});
    scheduler_->AddComputeWorker(IdOf(rank), NodeOf(rank));
  }

  NodeModel& model_;
  HandClock clock_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<std::unique_ptr<transport::FaultyPort>> faulty_;
  std::vector<std::unique_ptr<MortalPort>> mortal_;
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::unique_ptr<attention::AttentionWorkerNode> attention_;
  std::vector<std::unique_ptr<compute::ComputeWorkerNode>> compute_;
  std::set<int> lost_;
  std::vector<Stream> streams_;
};

struct Kind {
  const char* name;
  std::filesystem::path (*write)(const std::filesystem::path& folder);
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  bool states = true;  // it has linear layers
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

class RankExchangeNodes : public testing::TestWithParam<Kind> {
 protected:
  RankExchangeNodes() : model_(GetParam().write(TempFolder() / GetParam().name)) {}

  static void ExpectBytes(const scheduler::SchedulerStats& stats) {
    EXPECT_EQ(stats.prefix_chain_bytes > 0, GetParam().states);
    EXPECT_EQ(stats.prefix_direct_bytes > 0, GetParam().exchange == proto::PrefixExchange::kGatherDirect);
    EXPECT_EQ(stats.prefix_ring_bytes > 0, GetParam().exchange == proto::PrefixExchange::kRing);
    EXPECT_EQ(stats.prefix_switch_bytes > 0, GetParam().exchange == proto::PrefixExchange::kSwitch);
    EXPECT_EQ(stats.prefix_pass_q_bytes > 0, GetParam().exchange == proto::PrefixExchange::kPassQ);
  }

  // As one compute worker alone gives it.
  Stream Alone(const requests::GenerationRequest& request) {
    Cluster cluster(model_, proto::PrefixExchange::kAsk, 1);
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
      Cluster cluster(model_, GetParam().exchange, kRanks, /*seed=*/1 + static_cast<uint64_t>(frames));
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
    Cluster cluster(model_, GetParam().exchange, 4, seed);
    std::vector<requests::GenerationRequest> requests;
    for (int i = 0; i < 6; ++i) {
      requests.push_back(NodeRequest(250 + 31 * i, 2, /*salt=*/i % 2));
      cluster.Submit(requests.back());
      if (i % 2 == 1) ASSERT_TRUE(cluster.UntilFinished(static_cast<uint64_t>(i)));
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
    Cluster cluster(model_, GetParam().exchange, kRanks, seed);
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
      Cluster cluster(model_, GetParam().exchange, kRanks, /*seed=*/1 + static_cast<uint64_t>(frames));
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
