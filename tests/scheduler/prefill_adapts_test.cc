// Between two parts of a long prompt workers become slow or join: the next part is divided accordingly.
#include <vector>

#include "tests/scheduler/small_cluster.h"

namespace dovetail::scheduler {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Le;
using ::testing::SizeIs;

class PrefillAdaptsTest : public testing::Test {
 protected:
  struct Group {
    absl::Time when;
    std::vector<WorkerId> workers;
    std::vector<int> tokens;  // of each rank
  };

  static ClusterOptions Options(int compute_workers) {
    ClusterOptions options = SmallCluster(2);
    options.compute_workers = compute_workers;
    options.scheduler.max_model_len = 65536;
    options.scheduler.max_num_batched_tokens = 512;
    options.scheduler.prefill_rank_tokens = 64;
    options.step_base = absl::ZeroDuration();
    options.reports_work = true;
    return options;
  }
  void Watch(FakeCluster& cluster) {
    cluster.on_action = [&](const Action& action) {
      const auto* run = std::get_if<RunStep>(&action);
      if (run == nullptr || !run->plan.part.in_group()) return;
      if (run->plan.part.rank == 0) groups_.push_back({cluster.now(), {}, {}});
      groups_.back().workers.push_back(run->compute_worker);
      groups_.back().tokens.push_back(static_cast<int>(run->plan.entries[0].tokens.size()));
    };
  }
  void Finish(FakeCluster& cluster, RequestId id) {
    cluster.RunUntilIdle();
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
    ExpectClean(cluster);
  }
  // Until so many groups have begun.
  void RunUntilGroups(FakeCluster& cluster, size_t count) {
    while (groups_.size() < count) ASSERT_TRUE(cluster.RunOne());
  }

  static constexpr WorkerId kFirst{100}, kSecond{101};
  std::vector<Group> groups_;
};

TEST_F(PrefillAdaptsTest, ASlowRanksCutShrinksAtTheNextSuperChunkAndGrowsAgain) {
  FakeCluster cluster(Options(2));
  Watch(cluster);
  const RequestId id = cluster.Submit(Ask(20400, 3));
  RunUntilGroups(cluster, 3);
  EXPECT_THAT(groups_.back().tokens, testing::ElementsAre(512, 512));
  cluster.Slow(kSecond, 4);
  RunUntilGroups(cluster, 5);  // the fourth was the first that was slow
  EXPECT_THAT(groups_[3].tokens, testing::ElementsAre(512, 512));
  EXPECT_EQ(groups_[4].tokens[0], 512);
  EXPECT_THAT(groups_[4].tokens[1], AllOf(Ge(64), Le(192))) << "a fourth of 512, and what rounding does";
  RunUntilGroups(cluster, 8);
  EXPECT_THAT(groups_[7].tokens[1], AllOf(Ge(64), Le(192)));
  cluster.Slow(kSecond, 1);
  RunUntilGroups(cluster, 10);
  EXPECT_THAT(groups_[9].tokens, testing::ElementsAre(512, 512));
  Finish(cluster, id);
}

TEST_F(PrefillAdaptsTest, ARankThatIsTooSlowIsLeftOutAndTriedAgain) {
  FakeCluster cluster(Options(3));
  Watch(cluster);
  const RequestId id = cluster.Submit(Ask(60000, 3));
  RunUntilGroups(cluster, 2);
  cluster.Slow(kSecond, 1000);
  RunUntilGroups(cluster, 5);
  EXPECT_THAT(groups_.back().workers, SizeIs(2));
  EXPECT_THAT(groups_.back().workers, Each(testing::Ne(kSecond)));
  cluster.Slow(kSecond, 1);
  Finish(cluster, id);
  EXPECT_THAT(groups_.back().workers, SizeIs(3)) << "it is well again";
}

TEST_F(PrefillAdaptsTest, ARankThatJoinsIsUsedAtTheNextSuperChunk) {
  FakeCluster cluster(Options(2));
  Watch(cluster);
  const RequestId id = cluster.Submit(Ask(20000, 3));
  RunUntilGroups(cluster, 4);
  const absl::Time joins = cluster.now() + absl::Microseconds(1);
  cluster.Post(joins, ComputeWorkerJoined{.worker = WorkerId(200)});
  Finish(cluster, id);
  for (const Group& group : groups_) {
    EXPECT_THAT(group.workers, SizeIs(group.when < joins ? 2 : 3));
    EXPECT_EQ(group.workers.back() == WorkerId(200), group.when >= joins);
  }
  EXPECT_GT(groups_.size(), 8u);
}

}  // namespace
}  // namespace dovetail::scheduler
