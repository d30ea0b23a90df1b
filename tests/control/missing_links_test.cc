#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/control/members_cluster.h"

// Members that cannot reach each other, from the start: who serves, who does not, and what its operator reads.

namespace dovetail::scheduler {
namespace {

using testing::HasSubstr;

// `newcomer` joins a cluster that serves, and connects to all but one: who is out then, and why.
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
    const Member* member = members.Find(about);
    members.LinkFailed(from, {member->request.node, member->epoch, "nothing came for 5000 ms",
                              control::LinkFailed::Kind::kSilent},
                       now, actions);
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
