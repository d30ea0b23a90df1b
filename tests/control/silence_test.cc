#include <gtest/gtest.h>

#include <vector>

#include "tests/control/members_cluster.h"

// What silence on either plane says of a member, and what a worker that waits for another says of it.

namespace dovetail::scheduler {
namespace {

// Two attention workers and a compute worker that serve, and time to tell stories about them.
struct ServingCluster : Cluster {
  WorkerId compute = Join(Role::kComputeWorker, 1, "c");
  WorkerId one = Join(Role::kAttentionWorker, 2, "a2");
  WorkerId two = Join(Role::kAttentionWorker, 3, "a3");
  using Kind = control::LinkFailed::Kind;

  explicit ServingCluster(const MembershipOptions& options = Options()) : Cluster(options) {
    Ready(compute, 0);
    Ready(one);
    Ready(two);
    for (const WorkerId worker : {compute, one, two}) Apply(worker);
    EXPECT_TRUE(Serves(compute) && Serves(one) && Serves(two));
  }
  void Pass(int ms) { now += absl::Milliseconds(ms); }
  void Hear(std::vector<WorkerId> workers, uint32_t busy_ms = 0) {
    for (const WorkerId worker : workers) {
      control::Heartbeat heartbeat;
      heartbeat.busy_ms = busy_ms;
      members.Heard(worker, heartbeat, now);
    }
  }
  // The scheduler has heard nothing from the worker on the data plane for so long.
  void Unheard(WorkerId about, int ms = 2000) {
    const Member* member = members.Find(about);
    members.Unheard(member->request.node, member->epoch, now - absl::Milliseconds(ms), now, actions);
  }
  void Report(WorkerId from, WorkerId about, Kind kind) {
    if (kind == Kind::kSilent) return HearsNothing(from, about, "why");
    const Member* member = members.Find(about);
    const control::LinkFailed failed{member->request.node, member->epoch, "why", kind};
    members.LinkFailed(from, failed, now, actions);
  }
  bool Expired(WorkerId worker) {
    members.Expire(now, actions);
    return members.Find(worker) == nullptr;
  }
};

TEST(Suspicion, HalvesTheLeaseOfAMemberThatIsNotHeardAnyMore) {
  ServingCluster cluster;
  cluster.Pass(100);
  cluster.Hear({cluster.compute, cluster.two});
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kLate);
  EXPECT_EQ(cluster.members.NextDeadline(), kStart + absl::Milliseconds(200));
  cluster.Pass(99);
  EXPECT_FALSE(cluster.Expired(cluster.one));
  cluster.Pass(1);
  EXPECT_TRUE(cluster.Expired(cluster.one));
  EXPECT_EQ(cluster.Count<EndServing>(cluster.one), 1);
}

TEST(Suspicion, IsOverWhenTheMemberIsHeardAgain) {
  ServingCluster cluster;
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kLate);
  cluster.Pass(150);
  cluster.Hear({cluster.compute, cluster.one, cluster.two});
  cluster.Pass(300);
  EXPECT_FALSE(cluster.Expired(cluster.one));
}

TEST(Suspicion, OfAMemberThatIsHeardAndIdleEndsItAfterTwoSecondsAndOneAtWorkHasAllTheTimeItNeeds) {
  for (const uint32_t busy_ms : {0u, 3000u}) {
    ServingCluster cluster;
    for (int ms = 0; ms <= 10'000 && cluster.members.Find(cluster.one) != nullptr; ms += 50) {
      cluster.Hear({cluster.compute, cluster.one, cluster.two}, busy_ms);
      cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kLate);
      cluster.Pass(50);
    }
    const absl::Duration lasted = cluster.now - kStart;
    EXPECT_EQ(lasted, busy_ms == 0 ? absl::Milliseconds(2050) : absl::Milliseconds(10'050));
  }
}

TEST(Suspicion, LatenessNowAndThenIsNoStory) {
  ServingCluster cluster;
  for (int i = 0; i < 20; ++i) {
    cluster.Hear({cluster.compute, cluster.one, cluster.two});
    cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kLate);
    for (int ms = 0; ms < 600; ms += 50) {
      cluster.Pass(50);
      cluster.Hear({cluster.compute, cluster.one, cluster.two});
    }
  }
  EXPECT_TRUE(cluster.Serves(cluster.one));
}

TEST(Silence, BetweenTwoMembersThatTheSchedulerHearsMakesTheAttentionWorkerJoinAnewWhoeverReportsIt) {
  for (const bool by_compute : {true, false}) {
    ServingCluster cluster;
    if (by_compute)
      cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
    else
      cluster.Report(cluster.one, cluster.compute, ServingCluster::Kind::kSilent);
    cluster.Settle();
    EXPECT_EQ(cluster.members.Find(cluster.one), nullptr);
    EXPECT_TRUE(cluster.Serves(cluster.compute) && cluster.Serves(cluster.two));
  }
}

TEST(Silence, OfAMemberAtWorkIsNoFault) {
  ServingCluster cluster;
  cluster.Hear({cluster.one}, 700);
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
  cluster.Unheard(cluster.one);
  EXPECT_TRUE(cluster.Serves(cluster.one));
}

TEST(Silence, OfAMemberThatWasAtWorkAMomentAgoIsNoFault) {
  ServingCluster cluster;
  for (int ms = 0; ms < 1000; ms += 50) {
    cluster.Hear({cluster.compute, cluster.one, cluster.two}, ms == 550 ? 300 : 0);
    cluster.Pass(50);
  }
  cluster.Hear({cluster.one});
  cluster.Unheard(cluster.one);
  EXPECT_TRUE(cluster.Serves(cluster.one)) << "450 ms ago";
  cluster.Pass(50);
  cluster.Hear({cluster.one});
  cluster.Unheard(cluster.one);
  EXPECT_FALSE(cluster.Serves(cluster.one)) << "its loop turned for half a second, and nothing came";
}

// A member that gets no time falls silent on both planes, and a heartbeat comes less often than a frame.
TEST(Silence, ThatBeganAfterTheLastHeartbeatIsForTheLeaseToJudge) {
  MembershipOptions patient = Options();
  patient.lease = absl::Seconds(4);
  ServingCluster cluster(patient);
  for (int ms = 0; ms < 1000; ms += 50) {
    cluster.Hear({cluster.compute, cluster.one, cluster.two});
    cluster.Pass(50);
  }
  cluster.Pass(400);
  cluster.Unheard(cluster.one, 549);
  EXPECT_TRUE(cluster.Serves(cluster.one)) << "silent for 99 ms when it was last heard";
  cluster.Unheard(cluster.one, 951);
  EXPECT_FALSE(cluster.Serves(cluster.one)) << "silent for 501 ms when it was last heard";
}

// With a lease that outlasts its pauses, a worker that stutters is silent on both planes, and then on neither.
TEST(Silence, OfAWorkerThatIsNotHeardHereEitherIsForItsLeaseToJudge) {
  MembershipOptions patient = Options();
  patient.lease = absl::Seconds(4);
  patient.suspect_lease = absl::Seconds(2);
  ServingCluster cluster(patient);
  for (int ms = 0; ms < 700; ms += 50) {
    cluster.Pass(50);
    cluster.Hear({cluster.compute, cluster.two});
  }
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
  cluster.Unheard(cluster.one);
  EXPECT_TRUE(cluster.Serves(cluster.one));
  cluster.Hear({cluster.one});  // it goes on; what was reported before it was heard on the data plane comes now
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
  EXPECT_TRUE(cluster.Serves(cluster.one));
  for (int ms = 0; ms < 500; ms += 50) {
    cluster.Pass(50);
    cluster.Hear({cluster.compute, cluster.one, cluster.two});
  }
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
  cluster.Settle();
  EXPECT_FALSE(cluster.Serves(cluster.one)) << "heard here for long enough, and not there";
  cluster.Pass(700);
  cluster.Hear({cluster.compute});
  cluster.Report(cluster.compute, cluster.two, ServingCluster::Kind::kSilent);
  cluster.Pass(1299);
  EXPECT_FALSE(cluster.Expired(cluster.two));
  cluster.Pass(2);
  EXPECT_TRUE(cluster.Expired(cluster.two)) << "suspected: half its lease";
}

TEST(Silence, OfAStoppedComputeWorkerIsNotBlamedOnTheAttentionWorkersThatReportIt) {
  ServingCluster cluster;
  cluster.Pass(250);
  cluster.Hear({cluster.one, cluster.two});
  cluster.Report(cluster.one, cluster.compute, ServingCluster::Kind::kSilent);
  EXPECT_TRUE(cluster.Expired(cluster.compute)) << "nothing on either plane: half its lease";
  EXPECT_NE(cluster.members.Find(cluster.one), nullptr);
}

TEST(Silence, OfSeveralAttentionWorkersIsTheComputeWorkersFault) {
  for (const bool one_after_another : {false, true}) {
    ServingCluster cluster;
    cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
    if (one_after_another) cluster.Settle();
    cluster.Report(cluster.compute, cluster.two, ServingCluster::Kind::kSilent);
    cluster.Settle();
    EXPECT_EQ(cluster.members.Find(cluster.compute), nullptr);
    EXPECT_TRUE(cluster.Serves(cluster.two));
    EXPECT_EQ(cluster.Serves(cluster.one), !one_after_another);
  }
}

TEST(Silence, ThatPassesBeforeItIsJudgedCostsNobody) {
  ServingCluster cluster;
  cluster.Report(cluster.compute, cluster.one, ServingCluster::Kind::kSilent);
  cluster.Pass(350);
  cluster.Hear({cluster.compute, cluster.one, cluster.two});
  cluster.members.Expire(cluster.now, cluster.actions);
  EXPECT_TRUE(cluster.Serves(cluster.one));
}

TEST(Silence, OfTheSchedulerEndsWhoReportsItUnlessTheSchedulerWasAway) {
  ServingCluster cluster;
  const control::LinkFailed silent{NodeId(0), Epoch(0), "silent", ServingCluster::Kind::kSilent};
  cluster.members.Forgive(absl::Milliseconds(600), cluster.now);
  cluster.members.LinkFailed(cluster.one, silent, cluster.now, cluster.actions);
  EXPECT_TRUE(cluster.Serves(cluster.one));
  cluster.Pass(401);
  cluster.members.LinkFailed(cluster.one, silent, cluster.now, cluster.actions);
  EXPECT_EQ(cluster.members.Find(cluster.one), nullptr);
  const absl::Time long_ago = cluster.now - absl::Seconds(2);
  cluster.members.Unheard(NodeId(3), Epoch(31), long_ago, cluster.now, cluster.actions);
  EXPECT_NE(cluster.members.Find(cluster.two), nullptr) << "that was a former incarnation";
  cluster.members.Unheard(NodeId(3), Epoch(30), long_ago, cluster.now, cluster.actions);
  EXPECT_EQ(cluster.members.Find(cluster.two), nullptr);
}

TEST(Silence, OfAWorkerThatHasNotConnectedYetIsNoFault) {
  Cluster cluster;
  const WorkerId waiting = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.now += absl::Seconds(100);
  cluster.members.Heard(waiting, {}, cluster.now);
  cluster.members.Unheard(NodeId(2), Epoch(20), cluster.now - absl::Seconds(2), cluster.now, cluster.actions);
  EXPECT_NE(cluster.members.Find(waiting), nullptr);
}

TEST(Members, ALoopThatDoesNotTurnAnyMoreEndsItsMembership) {
  ServingCluster cluster;
  cluster.Hear({cluster.one}, 60'000);
  EXPECT_FALSE(cluster.Expired(cluster.one));
  cluster.Hear({cluster.one}, 60'001);
  EXPECT_TRUE(cluster.Expired(cluster.one));
}

}  // namespace
}  // namespace dovetail::scheduler
