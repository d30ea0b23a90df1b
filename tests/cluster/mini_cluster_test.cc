#include "tests/cluster/mini_cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "nlohmann/json.hpp"
#include "tests/cluster/alone.h"
#include "tests/support/test_data.h"

// One body each: over threads of this process, over UCX between such threads, over real processes, and (in a binary of
// its own, since its network is its own) over processes on three hosts whose links are cut and squeezed. Whatever the
// deployment, the lanes, the workers and the placement, what a request gets is to the bit what the embedded engine
// gives it alone.

namespace dovetail::test {
namespace {

struct Place {
  Deployment deployment;
  const char* lanes;
};

std::string NameOfPlace(const testing::TestParamInfo<Place>& info) {
  return absl::StrCat(Name(info.param.deployment), "_", info.param.lanes);
}

// Three hosts, made before anything else starts a thread.
class Network : public testing::Environment {
 public:
  static absl::StatusOr<std::unique_ptr<Hosts>>& hosts() {
    static absl::StatusOr<std::unique_ptr<Hosts>> made = Hosts::Create(3);
    return made;
  }
  void SetUp() override { hosts().status().IgnoreError(); }
};

class MiniClusterTest : public testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    if (GetParam().deployment == Deployment::kHosts && !Network::hosts().ok())
      GTEST_SKIP() << Network::hosts().status().message();
    DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
    folder_ = folder;
    alone_ = std::make_unique<Alone>(folder_ / "stories260K-f32.gguf");
  }

  void DivideAmongWorkersThatComeAndGo(proto::PrefixExchange prefix);

  MiniClusterOptions Options() const {
    MiniClusterOptions options;
    options.deployment = GetParam().deployment;
    options.lanes = GetParam().lanes;
    if (GetParam().deployment == Deployment::kHosts) options.hosts = Network::hosts()->get();
    options.model = folder_ / "stories260K-f32.gguf";
    options.weights = model::WeightFormat::kF32;
    options.kv = DType::kF32;
    options.scheduler.max_model_len = 512;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 128;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    return options;
  }

  static requests::GenerationRequest Request(int prompt, int max_tokens, int salt = 0) {
    requests::GenerationRequest request = GreedyRequest({1, 403, 407, 261, 378}, max_tokens);
    for (int i = 0; static_cast<int>(request.prompt.size()) < prompt; ++i)
      request.prompt.push_back(3 + (17 * i * i + 31 * i + 5 * salt) % 500);
    request.logits_of_output = true;
    return request;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Alone> alone_;
};

TEST_P(MiniClusterTest, TheVectorOfAPromptIsTheSameWhenAWorkerUnderItIsLost) {
  MiniClusterOptions options = Options();
  options.attention_workers = 3;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 12; ++i) {
    requests::GenerationRequest request = Request(400 + i, 0, i);
    request.pooling = i % 3 == 0 ? requests::Pooling::kLast : requests::Pooling::kMean;
    sinks.push_back(Submit((*cluster)->engine(), request));
    requests.push_back(std::move(request));
  }
  ASSERT_EQ(sinks[0]->WaitForEnd(), absl::OkStatus());
  (*cluster)->Stop("a2");  // others are half done
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    EXPECT_FALSE(sinks[i]->pooled().empty());
    alone_->Expect(requests[i], *sinks[i]);
  }
}

// A gap in what has to be there would show as a wrong bit: prompts that share beginnings, samples, several choices,
// cancellation and too little memory at once.
TEST_P(MiniClusterTest, EveryStreamIsToTheBitTheOneItsRequestHasAlone) {
  MiniClusterOptions options = Options();
  options.attention_workers = 3;
  options.scheduler.micro_batches = 2;
  options.kv_bytes = uint64_t{1} << 20;  // about six hundred tokens each: a sequence must be preempted
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();

  std::vector<requests::GenerationRequest> requests;
  for (const auto& [prompt, salt] :
       {std::pair{6, 0}, {200, 1}, {200, 1}, {64, 2}, {130, 3}, {300, 4}, {300, 4}, {1, 5}, {5, 0}, {260, 1}})
    requests.push_back(Request(prompt, 60, salt));
  requests[1].sampling.temperature = 0.9f;
  requests[1].sampling.seed = 11;
  requests[2].choices = 3;
  requests[2].sampling.temperature = 1.1f;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (const auto& request : requests) sinks.push_back(Submit((*cluster)->engine(), request));
  auto cancelled = std::make_shared<cli::CollectingSink>();
  const auto id = (*cluster)->engine().Submit(Request(150, 300, 6), cancelled);
  ASSERT_TRUE(id.ok());
  cancelled->WaitForTokens(4);
  (*cluster)->engine().Cancel(*id);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone_->Expect(requests[i], *sinks[i]);
  }
  cancelled->WaitForEnd().IgnoreError();
  alone_->Expect(Request(150, 300, 6), *cancelled, /*cancelled=*/true);
  // The placements take turns: the fourth finds what the first left behind, whatever was evicted before.
  for (int i = 0; i < 4; ++i) {
    const auto late = Submit((*cluster)->engine(), Request(300, 8, 4));
    ASSERT_EQ(late->WaitForEnd(), absl::OkStatus());
    alone_->Expect(Request(300, 8, 4), *late);
  }

  engine::EngineStats stats;
  EXPECT_TRUE(Eventually([&] {
    stats = (*cluster)->engine().stats();
    return stats.kv_blocks_in_use == 0 && stats.scheduler.running_sequences == 0 && stats.scheduler.prefix_hits > 0;
  })) << stats.kv_blocks_in_use
      << " KV blocks are held after the last request ended";
  // Processes may get the requests so far apart that the first have ended before the memory is full.
  if (GetParam().deployment < Deployment::kProcesses) {
    EXPECT_GT(stats.scheduler.preemptions, 0u);
  }
  EXPECT_GT(stats.scheduler.prefix_hits, 0u);
}

// A grammar's state is made of the token log: a stream that goes on elsewhere goes on with the same tokens.
TEST_P(MiniClusterTest, StructuredOutputIsTheSameAfterAWorkersEnd) {
  MiniClusterOptions options = Options();
  options.compute_workers = options.attention_workers = 2;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(Request(20 + 30 * i, 120, i));
    requests.back().sampling.temperature = 2;
    requests.back().sampling.seed = 100 + i;
    requests.back().sampling.repetition_penalty = i % 2 == 0 ? 1.0f : 1.2f;
    requests.back().choices = i == 3 ? 3 : 1;
    requests.back().stop_token_ids = {2};
    requests.back().sampling.follows_grammar = true;
    requests.back().sampling.grammar = {
        R"(j{"type":"array","items":{"type":"array","items":{"type":"integer"},"minItems":2},"minItems":9})", {2}};
  }
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (const auto& request : requests) sinks.push_back(Submit((*cluster)->engine(), request));
  sinks[0]->WaitForTokens(5);
  (*cluster)->Stop("c1");
  sinks[1]->WaitForTokens(12);
  (*cluster)->Stop("a1");
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("request ", i));
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    alone_->Expect(requests[i], *sinks[i]);
  }
}

TEST_P(MiniClusterTest, SaysTheReferencesGreedyTokens) {
  const auto golden = nlohmann::json::parse(ReadFile(folder_ / "golden.json"));
  MiniClusterOptions options = Options();
  options.attention_workers = 2;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto greedy = golden["greedy_ids"].get<std::vector<TokenId>>();
  for (int placement = 0; placement < 3; ++placement) {
    const auto done = Generate((*cluster)->engine(), GreedyRequest(golden["prompt_ids"].get<std::vector<TokenId>>(),
                                                                   static_cast<int>(greedy.size())));
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_EQ((*done)->choices()[0].tokens, greedy);
  }
}

TEST_P(MiniClusterTest, StreamsGoOnWithTheSameBitsWhileWorkersComeAndGo) {
  const auto cluster = MiniCluster::Start(Options());
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto before = Submit((*cluster)->engine(), Request(100, 250, 1));
  before->WaitForTokens(10);
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a2").ok());
  (*cluster)->Stop("a1");  // what lay on it is computed again on the other
  const auto after = Submit((*cluster)->engine(), Request(70, 250, 2));
  ASSERT_EQ(before->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(100, 250, 1), *before);
  after->WaitForTokens(5);
  (*cluster)->Stop("c1");  // no compute worker is left: the stream waits for the next one
  ASSERT_TRUE((*cluster)->AddComputeWorker("c2").ok());
  ASSERT_EQ(after->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(70, 250, 2), *after);
}

// Three compute workers take each prompt together, in three parts of 192 tokens; one of them goes, another comes.
void MiniClusterTest::DivideAmongWorkersThatComeAndGo(proto::PrefixExchange prefix) {
  MiniClusterOptions options = Options();
  options.scheduler.prefill_exchange = prefix;
  options.attention_workers = 2;
  options.compute_workers = 3;
  options.scheduler.max_num_batched_tokens = 64;
  options.scheduler.prefill_rank_tokens = 64;
  options.scheduler.prefill_ranks = 3;  // whatever is predicted
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto chat = Submit((*cluster)->engine(), Request(5, 400));
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
  submit(3);
  ASSERT_TRUE((*cluster)->AddComputeWorker("c4").ok());
  submit(3);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone_->Expect(requests[i], *sinks[i]);
  }
  ASSERT_EQ(chat->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(5, 400), *chat);
  engine::EngineStats stats;
  EXPECT_TRUE(Eventually([&] {
    stats = (*cluster)->engine().stats();
    return stats.kv_blocks_in_use == 0 && stats.scheduler.running_sequences == 0;
  })) << stats.kv_blocks_in_use;
  EXPECT_GE(stats.scheduler.prefill_groups, 2u);
  // Once rates are known, parts of prompts are predicted: what was forced, and nothing else.
  const bool direct = IsBetweenRanks(prefix);
  for (size_t e = 0; e < stats.scheduler.prefill_times.size(); ++e) {
    const proto::PrefillWay way = proto::WayAt(e);
    if (direct && way == proto::PrefillWay{proto::PrefixExchange::kGather}) continue;  // of parts that one worker took
    EXPECT_EQ(stats.scheduler.prefill_times[e].measured_s > 0, way == proto::PrefillWay{prefix}) << NameOf(way);
  }
  // What does not fit into a scratch is asked about in any case.
  const bool gathers = prefix == proto::PrefixExchange::kGatherDirect || prefix == proto::PrefixExchange::kGather;
  if (gathers || !direct) {
    EXPECT_EQ(stats.scheduler.prefix_gathered_bytes > 0, gathers);
  }
  EXPECT_EQ(stats.scheduler.prefix_direct_bytes > 0, prefix == proto::PrefixExchange::kGatherDirect);
  EXPECT_EQ(stats.scheduler.prefix_pass_q_bytes > 0, prefix == proto::PrefixExchange::kPassQ);
  EXPECT_TRUE(gathers || stats.scheduler.prefix_asked_bytes > 0) << stats.scheduler.prefix_asked_bytes;
}

TEST_P(MiniClusterTest, LongPromptsOverWorkersThatComeAndGoAskAboutEarlierTokens) {
  DivideAmongWorkersThatComeAndGo(proto::PrefixExchange::kAsk);
}

TEST_P(MiniClusterTest, LongPromptsOverWorkersThatComeAndGoGatherEarlierTokens) {
  DivideAmongWorkersThatComeAndGo(proto::PrefixExchange::kGather);
}

TEST_P(MiniClusterTest, LongPromptsOverWorkersThatComeAndGoGiveEachOtherKeysAndValues) {
  DivideAmongWorkersThatComeAndGo(proto::PrefixExchange::kGatherDirect);
}

TEST_P(MiniClusterTest, LongPromptsOverWorkersThatComeAndGoAskEachOther) {
  DivideAmongWorkersThatComeAndGo(proto::PrefixExchange::kPassQ);
}

// The small worker holds 320 tokens, the large one 640. While the first request fills the large one, the second begins
// on the small one and outgrows it. On a busy machine the first may have ended before the second comes: then others
// try.
TEST_P(MiniClusterTest, AStreamThatOutgrowsItsWorkerGoesOnWhereItFits) {
  MiniClusterOptions options = Options();
  options.scheduler.placement = scheduler::PlacementPolicy::kRequest;
  options.kv_bytes = 600 << 10;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a2", 1200 << 10).ok());
  constexpr int kTries = 20;
  const auto outgrown = [&] { return (*cluster)->engine().stats().scheduler.preemptions > 0; };
  for (int salt = 1; salt < 2 * kTries && !outgrown(); salt += 2) {
    const auto first = Submit((*cluster)->engine(), Request(330, 180, salt));
    first->WaitForTokens(1);
    const auto second = Submit((*cluster)->engine(), Request(100, 340, salt + 1));
    ASSERT_EQ(first->WaitForEnd(), absl::OkStatus());
    alone_->Expect(Request(330, 180, salt), *first);
    ASSERT_EQ(second->WaitForEnd(), absl::OkStatus());
    alone_->Expect(Request(100, 340, salt + 1), *second);
  }
  EXPECT_TRUE(outgrown()) << "no second request began on the small worker";
}

TEST_P(MiniClusterTest, ASequenceThatNoWorkerHoldsBeginsOnOneAndContinuesOnAnother) {
  MiniClusterOptions options = Options();
  options.scheduler.placement = scheduler::PlacementPolicy::kTiers;
  options.attention_workers = 2;
  options.kv_bytes = 600 << 10;  // some 350 tokens
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto sink = Submit((*cluster)->engine(), Request(330, 180));
  ASSERT_EQ(sink->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(330, 180), *sink);
  EXPECT_EQ((*cluster)->engine().stats().scheduler.preemptions, 0u);
}

// Nothing is computed twice: the KV travels.
TEST_P(MiniClusterTest, ADrainedWorkerGivesWhatItHoldsToTheOthersWhileStreamsGoOn) {
  MiniClusterOptions options = Options();
  options.attention_workers = 3;
  options.scheduler.micro_batches = 2;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(Request(30 + 40 * i, 240, i));
    if (i == 2) requests.back().choices = 2;
    sinks.push_back(Submit((*cluster)->engine(), requests.back()));
  }
  for (const auto& sink : sinks) sink->WaitForTokens(2);
  ASSERT_TRUE((*cluster)->Drain("a2").ok());
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a4").ok());
  ASSERT_TRUE((*cluster)->Drain("a1").ok());
  EXPECT_EQ((*cluster)->Find((*cluster)->status(), "a1"), nullptr);
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone_->Expect(requests[i], *sinks[i]);
  }
  // Processes on a busy machine may take each other for dead.
  if (GetParam().deployment < Deployment::kProcesses) {
    EXPECT_EQ((*cluster)->engine().stats().scheduler.preemptions, 0u);
  }
  EXPECT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
}

#ifdef DOVETAIL_OVER_HOSTS
const testing::Environment* const kNetwork = testing::AddGlobalTestEnvironment(new Network);

class MiniClusterOverHosts : public MiniClusterTest {};

TEST_P(MiniClusterOverHosts, AHostThatIsCutOffIsReplacedWithTheSameBitsAndComesBack) {
  Hosts& hosts = **Network::hosts();
  MiniClusterOptions options = Options();
  options.attention_workers = 3;
  options.lease = absl::Seconds(1);
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto number_of_a1 = [&]() -> int64_t {
    const auto status = (*cluster)->status();
    const auto* worker = (*cluster)->Find(status, "a1");
    return worker == nullptr || worker->state() != "serving" ? -1 : static_cast<int64_t>(worker->worker());
  };
  const int64_t before = number_of_a1();
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 4; ++i) sinks.push_back(Submit((*cluster)->engine(), Request(40 + 30 * i, 300, i)));
  for (const auto& sink : sinks) sink->WaitForTokens(3);
  ASSERT_TRUE(hosts.Cut(1));
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    alone_->Expect(Request(40 + 30 * static_cast<int>(i), 300, static_cast<int>(i)), *sinks[i]);
  }
  EXPECT_TRUE(Eventually([&] { return number_of_a1() < 0; }));
  ASSERT_TRUE(hosts.Mend(1));
  EXPECT_TRUE(Eventually([&] { return number_of_a1() > before; }));
  const auto after = Submit((*cluster)->engine(), Request(90, 60, 9));
  ASSERT_EQ(after->WaitForEnd(), absl::OkStatus());
  alone_->Expect(Request(90, 60, 9), *after);
}

TEST_P(MiniClusterOverHosts, StreamsOverASqueezedLinkHaveTheSameBits) {
  MiniClusterOptions options = Options();
  options.attention_workers = 3;
  const auto cluster = MiniCluster::Start(options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  if (!(*Network::hosts())->Squeeze(2, "4mbit")) GTEST_SKIP() << "no token bucket in this kernel (tc qdisc ... tbf)";
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  for (int i = 0; i < 4; ++i) sinks.push_back(Submit((*cluster)->engine(), Request(20 + 9 * i, 40, i)));
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    alone_->Expect(Request(20 + 9 * static_cast<int>(i), 40, static_cast<int>(i)), *sinks[i]);
  }
}

constexpr Place kOverHosts{Deployment::kHosts, "tcp"};
INSTANTIATE_TEST_SUITE_P(Deployments, MiniClusterTest, testing::Values(kOverHosts), NameOfPlace);
INSTANTIATE_TEST_SUITE_P(Deployments, MiniClusterOverHosts, testing::Values(kOverHosts), NameOfPlace);
#else
INSTANTIATE_TEST_SUITE_P(Deployments, MiniClusterTest,
                         testing::Values(Place{Deployment::kThreads, "memory"}, Place{Deployment::kUcxThreads, "shm"},
                                         Place{Deployment::kUcxThreads, "tcp"}, Place{Deployment::kProcesses, "shm"},
                                         Place{Deployment::kProcesses, "tcp"}),
                         NameOfPlace);
#endif

}  // namespace
}  // namespace dovetail::test
