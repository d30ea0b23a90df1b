#include "scheduler/cluster_scheduler.h"

#include <gtest/gtest.h>

#include <memory>

#include "tests/cluster/inproc_hub.h"
#include "tests/control/members_cluster.h"

// The scheduler's loop between two turns: stopped, or without time on a busy machine.

namespace dovetail::scheduler {
namespace {

constexpr absl::Duration kBeat = absl::Milliseconds(50);

class HandClock final : public Clock {
 public:
  absl::Time Now() override { return now; }
  absl::Time now = kStart;
};

// A scheduler with one member, by hand. The parameter: the lease in ms.
class LoopGap : public ::testing::TestWithParam<int> {
 protected:
  LoopGap() : connector_(hub_.Create(NodeId(0), Epoch(1))) {
    ClusterSchedulerOptions options;
    options.membership = Options();
    options.membership.lease = absl::Milliseconds(GetParam());
    options.membership.suspect_lease = options.membership.lease / 2;
    options.membership.data_plane_version = connector_->version();
    scheduler_ = std::make_unique<ClusterScheduler>(options, *connector_, clock_);
    peer_ = hub_.Create(NodeId(2), Epoch(20));
    control::JoinRequest request = Request(Role::kAttentionWorker, 2, "a");
    request.data_plane_version = peer_->version();
    request.data_plane_address = peer_->address();
    const auto reply = scheduler_->Join(request);
    EXPECT_TRUE(reply.ok()) << reply.status();
    worker_ = reply->worker;
    EXPECT_TRUE(
        scheduler_
            ->Attend(worker_, reply->epoch, {[](const control::v1::SchedulerOrder&) {}, [](const absl::Status&) {}})
            .ok());
    Serve(absl::Seconds(1));
  }
  bool IsMember() const { return scheduler_->RoleOf(worker_).has_value(); }
  // The loop turns and the member beats as they should.
  void Serve(absl::Duration length) {
    for (const absl::Time end = clock_.now + length; clock_.now < end;) {
      clock_.now += kBeat;
      scheduler_->OnHeartbeat(worker_, {});
      scheduler_->Turn();
    }
  }
  void HearsNothingFromTheScheduler() {
    scheduler_->OnLinkFailed(worker_, {NodeId(0), Epoch(1), "nothing came", control::LinkFailed::Kind::kSilent});
  }

  test::InprocHub hub_;
  HandClock clock_;
  std::unique_ptr<transport::Connector> connector_, peer_;
  std::unique_ptr<ClusterScheduler> scheduler_;
  WorkerId worker_;
};

TEST_P(LoopGap, CostsNoMemberThatHeardNothingMeanwhileAndSaysSoBeforeTheLoopTurns) {
  clock_.now += absl::Milliseconds(600);
  HearsNothingFromTheScheduler();
  EXPECT_TRUE(IsMember());
  scheduler_->Turn();
  HearsNothingFromTheScheduler();
  EXPECT_TRUE(IsMember()) << "it may not have heard yet that the loop turns again";
  Serve(absl::Milliseconds(600));
  HearsNothingFromTheScheduler();
  EXPECT_FALSE(IsMember()) << "its link is bad";
}

TEST_P(LoopGap, IsNoLatenessOfTheMembersWhoseHeartbeatsAreReadBehindIt) {
  clock_.now += absl::Seconds(5);
  scheduler_->OnHeartbeat(worker_, {});
  scheduler_->Turn();
  const absl::Time heard = clock_.now;
  while (IsMember() && clock_.now < heard + absl::Minutes(1)) {
    clock_.now += absl::Milliseconds(10);
    scheduler_->Turn();
  }
  EXPECT_EQ(clock_.now - heard, absl::Milliseconds(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Leases, LoopGap, ::testing::Values(400, 4000), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace dovetail::scheduler
