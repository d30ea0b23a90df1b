#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

#include "tests/control/members_cluster.h"

// Members that cannot reach each other, from the start: who serves, who does not, and what its operator reads.

namespace dovetail::scheduler {
namespace {

using testing::HasSubstr;

// `newcomer` joins a cluster that serves, and connects to all but one: which member is put out then, and why.
struct MissingLink : Cluster {
  WorkerId compute = Join(Role::kComputeWorker, 1, "compute");
  WorkerId near = Join(Role::kAttentionWorker, 2, "near");
  WorkerId newcomer;

  explicit MissingLink(Role role) {
    Ready(compute, 0);
    Ready(near);
    Apply(compute);
    Apply(near);
    EXPECT_TRUE(Serves(compute) && Serves(near));
    newcomer = Join(role, 3, "newcomer");
    Ready(newcomer, role == Role::kComputeWorker ? 0 : 10);
    const bool attention = role == Role::kAttentionWorker;
    Apply(compute);
    Apply(near);
    EXPECT_TRUE(members.Applied(newcomer, {Version(newcomer), {NodeId(2)}}, now, actions).ok());
    EXPECT_FALSE(Serves(newcomer)) << (attention ? "sequences could not move" : "its plans could not be carried out");
  }
  uint64_t Version(WorkerId worker) const { return members.Find(worker)->sent.back().first; }
  void Silent(WorkerId from, WorkerId about) {
    HearsNothing(from, about, "nothing came for 5000 ms");
    Settle();
  }
};

TEST(MissingLink, IsNamedAndCostsTheNewcomerWhoeverReportsIt) {
  for (const Role role : {Role::kAttentionWorker, Role::kComputeWorker})
    for (const bool by_newcomer : {true, false}) {
      MissingLink cluster(role);
      EXPECT_THAT(cluster.members.Unconnected(*cluster.members.Find(cluster.newcomer)), testing::ElementsAre("near"));
      EXPECT_THAT(cluster.members.Unconnected(*cluster.members.Find(cluster.near)), testing::ElementsAre("newcomer"));
      EXPECT_THAT(cluster.members.Unconnected(*cluster.members.Find(cluster.compute)), testing::IsEmpty());
      cluster.Silent(by_newcomer ? cluster.newcomer : cluster.near, by_newcomer ? cluster.near : cluster.newcomer);
      EXPECT_EQ(cluster.WhyOut(cluster.newcomer),
                "newcomer and near cannot reach each other: nothing came for 5000 ms; let their hosts reach each "
                "other's --data-ports, and give --data-devices of one network");
      EXPECT_TRUE(cluster.Serves(cluster.compute) && cluster.Serves(cluster.near));
      EXPECT_THAT(cluster.members.Unconnected(*cluster.members.Find(cluster.near)), testing::IsEmpty());
    }
}

TEST(MissingLink, OfAnAttentionWorkerThatNoOtherComputeWorkerUsesDoesNotKeepAComputeWorkerOut) {
  MissingLink cluster(Role::kComputeWorker);
  cluster.members.Gone(cluster.compute, "its connection ended", cluster.actions);
  cluster.Silent(cluster.newcomer, cluster.near);
  EXPECT_EQ(cluster.members.Find(cluster.near), nullptr);
  EXPECT_TRUE(cluster.Serves(cluster.newcomer));
}

// Two compute workers; all serve but `far`, which "c1" does not reach.
struct TwoComputeWorkers : Cluster {
  WorkerId c1 = Join(Role::kComputeWorker, 1, "c1");
  WorkerId c2 = Join(Role::kComputeWorker, 2, "c2");
  WorkerId near = Join(Role::kAttentionWorker, 3, "near");
  WorkerId far;

  explicit TwoComputeWorkers(ComputeLinks links = ComputeLinks::kNone) : Cluster(With(links)) {
    Ready(c1, 0);
    Ready(c2, 0);
    Ready(near);
    for (const WorkerId worker : {c1, c2, near}) Apply(worker);
    far = Join(Role::kAttentionWorker, 4, "far");
    Ready(far);
  }
  static MembershipOptions With(ComputeLinks links) {
    MembershipOptions options = Options();
    options.compute_links = links;
    return options;
  }
  // Each member connects to all but those it is told to lack.
  void Connect(const std::map<WorkerId, std::vector<NodeId>>& lacks) {
    std::vector<std::pair<WorkerId, uint64_t>> lists;
    for (const auto& [worker, member] : members.members())
      if (!member.sent.empty()) lists.emplace_back(worker, member.sent.back().first);
    for (const auto& [worker, version] : lists) {
      const auto found = lacks.find(worker);
      const std::vector<NodeId> unconnected = found == lacks.end() ? std::vector<NodeId>() : found->second;
      EXPECT_TRUE(members.Applied(worker, {version, unconnected}, now, actions).ok());
    }
  }
  void Silent(WorkerId from, WorkerId about) { HearsNothing(from, about, "nothing came for 5000 ms"); }
};

// A stopped host, say, or one whose ports cannot be reached: it is silent for 5 s until a link counts as bad.
TEST(MissingLink, WithAComputeWorkerThatStillConnectsHoldsUpNoAttentionWorkerWhereAnotherOneServes) {
  for (const bool another : {true, false}) {
    Cluster cluster;
    const WorkerId slow = cluster.Join(Role::kComputeWorker, 1, "slow");
    cluster.Ready(slow, 0);
    WorkerId serves;
    if (another) {
      serves = cluster.Join(Role::kComputeWorker, 2, "serves");
      cluster.Ready(serves, 0);
      cluster.Apply(serves);
    }
    const WorkerId attention = cluster.Join(Role::kAttentionWorker, 3, "a");
    cluster.Ready(attention);
    cluster.Apply(attention);
    if (another) cluster.Apply(serves);
    EXPECT_EQ(cluster.Serves(attention), another);
    EXPECT_FALSE(cluster.Serves(slow));
    cluster.Apply(slow);
    EXPECT_TRUE(cluster.Serves(attention) && cluster.Serves(slow));
  }
}

TEST(BadLink, CostsTheComputeWorkerWhereAnotherOneReachesTheAttentionWorker) {
  TwoComputeWorkers cluster;
  cluster.Connect({{cluster.c1, {NodeId(4)}}, {cluster.far, {NodeId(1)}}});
  EXPECT_FALSE(cluster.Serves(cluster.far));
  cluster.Silent(cluster.far, cluster.c1);
  cluster.Settle();
  EXPECT_THAT(cluster.WhyOut(cluster.c1), HasSubstr("c1 and far cannot reach each other"));
  EXPECT_TRUE(cluster.Serves(cluster.c2) && cluster.Serves(cluster.near) && cluster.Serves(cluster.far));

  // It joins again and is kept out, until it reaches every peer.
  for (const bool mended : {false, true}) {
    const uint32_t node = mended ? 6 : 5;
    const WorkerId again = cluster.Join(Role::kComputeWorker, node, "c1");
    cluster.Ready(again, 0);
    if (mended)
      cluster.Connect({});
    else
      cluster.Connect({{again, {NodeId(4)}}, {cluster.far, {NodeId(node)}}});
    EXPECT_EQ(cluster.Serves(again), mended);
    if (!mended) cluster.Silent(again, cluster.far);
    cluster.Settle();
    EXPECT_EQ(cluster.Serves(again), mended);
    EXPECT_TRUE(cluster.Serves(cluster.c2) && cluster.Serves(cluster.near) && cluster.Serves(cluster.far));
  }
}

// A link between compute workers that both can do without makes neither of more use.
TEST(BadLink, ThatWorkedBeforeCostsTheSame) {
  for (const ComputeLinks links : {ComputeLinks::kNone, ComputeLinks::kWherePossible}) {
    TwoComputeWorkers cluster(links);
    cluster.Connect({});
    EXPECT_TRUE(cluster.Serves(cluster.c1) && cluster.Serves(cluster.far));
    cluster.Silent(cluster.c1, cluster.far);
    cluster.Settle();
    EXPECT_EQ(cluster.members.Find(cluster.c1), nullptr);
    EXPECT_TRUE(cluster.Serves(cluster.c2) && cluster.Serves(cluster.near) && cluster.Serves(cluster.far));
  }
}

TEST(BadLink, ThatBothCanDoWithoutIsNotCountedAgainstAComputeWorker) {
  TwoComputeWorkers cluster(ComputeLinks::kWherePossible);
  const WorkerId c3 = cluster.Join(Role::kComputeWorker, 5, "c3");
  cluster.Ready(c3, 0);
  cluster.Connect({});
  for (const WorkerId lacked : {cluster.c2, c3, cluster.far}) cluster.Silent(cluster.c1, lacked);
  cluster.Silent(cluster.c2, cluster.far);
  cluster.Settle();
  EXPECT_EQ(cluster.members.Find(cluster.far), nullptr) << "it lacks two that it needs, and c1 only it";
  EXPECT_TRUE(cluster.Serves(cluster.c1) && cluster.Serves(cluster.c2) && cluster.Serves(c3));
  EXPECT_TRUE(cluster.Serves(cluster.near));
}

TEST(BadLink, OfSeveralCostsTheMemberThatTheyHaveInCommon) {
  for (const bool two_compute_workers : {true, false}) {
    TwoComputeWorkers cluster;
    cluster.Connect({});
    cluster.Silent(cluster.far, cluster.c1);
    cluster.Silent(cluster.far, two_compute_workers ? cluster.c2 : cluster.near);
    cluster.Settle();
    EXPECT_EQ(cluster.members.Find(cluster.far), nullptr);
    EXPECT_TRUE(cluster.Serves(cluster.c1) && cluster.Serves(cluster.c2) && cluster.Serves(cluster.near));
  }
}

TEST(MissingLink, ThatComesUpLateLetsTheNewcomerServe) {
  MissingLink cluster(Role::kAttentionWorker);
  ASSERT_TRUE(
      cluster.members.Applied(cluster.newcomer, {cluster.Version(cluster.newcomer), {}}, cluster.now, cluster.actions)
          .ok());
  EXPECT_TRUE(cluster.Serves(cluster.newcomer));
  cluster.Silent(cluster.newcomer, cluster.near);  // between two that serve a move fails, nothing else
  EXPECT_TRUE(cluster.Serves(cluster.newcomer) && cluster.Serves(cluster.near));
}

TEST(MissingLink, ToTheSchedulerIsNamedWithTheRemedy) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "compute");
  cluster.Ready(compute, 0);
  EXPECT_THAT(cluster.members.Unconnected(*cluster.members.Find(compute)), testing::ElementsAre("scheduler"));
  cluster.members.LinkFailed(compute, {NodeId(0), Epoch(0), "nothing came for 5000 ms"}, cluster.now, cluster.actions);
  const auto* end = std::get_if<EndSession>(&cluster.actions.back());
  ASSERT_NE(end, nullptr);
  EXPECT_THAT(end->why, HasSubstr("compute cannot reach the scheduler: nothing came for 5000 ms; let their hosts"));
}

}  // namespace
}  // namespace dovetail::scheduler
