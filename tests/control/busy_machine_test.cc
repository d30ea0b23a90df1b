#include <gtest/gtest.h>

#include <vector>

#include "tests/control/members_cluster.h"

// Members that get no time from a busy machine: silence is no sign of their end.

namespace dovetail::scheduler {
namespace {

constexpr absl::Duration kBeat = absl::Milliseconds(50);

struct BusyMachine : Cluster {
  WorkerId compute = Join(Role::kComputeWorker, 1, "c");
  WorkerId attention = Join(Role::kAttentionWorker, 2, "a");

  BusyMachine() {
    Ready(compute, 0);
    Ready(attention);
    Apply(compute);
    Apply(attention);
    EXPECT_TRUE(Serves(compute) && Serves(attention));
  }
  // The compute worker is heard all the while, the attention worker at the end of it.
  void HearAfter(absl::Duration pause) {
    for (const absl::Time end = now + pause; now < end;) {
      now += std::min(kBeat, end - now);
      members.Heard(compute, {}, now);
      members.Expire(now, actions);
    }
    members.Heard(attention, {}, now);
  }
  // How long the attention worker is silent before it is out.
  absl::Duration LastsFor() {
    const absl::Time begun = now;
    while (members.Find(attention) != nullptr && now - begun < absl::Seconds(60)) {
      now += absl::Milliseconds(1);
      members.Heard(compute, {}, now);
      members.Expire(now, actions);
    }
    return now - begun;
  }
  void Suspect() {
    members.LinkFailed(compute, {NodeId(2), Epoch(20), "why", control::LinkFailed::Kind::kLate}, now, actions);
  }
};

TEST(BusyMachine, LateHeartbeatsGiveMoreTimeToTheMemberThatSendsThem) {
  BusyMachine cluster;
  cluster.HearAfter(absl::Milliseconds(350));  // 250 ms more than two heartbeats
  cluster.HearAfter(absl::Milliseconds(850));
  EXPECT_TRUE(cluster.Serves(cluster.attention)) << "the lease is 400 ms, and it had been late by 250 ms";
  EXPECT_EQ(cluster.members.Find(cluster.compute)->lateness, absl::ZeroDuration());
  EXPECT_EQ(cluster.LastsFor(), absl::Milliseconds(400 + 2 * 750));
}

TEST(BusyMachine, SuspicionDoesNotTakeThatTimeAway) {
  BusyMachine cluster;
  cluster.HearAfter(absl::Milliseconds(350));
  cluster.Suspect();
  EXPECT_EQ(cluster.LastsFor(), absl::Milliseconds(200 + 2 * 250));
}

TEST(BusyMachine, HeartbeatsInTimeBringTheLeaseBack) {
  BusyMachine cluster;
  cluster.HearAfter(absl::Milliseconds(350));
  for (int ms = 0; ms < 10'000; ms += 50) cluster.HearAfter(kBeat);
  BusyMachine half = cluster;
  EXPECT_EQ(half.LastsFor(), absl::Milliseconds(400 + 250));
  for (int ms = 0; ms < 110'000; ms += 50) cluster.HearAfter(kBeat);
  EXPECT_EQ(cluster.LastsFor(), absl::Milliseconds(401)) << "1 ms is left of it";
}

TEST(BusyMachine, NoLatenessGivesMoreThanTheLongestStarvation) {
  BusyMachine cluster;
  for (int ms = 390; ms < 30'000; ms = 2 * ms) {
    if (absl::Milliseconds(ms) > Options().lease + Options().longest_starvation) break;
    cluster.HearAfter(absl::Milliseconds(ms));
    ASSERT_TRUE(cluster.Serves(cluster.attention)) << ms;
  }
  EXPECT_EQ(cluster.LastsFor(), Options().lease + Options().longest_starvation);
}

TEST(BusyMachine, TimeInWhichTheSchedulerHeardNobodyIsNoLateness) {
  BusyMachine cluster;
  cluster.now += absl::Seconds(3);
  cluster.members.Forgive(absl::Seconds(3), cluster.now);
  cluster.members.Heard(cluster.attention, {}, cluster.now);
  EXPECT_EQ(cluster.LastsFor(), absl::Milliseconds(400));
}

TEST(BusyMachine, AMemberWhoseProcessRunsOnTheSchedulersHostIsExcused) {
  BusyMachine cluster;
  for (int ms = 0; ms <= 9'000; ms += 10) {
    cluster.now = kStart + absl::Milliseconds(ms);
    cluster.members.Heard(cluster.compute, {}, cluster.now);
    const std::vector<WorkerId> overdue = cluster.members.Overdue(cluster.now);
    ASSERT_EQ(overdue.empty(), ms < 400 || (ms - 400) % 50 != 0) << ms;
    for (const WorkerId worker : overdue) {
      EXPECT_EQ(worker, cluster.attention);
      EXPECT_EQ(cluster.members.Excuse(worker, cluster.now), ms == 400) << "is said once";
      EXPECT_EQ(cluster.members.NextDeadline(), cluster.now + kBeat);
    }
    cluster.members.Expire(cluster.now, cluster.actions);
    ASSERT_TRUE(cluster.Serves(cluster.attention)) << ms;
  }
  // It is stopped: nothing excuses it at the next look.
  cluster.now += kBeat;
  cluster.members.Expire(cluster.now, cluster.actions);
  EXPECT_EQ(cluster.WhyOut(cluster.attention), "silent for 9050 ms: stopped, or cut off");
}

TEST(BusyMachine, AnExcuseLastsNoLongerThanTheLongestStarvation) {
  BusyMachine cluster;
  while (cluster.members.Find(cluster.attention) != nullptr && cluster.now < kStart + absl::Minutes(1)) {
    cluster.now += kBeat;
    cluster.members.Heard(cluster.compute, {}, cluster.now);
    for (const WorkerId worker : cluster.members.Overdue(cluster.now)) cluster.members.Excuse(worker, cluster.now);
    cluster.members.Expire(cluster.now, cluster.actions);
  }
  EXPECT_EQ(cluster.now - kStart, Options().longest_starvation);
}

TEST(BusyMachine, AMemberThatIsExcusedIsNotEndedByPeersThatHearNothingEither) {
  BusyMachine cluster;
  for (cluster.now = kStart + absl::Milliseconds(250); cluster.now < kStart + absl::Seconds(5); cluster.now += kBeat) {
    cluster.members.Heard(cluster.compute, {}, cluster.now);
    cluster.members.LinkFailed(cluster.compute,
                               {NodeId(2), Epoch(20), "nothing came", control::LinkFailed::Kind::kSilent}, cluster.now,
                               cluster.actions);
    for (const WorkerId worker : cluster.members.Overdue(cluster.now)) cluster.members.Excuse(worker, cluster.now);
    cluster.members.Expire(cluster.now, cluster.actions);
    ASSERT_TRUE(cluster.Serves(cluster.attention)) << cluster.now - kStart;
  }
}

// One that gets time again may look before it has read what has come meanwhile.
TEST(BusyMachine, ALinkThatIsSaidToBeSilentOnceCostsNobodyAndIsJudgedWhenItIsSaidAgain) {
  BusyMachine cluster;
  cluster.HearsNothing(cluster.compute, cluster.attention, "nothing came");
  const auto said = std::exchange(cluster.said_again, {});
  cluster.Settle();
  cluster.Settle();
  EXPECT_TRUE(cluster.Serves(cluster.compute) && cluster.Serves(cluster.attention));
  cluster.said_again = said;
  cluster.Settle();
  cluster.Settle();
  EXPECT_FALSE(cluster.Serves(cluster.attention));
}

}  // namespace
}  // namespace dovetail::scheduler
