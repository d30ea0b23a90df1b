#include "scheduler/core/chunk_budget.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/scheduler/small_cluster.h"

namespace dovetail::scheduler {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::IsEmpty;
using ::testing::Le;

constexpr ItlBudget kAuto{.automatic = true};

// ---- the function ----

// A millisecond a token.
Position Tokens(Position ctx_len, Position left, Position most, double seconds, Position least = 64) {
  return ChunkTokens({.ctx_len = ctx_len, .left = left, .most = most, .least = least, .seconds = seconds},
                     [](Position tokens) { return 1e-3 * static_cast<double>(tokens); });
}

TEST(ChunkTokens, AreAsManyAsTheTimeAllowsUpToAMultipleOf64) {
  EXPECT_EQ(Tokens(0, 10000, 8192, 0.300), 256);
  EXPECT_EQ(Tokens(0, 10000, 8192, 0.320), 320);
  EXPECT_EQ(Tokens(100, 10000, 8192, 0.300), 284) << "up to 384";
  EXPECT_EQ(Tokens(0, 10000, 500, 9), 448) << "the step has room for no more";
  EXPECT_EQ(Tokens(0, 500, 8192, 9), 500) << "the prompt's end is an end, too";
  EXPECT_EQ(Tokens(0, 500, 8192, 0.499), 448);
}

TEST(ChunkTokens, AreAtLeastTheLeast) {
  EXPECT_EQ(Tokens(0, 10000, 8192, 0), 64);
  EXPECT_EQ(Tokens(10, 10000, 8192, 0), 118) << "54 would be too few, and what follows ends on a multiple of 64";
  EXPECT_EQ(Tokens(0, 10, 8192, 0), 10) << "no more are left";
  EXPECT_EQ(Tokens(0, 100, 40, 0), 40) << "the step has room for no more";
  EXPECT_EQ(Tokens(64, 10000, 8192, 0.010, /*least=*/0), 0) << "others have had theirs";
  EXPECT_EQ(Tokens(0, 100, 40, 0.010, /*least=*/0), 0);
  EXPECT_EQ(Tokens(0, 10000, 0, 1), 0);
}

TEST(ChunkTokens, AreFewerFarIntoAPrompt) {
  const auto with_attention = [](Position ctx_len) {
    return ChunkTokens({.ctx_len = ctx_len, .left = 100000, .most = 8192, .least = 64, .seconds = 0.1},
                       [&](Position tokens) {
                         const auto n = static_cast<double>(tokens);
                         return n * 1e-4 + n * (static_cast<double>(ctx_len) + n / 2) * 1e-8;
                       });
  };
  EXPECT_EQ(with_attention(0), 896);
  EXPECT_EQ(with_attention(10240), 448);
  EXPECT_EQ(with_attention(102400), 64);
}

TEST(ChunkSeconds, AreWhatTheBudgetLeavesBesideTheStreamsOwnStep) {
  constexpr double kNoBound = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ChunkSeconds({}, 0.010, 0), kNoBound);
  EXPECT_DOUBLE_EQ(ChunkSeconds({.seconds = 0.050}, 0.010, 0), 0.040);
  EXPECT_EQ(ChunkSeconds({.seconds = 0.050}, 0.060, 0), 0) << "the least chunk goes all the same";
  EXPECT_DOUBLE_EQ(ChunkSeconds({.seconds = 0.050}, 0.010, 0.9), 0.040) << "what was asked for is kept";
  EXPECT_NEAR(ChunkSeconds(kAuto, 0.010, 0), 0.004, 1e-12);
  EXPECT_EQ(ChunkSeconds(kAuto, 0, 0), kNoBound) << "how long streams take is not known yet";
  EXPECT_NEAR(ChunkSeconds(kAuto, 0.010, 0.5), 0.010, 1e-12) << "half of the time is for prompts";
  EXPECT_EQ(ChunkSeconds(kAuto, 0.010, 1.5), kNoBound) << "prompts cannot be in time";
}

TEST(ShareFor, IsWhatTheMostUrgentPromptsNeedOneAfterTheOther) {
  EXPECT_EQ(ShareFor({}), 0);
  const std::vector<PromptClaim> claims = {{1, 8}, {1, 16}, {6, 16}};
  EXPECT_DOUBLE_EQ(ShareFor(claims), 0.5);
  const std::vector<PromptClaim> overdue = {{1, -2}, {1, 16}};
  EXPECT_EQ(ShareFor(overdue), std::numeric_limits<double>::infinity());
}

TEST(StreamPace, IsTheMedianOfTheLastSteps) {
  StreamPace pace;
  EXPECT_EQ(pace.Of(WorkerId(1)), 0);
  for (const double seconds : {0.010, 0.011, 0.500}) pace.Note(WorkerId(1), seconds);
  EXPECT_DOUBLE_EQ(pace.Of(WorkerId(1)), 0.011);
  pace.Forget(WorkerId(1));
  EXPECT_EQ(pace.Of(WorkerId(1)), 0);
}

// A step with 10 ms of prompts took 7 ms longer than without.
TEST(StreamPace, KnowsWhatHidesBehindAStepThatWaitsForMemory) {
  StreamPace pace;
  pace.NoteAdded(WorkerId(1), 0.010, 0.007);
  EXPECT_EQ(pace.Hidden(WorkerId(1)), 0) << "the pace is not known";
  pace.Note(WorkerId(1), 0.005);
  pace.NoteAdded(WorkerId(1), 0.010, 0.007);
  EXPECT_NEAR(pace.Hidden(WorkerId(1)), 0.003, 1e-12);
  for (int i = 0; i < 20; ++i) pace.NoteAdded(WorkerId(1), 0.500, 0.400);
  EXPECT_NEAR(pace.Hidden(WorkerId(1)), 0.003, 1e-12) << "that prompt is too long to learn from";
  for (int i = 0; i < 20; ++i) pace.NoteAdded(WorkerId(1), 0.010, 0.001);
  EXPECT_NEAR(pace.Hidden(WorkerId(1)), 0.005, 1e-12) << "no more than there is";
  for (int i = 0; i < 20; ++i) pace.NoteAdded(WorkerId(1), 0.010, 0.020);
  EXPECT_LT(pace.Hidden(WorkerId(1)), 1e-6);
}

// ---- in the scheduler ----

// A step takes 10 ms and 20 us for each token: by default, prompts may take 4 ms of it, or 200 tokens.
class ItlBudgetTest : public testing::Test {
 protected:
  static ClusterOptions Options(ItlBudget budget = kAuto) {
    ClusterOptions options = SmallCluster();
    options.scheduler.max_model_len = 65536;
    options.scheduler.max_num_batched_tokens = 2048;
    options.scheduler.prefill_itl_budget = budget;
    options.step_base = absl::Milliseconds(10);
    options.step_per_token = absl::Microseconds(20);
    options.reports_work = true;
    return options;
  }

  struct Part {
    RequestId of;
    Position begin, end;
    size_t others;  // entries beside it
    bool last;
  };
  // Of prompts, from now on.
  void Watch(FakeCluster& cluster) {
    cluster.on_action = [&](const Action& action) {
      const auto* run = std::get_if<RunStep>(&action);
      if (run == nullptr) return;
      for (const proto::StepEntry& entry : run->plan.entries) {
        const auto tokens = static_cast<Position>(entry.tokens.size());
        if (tokens > 1)
          parts_.push_back({{}, entry.ctx_len, entry.ctx_len + tokens, run->plan.entries.size() - 1, entry.sample});
      }
    };
  }
  // Streams that go on for long, of which all have begun and their pace is known.
  static void BeginStreams(FakeCluster& cluster, int streams, const std::string& tenant = "a") {
    std::vector<RequestId> ids;
    for (int i = 0; i < streams; ++i) ids.push_back(cluster.Submit(Ask(100, 3000, tenant, /*seed=*/100 + i)));
    for (const RequestId id : ids)
      while (cluster.stream(id).tokens.size() < 20) ASSERT_TRUE(cluster.RunOne());
  }
  static void RunUntilToken(FakeCluster& cluster, RequestId id) {
    while (cluster.stream(id).tokens.empty()) ASSERT_TRUE(cluster.RunOne());
  }
  std::vector<Position> Tokens() const {
    std::vector<Position> tokens;
    for (const Part& part : parts_) tokens.push_back(part.end - part.begin);
    return tokens;
  }

  std::vector<Part> parts_;
};

TEST_F(ItlBudgetTest, APromptGetsWhatStreamsCanBearAndTheyRideInTheSameSteps) {
  FakeCluster cluster(Options());
  BeginStreams(cluster, 3);
  Watch(cluster);
  const RequestId id = cluster.Submit(Ask(6000, 2));
  RunUntilToken(cluster, id);
  ASSERT_GT(parts_.size(), 10u);
  for (const Part& part : parts_) {
    EXPECT_EQ(part.others, 3u);
    EXPECT_TRUE(part.end % 64 == 0 || part.last) << part.end;
    EXPECT_GE(part.end - part.begin, part.last ? 1 : 64);
    EXPECT_LE(part.end - part.begin, 256);
  }
  EXPECT_EQ(parts_.back().end, 6000);
  const std::vector<Position> tokens = Tokens();
  EXPECT_THAT(std::vector(tokens.begin() + 8, tokens.end() - 1), Each(192)) << "200, up to a multiple of 64";
  EXPECT_GE(cluster.core().stats().shortened_chunks, tokens.size() - 2);
  EXPECT_THAT(cluster.violations(), IsEmpty());
}

// Its compute worker attends to no prompt, though it could. Without that being known it gets 256 tokens for good.
TEST_F(ItlBudgetTest, APromptThatLiesInAPairGetsThatToo) {
  ClusterOptions options = Options();
  options.compute_workers = options.pairs = 1;
  options.attends_in_pairs = true;
  options.step_per_token = absl::Microseconds(5);
  options.scheduler.run_ahead = true;
  FakeCluster cluster(options);
  BeginStreams(cluster, 3);
  parts_.clear();
  Watch(cluster);
  RunUntilToken(cluster, cluster.Submit(Ask(9000, 2)));
  const std::vector<Position> tokens = Tokens();
  EXPECT_EQ(*std::max_element(tokens.begin(), tokens.end()), 768) << "800, up to a multiple of 64";
  for (const Part& part : parts_) EXPECT_EQ(part.others, 3u);
  EXPECT_THAT(cluster.violations(), IsEmpty());
}

TEST_F(ItlBudgetTest, WithoutStreamsOrWithoutABudgetChunksAreAsLargeAsSteps) {
  for (const bool on : {true, false}) {
    FakeCluster cluster(Options(on ? kAuto : ItlBudget{}));
    if (!on) BeginStreams(cluster, 3);
    parts_.clear();
    Watch(cluster);
    RunUntilToken(cluster, cluster.Submit(Ask(6000, 2)));
    EXPECT_EQ(Tokens(), on ? (std::vector<Position>{2048, 2048, 1904}) : (std::vector<Position>{2045, 2045, 1910}));
    EXPECT_EQ(cluster.core().stats().shortened_chunks, 0u);
  }
}

TEST_F(ItlBudgetTest, AGivenBudgetIsKept) {
  FakeCluster cluster(Options({.seconds = 0.030}));
  BeginStreams(cluster, 2);
  Watch(cluster);
  RunUntilToken(cluster, cluster.Submit(Ask(40000, 2)));
  const std::vector<Position> tokens = Tokens();
  ASSERT_GT(tokens.size(), 30u);
  // 10 ms, and 20 ms for 1000 tokens less those of the streams.
  EXPECT_THAT(std::vector(tokens.begin() + 12, tokens.end() - 1), Each(AllOf(Ge(896), Le(998))));
}

TEST_F(ItlBudgetTest, ABudgetBelowTheStreamsOwnStepLeavesTheLeastChunk) {
  FakeCluster cluster(Options({.seconds = 0.001}));
  BeginStreams(cluster, 2);
  Watch(cluster);
  RunUntilToken(cluster, cluster.Submit(Ask(1000, 2)));
  const std::vector<Position> tokens = Tokens();
  EXPECT_THAT(std::vector(tokens.begin(), tokens.end() - 1), Each(64));
}

TEST_F(ItlBudgetTest, ChunksFollowTheWorkersSpeed) {
  FakeCluster cluster(Options({.seconds = 0.030}));
  BeginStreams(cluster, 2);
  Watch(cluster);
  const RequestId id = cluster.Submit(Ask(60000, 2));
  while (parts_.size() < 20) ASSERT_TRUE(cluster.RunOne());
  EXPECT_THAT(Tokens().back(), AllOf(Ge(896), Le(998)));
  cluster.Slow(WorkerId(100), 4);
  while (parts_.size() < 60) ASSERT_TRUE(cluster.RunOne());
  EXPECT_THAT(Tokens().back(), AllOf(Ge(128), Le(256))) << "80 us a token";
  cluster.Slow(WorkerId(100), 1);
  while (parts_.size() < 90) ASSERT_TRUE(cluster.RunOne());
  EXPECT_THAT(Tokens().back(), AllOf(Ge(832), Le(998)));
  RunUntilToken(cluster, id);
}

TEST_F(ItlBudgetTest, BeforeRatesAreKnownAChunkIsSmall) {
  ClusterOptions options = Options();
  options.reports_work = false;
  FakeCluster cluster(options);
  BeginStreams(cluster, 2);
  Watch(cluster);
  RunUntilToken(cluster, cluster.Submit(Ask(1000, 2)));
  EXPECT_THAT(Tokens(), ElementsAre(256, 256, 256, 232));
}

TEST_F(ItlBudgetTest, PromptsOfTwoTenantsShareWhatThereIs) {
  FakeCluster cluster(Options({.seconds = 0.030}));
  BeginStreams(cluster, 2);
  cluster.Submit(Ask(30000, 2, "a", 1));
  cluster.Submit(Ask(30000, 2, "b", 2));
  Watch(cluster);
  while (parts_.size() < 50) ASSERT_TRUE(cluster.RunOne());
  EXPECT_NEAR(static_cast<double>(parts_[48].end), static_cast<double>(parts_[49].end), 1000) << "they take turns";
  for (const Part& part : parts_) EXPECT_LE(part.end - part.begin, 998);
}

TEST_F(ItlBudgetTest, PromptsThatWouldTakeTooLongComeFirst) {
  FakeCluster cluster(Options());
  BeginStreams(cluster, 2);
  std::vector<RequestId> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(cluster.Submit(Ask(4000, 2, "a", 10 + i)));
  const absl::Time begun = cluster.now();
  for (const RequestId id : ids) RunUntilToken(cluster, id);
  // 160,000 tokens take 3.2 s of the worker alone; with 192 tokens in a step of 14 ms they would take 11.7.
  EXPECT_LT(cluster.now() - begun, absl::Seconds(5));
}

TEST_F(ItlBudgetTest, SuperChunksOfGroupsAreShortenedToo) {
  ClusterOptions options = Options({.seconds = 0.030});
  options.compute_workers = 2;
  options.scheduler.prefill_rank_tokens = 64;
  FakeCluster cluster(options);
  BeginStreams(cluster, 4);
  Watch(cluster);
  const RequestId id = cluster.Submit(Ask(40000, 2));
  RunUntilToken(cluster, id);
  EXPECT_GT(cluster.groups, 10);
  const std::vector<Position> tokens = Tokens();
  ASSERT_GT(tokens.size(), 30u);
  EXPECT_THAT(std::vector(tokens.begin() + 10, tokens.end() - 4), Each(AllOf(Ge(64), Le(1024))))
      << "20 ms of each rank";
  EXPECT_THAT(cluster.violations(), IsEmpty());
}

TEST(ItlBudgetOptions, ABudgetThatIsNoTimeIsRefused) {
  SchedulerOptions options;
  options.attention = SmallTable();
  options.prefill_itl_budget.seconds = -0.5;
  EXPECT_THAT(std::string(options.Validate().message()),
              testing::HasSubstr("--prefill-itl-budget: -500 ms is no time; give milliseconds, auto, or 0"));
}

}  // namespace
}  // namespace dovetail::scheduler
