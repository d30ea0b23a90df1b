// A prompt that does not fit one group: how large its groups are. None of them is a rest of a few tokens.
#include <algorithm>
#include <random>
#include <vector>

#include "scheduler/core/prefill_plan.h"
#include "scheduler/core/prefill_planner.h"
#include "scheduler/core/prefill_table.h"
#include "tests/scheduler/small_cluster.h"

namespace dovetail::scheduler {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;

struct Sizes {
  Position base = 0, tokens = 0;
  int ranks = 2, most_tokens = 512, rank_tokens = 64;
};

// The cuts of each step in turn.
std::vector<std::vector<Position>> StepsOf(const Sizes& sizes, std::span<const double> speeds = {}) {
  std::vector<std::vector<Position>> steps;
  const Position end = sizes.base + sizes.tokens;
  for (Position base = sizes.base; base < end; base = steps.back().back()) {
    const int ranks = RanksFor(end - base, sizes.tokens, sizes.rank_tokens, sizes.most_tokens, sizes.ranks);
    const PrefillCutOptions options{.most_tokens = sizes.most_tokens, .speeds = speeds};
    if (ranks == 1)
      steps.push_back({base, std::min(end, base + sizes.most_tokens)});
    else
      steps.push_back(CutPrefill(base, EndOfGroup(base, end, ranks, options), ranks, options));
  }
  return steps;
}

std::vector<Position> TokensOf(const std::vector<std::vector<Position>>& steps) {
  std::vector<Position> tokens;
  for (const std::vector<Position>& cuts : steps) tokens.push_back(cuts.back() - cuts.front());
  return tokens;
}

TEST(PrefillSizes, A128000TokenPromptOnTwoRanksHasNoRest) {
  Sizes sizes{.tokens = 128000, .most_tokens = 65472, .rank_tokens = 1024};
  EXPECT_THAT(StepsOf(sizes), ElementsAre(ElementsAre(0, 65472, 128000)));
  // The second is slower: the two do 126,784 tokens in the time of a step, which left 1,216 for a step of their own.
  const std::vector<double> speeds = {1, 0.9365};
  EXPECT_THAT(StepsOf(sizes, speeds), ElementsAre(ElementsAre(0, 65472, 128000)));
  sizes.most_tokens = 8192;
  EXPECT_THAT(TokensOf(StepsOf(sizes)), ElementsAre(16000, 16000, 16000, 16000, 16000, 16000, 16000, 16000));
  const Sizes four{.tokens = 65000, .ranks = 4, .most_tokens = 16384, .rank_tokens = 1024};
  EXPECT_THAT(TokensOf(StepsOf(four)), ElementsAre(65000));
}

TEST(PrefillSizes, ASlowRankMakesGroupsSmallerButNotForASmallRest) {
  const std::vector<double> speeds = {1, 0.5};  // 768 tokens at a time
  EXPECT_THAT(TokensOf(StepsOf({.tokens = 768}, speeds)), ElementsAre(768));
  EXPECT_THAT(TokensOf(StepsOf({.tokens = 768 + 96}, speeds)), ElementsAre(864));
  EXPECT_THAT(TokensOf(StepsOf({.tokens = 768 + 97}, speeds)), ElementsAre(448, 417));
  EXPECT_THAT(TokensOf(StepsOf({.tokens = 2 * 768 + 96}, speeds)), ElementsAre(832, 800));
}

// What is left at the end has less than rank_tokens for each of them.
TEST(PrefillSizes, TheLastGroupHasAsManyRanksAsThePromptHad) {
  for (const std::vector<Position>& cuts :
       StepsOf({.tokens = 4096 + 64, .ranks = 4, .most_tokens = 512, .rank_tokens = 1024}))
    EXPECT_THAT(cuts, SizeIs(5));
  EXPECT_EQ(RanksFor(2047, 2047, 1024, 512, 4), 1);
  EXPECT_EQ(RanksFor(2048, 2048, 1024, 512, 4), 2);
  EXPECT_EQ(RanksFor(1024, 2048, 1024, 512, 4), 2);
  EXPECT_EQ(RanksFor(255, 4096, 1024, 512, 4), 1) << "less than a quarter of a step for each of two";
  EXPECT_EQ(RanksFor(256, 4096, 1024, 512, 4), 2);
  EXPECT_EQ(RanksFor(1, 1 << 20, 64, 32, 16), 1);
}

// By the number of tokens that groups could take if each were full.
int FewestGroups(const Sizes& sizes) {
  const Position aligned = sizes.most_tokens / 64 * 64;
  int groups = 0;
  for (Position base = sizes.base, end = base + sizes.tokens; base < end; ++groups) {
    const Position full = (base + sizes.most_tokens) / 64 * 64 + (sizes.ranks - 1) * aligned;
    base = full + sizes.most_tokens % 64 >= end ? end : full;  // the last rank of all need not end on a segment
  }
  return groups;
}

TEST(PrefillSizes, GroupsAreAsFewAsCanBeAndAboutEqual) {
  constexpr uint64_t kSeed = 60;
  std::mt19937_64 random(kSeed);
  const auto draw = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(random); };
  for (int round = 0; round < 20000; ++round) {
    Sizes sizes;
    sizes.ranks = static_cast<int>(draw(2, 16));
    sizes.most_tokens = static_cast<int>(draw(0, 3) > 0 ? 64 * draw(4, 1023) : draw(256, 65472));
    sizes.rank_tokens = static_cast<int>(draw(64, 2048));
    sizes.base = draw(0, 2) == 0 ? draw(0, 100000) : 64 * draw(0, 2000);
    const Position full = Position{sizes.ranks} * sizes.most_tokens;
    sizes.tokens = std::max<Position>(draw(1, 5) * full / draw(1, 2) + draw(-200, 200), sizes.ranks * 2048);
    const std::vector<std::vector<Position>> steps = StepsOf(sizes);
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << " round " << round << ": " << sizes.tokens << " tokens from "
                                    << sizes.base << " on " << sizes.ranks << " ranks of " << sizes.most_tokens << ": "
                                    << testing::PrintToString(steps));
    const auto groups = static_cast<Position>(steps.size());
    ASSERT_EQ(groups, FewestGroups(sizes));
    ASSERT_EQ(steps.back().back(), sizes.base + sizes.tokens);
    for (const std::vector<Position>& cuts : steps) {
      const bool last = cuts.back() == steps.back().back();
      ASSERT_THAT(cuts, SizeIs(sizes.ranks + 1)) << "a rest never goes to fewer ranks";
      if (!last) {
        ASSERT_EQ(cuts.back() % 64, 0);
      }
      ASSERT_NEAR(static_cast<double>(cuts.back() - cuts.front()), static_cast<double>(sizes.tokens / groups), 128);
      for (size_t r = 1; r < cuts.size(); ++r) ASSERT_LE(cuts[r] - cuts[r - 1], sizes.most_tokens);
    }
  }
}

// ---- the table of what a prompt would take ----

TEST(PrefillSizes, TheTableDividesAPromptAsTheSchedulerDoes) {
  PrefillTableInput input;
  input.attention = *proto::AttentionTable::Build(
      {proto::SoftmaxSpec{.query_heads = 4, .kv_heads = 2, .key_dim = 16, .value_dim = 16, .scale = 1}});
  input.hidden = 64;
  input.ranks = 2;
  input.max_step_tokens = 512;
  input.rank_tokens = 1024;
  input.token_s = 1e-3;
  input.flop_s = input.plane_flop_s = 1e-12;
  input.link_byte_s = 1e-12;
  const auto seconds = [&](int64_t tokens) {
    input.new_tokens = tokens;
    for (const PrefillTableRow& row : MakePrefillTable(input))
      if (row.softmax == "gather-direct") return row.seconds;
    return 0.0;
  };
  EXPECT_NEAR(seconds(2048), 1.024, 0.01) << "two groups of two ranks";
  EXPECT_NEAR(seconds(2049), 1.025, 0.1) << "three groups of two ranks";
}

// ---- in the scheduler ----

// The tokens of each step, and of how many ranks it was.
struct Step {
  Position tokens = 0;
  int ranks = 0;  // 0: no group
  bool operator==(const Step&) const = default;
};

std::vector<Step> PromptStepsOf(int workers, int rank_tokens, int prompt) {
  ClusterOptions options = SmallCluster(2);
  options.compute_workers = workers;
  options.scheduler.max_model_len = 65536;
  options.scheduler.max_num_batched_tokens = 512;
  options.scheduler.prefill_rank_tokens = rank_tokens;
  FakeCluster cluster(options);
  std::vector<Step> steps;
  cluster.on_action = [&](const Action& action) {
    const auto* run = std::get_if<RunStep>(&action);
    if (run == nullptr || run->plan.entries[0].tokens.size() < 2) return;
    const proto::PrefillPart& part = run->plan.part;
    if (!part.in_group())
      steps.push_back({static_cast<Position>(run->plan.entries[0].tokens.size())});
    else if (part.rank == 0)
      steps.push_back({part.end - part.base, part.ranks});
  };
  const RequestId id = cluster.Submit(Ask(prompt, 3));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
  return steps;
}

TEST(PrefillSizes, ThePromptsGroupsAreEqual) {
  EXPECT_THAT(PromptStepsOf(2, 64, 2 * 1024 + 40), ElementsAre(Step{704, 2}, Step{704, 2}, Step{680, 2}));
}

// As compute workers on CPUs have it: steps of 512 tokens, and 1,024 of a prompt for each rank.
TEST(PrefillSizes, TheLastPartOfAPromptHasRanksToo) {
  EXPECT_THAT(PromptStepsOf(2, 1024, 4096), ElementsAre(Step{1024, 2}, Step{1024, 2}, Step{1024, 2}, Step{1024, 2}));
  EXPECT_THAT(PromptStepsOf(2, 1024, 2047), Each(testing::Field(&Step::ranks, 0))) << "too short to be divided";
}

}  // namespace
}  // namespace dovetail::scheduler
