#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/control/members_cluster.h"

// A process that ends breaks its connections. Their other ends say so in any order, some before the scheduler knows
// of the end: none of them is at fault.

namespace dovetail::scheduler {
namespace {

using testing::HasSubstr;

// Two compute workers and three attention workers that serve.
struct BrokenLinks : Cluster {
  WorkerId killed = Join(Role::kComputeWorker, 1, "c1");
  WorkerId other = Join(Role::kComputeWorker, 2, "c2");
  std::vector<WorkerId> attention = {Join(Role::kAttentionWorker, 3, "a1"), Join(Role::kAttentionWorker, 4, "a2"),
                                     Join(Role::kAttentionWorker, 5, "a3")};

  BrokenLinks() {
    Ready(killed, 0);
    Ready(other, 0);
    for (const WorkerId worker : attention) Ready(worker);
    for (const auto& [worker, member] : members.members()) Apply(worker);
    for (const auto& [worker, member] : members.members()) EXPECT_TRUE(Serves(worker));
  }
  void Broken(WorkerId from, WorkerId about) {
    const Member* member = members.Find(about);
    members.LinkFailed(from, {member->request.node, member->epoch, "Connection reset by remote peer"}, now, actions);
    members.Expire(now, actions);
  }
  void Pass(int ms, const std::vector<WorkerId>& heard) {
    now += absl::Milliseconds(ms);
    for (const WorkerId worker : heard) members.Heard(worker, {}, now);
    members.Expire(now, actions);
  }
  void ExpectOthersServe() const {
    EXPECT_TRUE(Serves(other));
    for (const WorkerId worker : attention) EXPECT_TRUE(Serves(worker)) << worker << ": " << WhyOut(worker);
  }
};

TEST(BrokenLinks, OfAComputeWorkerThatWasKilledCostNoAttentionWorker) {
  BrokenLinks cluster;
  cluster.Broken(cluster.attention[0], cluster.killed);  // before its session's end is known
  cluster.Pass(1, {cluster.killed, cluster.other});      // sent before it died, read later
  for (const WorkerId worker : {cluster.attention[1], cluster.attention[2]}) cluster.Broken(worker, cluster.killed);
  cluster.ExpectOthersServe();
  cluster.Pass(50, cluster.attention);
  cluster.members.Gone(cluster.killed, "its connection ended", cluster.actions);
  cluster.Settle();
  cluster.ExpectOthersServe();
}

TEST(BrokenLinks, OfAHostThatIsOffCostNobodyElseOnceItsLeaseHasEnded) {
  BrokenLinks cluster;
  std::vector<WorkerId> alive = cluster.attention;
  alive.push_back(cluster.other);
  for (const WorkerId worker : cluster.attention) cluster.Broken(worker, cluster.killed);
  for (int ms = 0; ms < 150; ms += 50) cluster.Pass(50, alive);
  EXPECT_TRUE(cluster.Serves(cluster.killed)) << "it may yet be heard";
  cluster.Pass(50, alive);
  EXPECT_EQ(cluster.members.Find(cluster.killed), nullptr) << "suspected: half its lease";
  cluster.Settle();
  cluster.ExpectOthersServe();
}

TEST(BrokenLinks, OfAnAttentionWorkerThatWasKilledCostNoComputeWorker) {
  BrokenLinks cluster;
  const WorkerId ended = cluster.attention[0];
  for (const WorkerId worker : {cluster.killed, cluster.other, cluster.attention[1]}) cluster.Broken(worker, ended);
  cluster.members.Gone(ended, "its connection ended", cluster.actions);
  cluster.Settle();
  EXPECT_TRUE(cluster.Serves(cluster.killed) && cluster.Serves(cluster.other));
  EXPECT_TRUE(cluster.Serves(cluster.attention[1]) && cluster.Serves(cluster.attention[2]));
}

TEST(BrokenLinks, OfOneComputeWorkerThatLivesToSeveralAttentionWorkersCostTheComputeWorker) {
  BrokenLinks cluster;
  for (const WorkerId worker : cluster.attention) cluster.Broken(worker, cluster.killed);
  cluster.Settle();
  EXPECT_THAT(cluster.WhyOut(cluster.killed), HasSubstr("c1 and a1 cannot reach each other: Connection reset"));
  cluster.ExpectOthersServe();
}

// A broken link between attention workers removes neither of them, so only their own reports end it.
TEST(BrokenLinks, BetweenAttentionWorkersThatHaveConnectedAgainCountNoMore) {
  for (const bool again : {false, true}) {
    BrokenLinks cluster;
    const WorkerId one = cluster.attention[0], two = cluster.attention[1];
    cluster.Broken(one, two);
    cluster.Broken(two, one);
    cluster.Settle();
    cluster.ExpectOthersServe();
    // Each is sent a list once more, as a member comes.
    const WorkerId newcomer = cluster.Join(Role::kAttentionWorker, 6, "a4");
    cluster.Ready(newcomer);
    for (const auto& [worker, about] : {std::pair(one, two), std::pair(two, one)}) {
      const uint64_t version = cluster.members.Find(worker)->sent.back().first;
      const NodeId node = cluster.members.Find(about)->request.node;
      const std::vector<NodeId> unconnected = again ? std::vector<NodeId>() : std::vector<NodeId>{node};
      ASSERT_TRUE(cluster.members.Applied(worker, {version, unconnected}, cluster.now, cluster.actions).ok());
    }
    // A second link of the compute worker breaks: what it has in common with the first is what counts.
    cluster.Broken(one, cluster.killed);
    cluster.Settle();
    const bool compute_went = cluster.members.Find(cluster.killed) == nullptr;
    EXPECT_EQ(compute_went, again) << "it has one bad link, and the attention worker " << (again ? "too" : "two");
  }
}

// Ranks of a prefill group wait for each other, so two compute workers that cannot reach each other must not both
// serve.
TEST(BrokenLinks, BetweenComputeWorkersCostTheOneThatJoinedLater) {
  MembershipOptions options = Options();
  options.compute_links = ComputeLinks::kRequired;
  Cluster cluster(options);
  const WorkerId one = cluster.Join(Role::kComputeWorker, 1, "c1"), two = cluster.Join(Role::kComputeWorker, 2, "c2");
  for (const WorkerId worker : {one, two}) cluster.Ready(worker, 0);
  cluster.Apply(one);
  EXPECT_TRUE(cluster.Serves(one)) << "the other does not serve yet";
  EXPECT_FALSE(cluster.Serves(two)) << "it has not said that it reaches c1";
  cluster.Apply(two);
  EXPECT_TRUE(cluster.Serves(two));
  for (const auto& [from, about] : {std::pair(one, two), std::pair(two, one)}) {
    const Member* member = cluster.members.Find(about);
    cluster.members.LinkFailed(from, {member->request.node, member->epoch, "Connection reset by remote peer"},
                               cluster.now, cluster.actions);
  }
  cluster.members.Expire(cluster.now, cluster.actions);
  EXPECT_TRUE(cluster.Serves(one) && cluster.Serves(two)) << "one of them may have ended";
  cluster.Settle();
  EXPECT_TRUE(cluster.Serves(one));
  EXPECT_EQ(cluster.members.Find(two), nullptr);
  EXPECT_THAT(cluster.WhyOut(two), HasSubstr("c2 and c1 cannot reach each other: Connection reset"));
}

class OptionalLinks : public ::testing::Test {
 protected:
  static MembershipOptions LinkedWherePossible() {
    MembershipOptions options = Options();
    options.compute_links = ComputeLinks::kWherePossible;
    return options;
  }
  OptionalLinks() {
    for (const WorkerId worker : {one_, two_}) cluster_.Ready(worker, 0);
  }
  void Fail(WorkerId from, WorkerId about, control::LinkFailed::Kind kind = control::LinkFailed::Kind::kBroken) {
    const Member* member = cluster_.members.Find(about);
    cluster_.members.LinkFailed(from, {member->request.node, member->epoch, "Connection reset", kind}, cluster_.now,
                                cluster_.actions);
  }
  // What was said of the two since it was asked last: "+" or "-" and why not.
  std::string Told() {
    std::string told;
    for (; seen_ < cluster_.actions.size(); ++seen_)
      if (const auto* link = std::get_if<LinkComputeWorkers>(&cluster_.actions[seen_])) {
        EXPECT_EQ(link->one, one_);
        EXPECT_EQ(link->other, two_);
        told += link->linked ? "+" : "-" + link->why;
      }
    return told;
  }

  Cluster cluster_{LinkedWherePossible()};
  WorkerId one_ = cluster_.Join(Role::kComputeWorker, 1, "c1"), two_ = cluster_.Join(Role::kComputeWorker, 2, "c2");
  size_t seen_ = 0;
};

TEST_F(OptionalLinks, ComputeWorkersServeBeforeTheyReachEachOther) {
  cluster_.Apply(one_);
  EXPECT_EQ(cluster_.members.Find(two_)->last_sent.size(), 2u) << "it is told of the other";
  ASSERT_TRUE(
      cluster_.members
          .Applied(two_, {cluster_.members.Find(two_)->sent.back().first, {cluster_.members.Find(one_)->request.node}},
                   cluster_.now, cluster_.actions)
          .ok());
  EXPECT_TRUE(cluster_.Serves(one_) && cluster_.Serves(two_));
  EXPECT_EQ(Told(), "");
  EXPECT_THAT(cluster_.members.Unconnected(*cluster_.members.Find(two_)), testing::ElementsAre("c1"));
}

TEST_F(OptionalLinks, AreToldWhenBothServeAndOnce) {
  cluster_.Apply(one_);
  EXPECT_EQ(Told(), "");
  cluster_.Apply(two_);
  EXPECT_EQ(Told(), "+");
  cluster_.Settle();
  EXPECT_EQ(Told(), "");
}

TEST_F(OptionalLinks, OneThatBreaksCostsNoMemberAndIsToldOnce) {
  for (const WorkerId worker : {one_, two_}) cluster_.Apply(worker);
  EXPECT_EQ(Told(), "+");
  Fail(one_, two_);
  EXPECT_EQ(Told(), "-Connection reset") << "at once, for ranks may wait for each other";
  Fail(two_, one_);
  cluster_.Settle();
  EXPECT_TRUE(cluster_.Serves(one_) && cluster_.Serves(two_));
  EXPECT_EQ(Told(), "");
  EXPECT_THAT(cluster_.members.Unconnected(*cluster_.members.Find(one_)), testing::ElementsAre("c2"));
  EXPECT_THAT(cluster_.members.Unconnected(*cluster_.members.Find(two_)), testing::ElementsAre("c1"));
}

TEST_F(OptionalLinks, OneThatWasSilentIsThereAgain) {
  for (const WorkerId worker : {one_, two_}) cluster_.Apply(worker);
  EXPECT_EQ(Told(), "+");
  for (const absl::Time end = cluster_.now + absl::Milliseconds(600); cluster_.now < end;) {
    cluster_.now += absl::Milliseconds(50);
    for (const WorkerId worker : {one_, two_}) cluster_.members.Heard(worker, {}, cluster_.now);
  }
  Fail(one_, two_, control::LinkFailed::Kind::kSilent);
  EXPECT_EQ(Told(), "-Connection reset");
  for (int i = 0; i < 40; ++i) cluster_.Settle();
  EXPECT_EQ(Told(), "+");
}

TEST_F(OptionalLinks, OfOneThatJoinsAnewAreToldAnew) {
  for (const WorkerId worker : {one_, two_}) cluster_.Apply(worker);
  Fail(one_, two_);
  EXPECT_EQ(Told(), "+-Connection reset");
  cluster_.members.Gone(two_, "it ended", cluster_.actions);
  two_ = cluster_.Join(Role::kComputeWorker, 3, "c2");
  cluster_.Ready(two_, 0);
  for (const WorkerId worker : {one_, two_}) cluster_.Apply(worker);
  EXPECT_EQ(Told(), "+");
  EXPECT_TRUE(cluster_.members.Unconnected(*cluster_.members.Find(one_)).empty());
}

TEST(BrokenLinks, ComputeWorkersAreLinkedOnlyWhereTheirGroupsExchangeDirectly) {
  for (const bool linked : {false, true}) {
    MembershipOptions options = Options();
    options.compute_links = linked ? ComputeLinks::kRequired : ComputeLinks::kNone;
    Cluster cluster(options);
    const WorkerId one = cluster.Join(Role::kComputeWorker, 1, "c1"), two = cluster.Join(Role::kComputeWorker, 2, "c2");
    for (const WorkerId worker : {one, two}) cluster.Ready(worker, 0);
    const std::vector<control::Peer>& peers = cluster.members.Find(two)->last_sent;
    EXPECT_EQ(peers.size(), linked ? 2u : 1u) << "the scheduler is always one";
    if (linked) {
      EXPECT_EQ(peers[1].worker, one);
    }
  }
}

TEST(BrokenLinks, AreJudgedByWhatWasHeardAndNotByTheTimeInWhichTheSchedulerWasStopped) {
  BrokenLinks cluster;
  cluster.Broken(cluster.attention[0], cluster.killed);
  cluster.now += absl::Milliseconds(300);
  cluster.members.Forgive(absl::Milliseconds(300), cluster.now);
  cluster.members.Expire(cluster.now, cluster.actions);
  cluster.ExpectOthersServe();
}

}  // namespace
}  // namespace dovetail::scheduler
