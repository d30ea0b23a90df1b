#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "tests/control/members_cluster.h"

// Membership as a value: which members may be used, and when.

namespace dovetail::scheduler {
namespace {

using testing::HasSubstr;

TEST(Members, AWorkerServesOnlyWhenBothSidesHaveConnected) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  EXPECT_EQ(cluster.Count<SendConfiguration>(attention), 1);
  cluster.Ready(compute, 0);
  cluster.Ready(attention);
  EXPECT_FALSE(cluster.Serves(attention));
  cluster.Apply(attention);
  EXPECT_FALSE(cluster.Serves(attention)) << "the compute worker does not know it yet";
  cluster.Apply(compute);
  EXPECT_TRUE(cluster.Serves(attention));
  EXPECT_TRUE(cluster.Serves(compute));
}

TEST(Members, AComputeWorkerSaysWhetherItLeavesStatesOfPrompts) {
  Cluster cluster;
  const WorkerId leaves = cluster.Join(Role::kComputeWorker, 1, "c1");
  const WorkerId not_these = cluster.Join(Role::kComputeWorker, 2, "c2");
  EXPECT_TRUE(cluster.members.Ready(leaves, {.leaves_states = true}, cluster.now, cluster.actions).ok());
  EXPECT_TRUE(cluster.members.Ready(not_these, {}, cluster.now, cluster.actions).ok());
  EXPECT_TRUE(cluster.members.Find(leaves)->ready.leaves_states);
  EXPECT_FALSE(cluster.members.Find(not_these)->ready.leaves_states);
}

TEST(Members, AnAttentionWorkerThatComesBeforeAnyModelWaitsForIt) {
  Cluster cluster;
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  EXPECT_EQ(cluster.Count<SendConfiguration>(attention), 0);
  cluster.Join(Role::kComputeWorker, 1, "c");
  EXPECT_EQ(cluster.Count<SendConfiguration>(attention), 1);
}

TEST(Members, AnOldListOfPeersDoesNotProveAConnectionToANewcomer) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  cluster.Ready(compute, 0);
  std::vector<MemberAction> before;
  before.swap(cluster.actions);  // the list with the scheduler alone, not yet applied
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.Ready(attention);
  cluster.Apply(attention);
  before.swap(cluster.actions);
  cluster.Apply(compute);  // of the old version
  EXPECT_TRUE(cluster.Serves(compute)) << "no other member serves that it would have to reach";
  EXPECT_FALSE(cluster.Serves(attention));
  before.swap(cluster.actions);
  cluster.Apply(compute);
  EXPECT_TRUE(cluster.Serves(attention));
}

TEST(Members, ASilentWorkerIsOutAfterItsLeaseAndItsNameIsFreeAgain) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.Ready(compute, 0);
  cluster.Ready(attention);
  cluster.Apply(compute);
  cluster.Apply(attention);
  ASSERT_TRUE(cluster.Serves(attention));
  cluster.now += absl::Milliseconds(399);
  cluster.members.Heard(compute, {}, cluster.now);
  cluster.members.Expire(cluster.now, cluster.actions);
  EXPECT_TRUE(cluster.Serves(attention));
  EXPECT_EQ(cluster.members.NextDeadline(), kStart + absl::Milliseconds(400));
  cluster.now += absl::Milliseconds(1);
  cluster.members.Expire(cluster.now, cluster.actions);
  EXPECT_EQ(cluster.members.Find(attention), nullptr);
  EXPECT_EQ(cluster.Count<EndServing>(attention), 1);
  EXPECT_EQ(cluster.Count<EndSession>(attention), 1);
  EXPECT_TRUE(cluster.Serves(compute));
  const WorkerId next = cluster.Join(Role::kAttentionWorker, 3, "a");
  EXPECT_NE(next, attention);
}

TEST(Members, AWorkerThatDiesBetweenJoiningAndAttendingIsForgotten) {
  Cluster cluster;
  const auto joined = cluster.members.Join(Request(Role::kAttentionWorker, 2, "a"), kStart);
  ASSERT_TRUE(joined.ok());
  cluster.members.Expire(kStart + absl::Milliseconds(1999), cluster.actions);
  EXPECT_NE(cluster.members.Find(joined->worker), nullptr);
  cluster.members.Expire(kStart + absl::Seconds(2), cluster.actions);
  EXPECT_EQ(cluster.members.Find(joined->worker), nullptr);
  EXPECT_EQ(cluster.Count<EndServing>(joined->worker), 0);
}

TEST(Members, AStoppedSchedulerForgivesTheTimeInWhichItHeardNobody) {
  Cluster cluster;
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.now += absl::Seconds(5);
  cluster.members.Forgive(absl::Seconds(5), cluster.now);
  cluster.members.Expire(cluster.now, cluster.actions);
  EXPECT_NE(cluster.members.Find(attention), nullptr);
}

TEST(Members, RefusalsNameWhatIsWrongAndTheRemedy) {
  Cluster cluster;
  cluster.Join(Role::kComputeWorker, 1, "c");
  const auto refusal = [&](const control::JoinRequest& request) {
    return cluster.members.Join(request, kStart).status();
  };

  control::JoinRequest request = Request(Role::kAttentionWorker, 5, "x");
  request.data_plane_version = "ucx 2";
  EXPECT_EQ(refusal(request).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refusal(request).message()),
              testing::AllOf(HasSubstr("x: uses ucx 2"), HasSubstr("ucx 1"), HasSubstr("install one")));

  request = Request(Role::kAttentionWorker, 5, "x");
  request.frame_version = 99;
  EXPECT_THAT(std::string(refusal(request).message()),
              testing::AllOf(HasSubstr("version 99"), HasSubstr("same release")));

  request = Request(Role::kComputeWorker, 5, "x");
  request.model->digest = 8;
  EXPECT_EQ(refusal(request).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refusal(request).message()),
              testing::AllOf(HasSubstr("cluster serves tiny"), HasSubstr("--kv-cache-dtype")));

  request = Request(Role::kComputeWorker, 5, "x");
  request.model->kv_storage = KvStorage::kInt8;
  EXPECT_THAT(std::string(refusal(request).message()),
              testing::AllOf(HasSubstr("x: attends K and V int8"), HasSubstr("compute workers as sent"),
                             HasSubstr("the same --kv-cache-dtype")));

  request = Request(Role::kComputeWorker, 5, "x");
  request.model->deterministic = true;
  EXPECT_THAT(std::string(refusal(request).message()),
              testing::AllOf(HasSubstr("x: runs with --deterministic"), HasSubstr("workers without it"),
                             HasSubstr("all of them alike")));

  EXPECT_EQ(refusal(Request(Role::kAttentionWorker, 1, "x")).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refusal(Request(Role::kAttentionWorker, 1, "x")).message()), HasSubstr("already a member"));
  EXPECT_THAT(std::string(refusal(Request(Role::kAttentionWorker, 5, "c")).message()), HasSubstr("--name"));

  for (uint32_t node = 10; node < 17; ++node) cluster.Join(Role::kAttentionWorker, node, "w" + std::to_string(node));
  EXPECT_EQ(refusal(Request(Role::kAttentionWorker, 30, "x")).code(), absl::StatusCode::kResourceExhausted);
}

control::JoinRequest ComputesOn(const std::string& arithmetic, uint32_t node, const std::string& name) {
  control::JoinRequest request = Request(Role::kComputeWorker, node, name);
  request.capabilities.arithmetic = arithmetic;
  return request;
}

TEST(Members, AComputeWorkerThatComputesInAnotherWayIsRefusedAlsoWhenTheFirstHasGone) {
  Cluster cluster;
  const auto first = cluster.members.Join(ComputesOn("GPU sm_90", 1, "c"), kStart);
  ASSERT_TRUE(first.ok());
  cluster.members.ModelComplete(cluster.actions);
  EXPECT_TRUE(cluster.members.Join(ComputesOn("GPU sm_90", 2, "d"), kStart).ok());
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = cluster.members.Join(ComputesOn("CPU avx512", 3, "e"), kStart).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()),
                testing::AllOf(HasSubstr("e: computes on CPU avx512, but c of this cluster on GPU sm_90"),
                               HasSubstr("--device"), HasSubstr("--unlike-workers")));
    cluster.members.Gone(first->worker, "killed", cluster.actions);  // what it computed lies in KV caches
  }
  EXPECT_TRUE(cluster.members.Join(Request(Role::kAttentionWorker, 4, "a"), kStart).ok());
}

TEST(Members, UnlikeComputeWorkersAreTakenOnRequest) {
  MembershipOptions options = Options();
  options.unlike_workers = true;
  Cluster cluster(options);
  ASSERT_TRUE(cluster.members.Join(ComputesOn("GPU sm_90", 1, "c"), kStart).ok());
  EXPECT_TRUE(cluster.members.IsUnlike(ComputesOn("CPU avx512", 3, "e")));
  EXPECT_TRUE(cluster.members.Join(ComputesOn("CPU avx512", 3, "e"), kStart).ok());
  EXPECT_FALSE(cluster.members.IsUnlike(ComputesOn("GPU sm_90", 2, "d")));
}

TEST(Members, UnlikeComputeWorkersAreOfKindsThatTheirArithmeticTells) {
  MembershipOptions options = Options();
  options.unlike_workers = true;
  Cluster cluster(options);
  const auto join = [&](const std::string& arithmetic, uint32_t node) {
    const control::JoinRequest request = ComputesOn(arithmetic, node, absl::StrCat("c", node));
    EXPECT_TRUE(cluster.members.Join(request, kStart).ok());
    return cluster.members.KindOf(request);
  };
  EXPECT_EQ(join("CPU avx512", 1), 0);
  EXPECT_EQ(join("GPU sm_90", 2), 1);
  EXPECT_EQ(join("CPU avx2", 3), 2);
  EXPECT_EQ(join("GPU sm_90", 4), 1);
  EXPECT_EQ(join("CPU avx512", 5), 0);
  EXPECT_EQ(join("", 6), 0) << "it does not say";
}

TEST(Members, AnotherTypeOfStatesIsNamed) {
  const auto with_states_in = [](DType type, uint32_t node, const std::string& name) {
    control::JoinRequest request = Request(Role::kComputeWorker, node, name);
    proto::LinearSpec state;
    state.heads = 2;
    state.key_dim = state.value_dim = 16;
    state.token_decay = true;
    state.state = type;
    state.blocks_per_head = type == DType::kF32 ? 3 : 2;
    request.model->attention = *proto::AttentionTable::Build({state}, {{}});
    request.model->digest = type == DType::kF32 ? 7 : 8;
    return request;
  };
  Cluster cluster;
  ASSERT_TRUE(cluster.members.Join(with_states_in(DType::kF32, 1, "c1"), kStart).ok());
  const auto other = cluster.members.Join(with_states_in(DType::kBF16, 2, "c2"), kStart);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(other.status().message(),
            "c2: keeps linear states in bfloat16, but this cluster keeps them in float32; give it the same "
            "--state-dtype, or start another scheduler");
  EXPECT_TRUE(cluster.members.Join(with_states_in(DType::kF32, 3, "c3"), kStart).ok());
}

TEST(Members, MoreBlocksThanTheMemoryItJoinedWithHoldsAreALie) {
  Cluster cluster;
  cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  const uint64_t most = (1 << 20) / (64 * 16);  // of 64 tokens, K and V of 8 bf16 each, which a GPU may keep in 8 bits
  const absl::Status lie = cluster.members.Ready(attention, {.kv_blocks = most + 1}, cluster.now, cluster.actions);
  EXPECT_EQ(lie.message(),
            "a: says that it has 1025 KV blocks, but the 1048576 bytes it joined with hold 1024 at most; "
            "run the same release of dovetail everywhere");
  EXPECT_EQ(
      cluster.members.Ready(attention, {.kv_blocks = 1, .kv_bytes = (1 << 20) + 1}, cluster.now, cluster.actions)
          .message(),
      "a: says that its KV has 1048577 bytes, but it joined with 1048576; run the same release of dovetail everywhere");
  EXPECT_FALSE(cluster.members.Ready(attention, {}, cluster.now, cluster.actions).ok());
  EXPECT_FALSE(cluster.members.Ready(attention, {.kv_blocks = uint64_t{1} << 40}, cluster.now, cluster.actions).ok());
  EXPECT_TRUE(cluster.members.Ready(attention, {.kv_blocks = most}, cluster.now, cluster.actions).ok());
}

TEST(Members, AnIncarnationThatWasFencedCanNeitherAttendNorJoinAgain) {
  Cluster cluster;
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  const Epoch epoch = cluster.members.Find(attention)->epoch;
  cluster.members.Gone(attention, "test", cluster.actions);
  EXPECT_EQ(cluster.members.Attend(attention, epoch, kStart, cluster.actions).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(cluster.members.Join(Request(Role::kAttentionWorker, 2, "a"), kStart).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(Members, ADrainingWorkerServesOnUntilItHasNothingLeft) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.Ready(compute, 0);
  cluster.Ready(attention);
  cluster.Apply(compute);
  cluster.Apply(attention);
  ASSERT_TRUE(cluster.members.Drain(attention, cluster.actions).ok());
  EXPECT_EQ(cluster.Count<DrainMember>(attention), 1);
  EXPECT_EQ(cluster.Count<EndServing>(attention), 0);
  cluster.members.Drained(attention, cluster.actions);
  EXPECT_EQ(cluster.Count<EndServing>(attention), 1);
  EXPECT_EQ(cluster.members.Drain(attention, cluster.actions).code(), absl::StatusCode::kNotFound);
}

// A pair: two workers of one process.
TEST(Members, DrainingOneWorkerOfAPairDrainsBoth) {
  for (const bool by_its_compute_worker : {true, false}) {
    Cluster cluster;
    std::vector<WorkerId> workers;
    for (const auto& [role, node, process] : std::vector<std::tuple<Role, uint32_t, uint64_t>>{
             {Role::kComputeWorker, 1, 77}, {Role::kAttentionWorker, 2, 77}, {Role::kAttentionWorker, 3, 78}}) {
      control::JoinRequest request = Request(role, node, absl::StrCat("w", node));
      request.process = process;
      const auto reply = cluster.members.Join(request, cluster.now);
      ASSERT_TRUE(reply.ok()) << reply.status();
      ASSERT_TRUE(cluster.members.Attend(reply->worker, reply->epoch, cluster.now, cluster.actions).ok());
      if (role == Role::kComputeWorker) cluster.members.ModelComplete(cluster.actions);
      workers.push_back(reply->worker);
    }
    const auto [compute, attention, other] = std::tuple(workers[0], workers[1], workers[2]);
    EXPECT_EQ(cluster.members.PartnerOf(*cluster.members.Find(compute))->worker, attention);
    EXPECT_EQ(cluster.members.PartnerOf(*cluster.members.Find(attention))->worker, compute);
    EXPECT_EQ(cluster.members.PartnerOf(*cluster.members.Find(other)), nullptr);
    for (const WorkerId worker : workers) cluster.Ready(worker, worker == compute ? 0 : 100);
    for (const WorkerId worker : workers) cluster.Apply(worker);
    ASSERT_TRUE(cluster.members.Drain(by_its_compute_worker ? compute : attention, cluster.actions).ok());
    EXPECT_EQ(cluster.Count<DrainMember>(compute), 1);
    EXPECT_EQ(cluster.Count<DrainMember>(attention), 1);
    EXPECT_EQ(cluster.Count<DrainMember>(other), 0);
    cluster.members.Drained(attention, cluster.actions);
    EXPECT_EQ(cluster.members.PartnerOf(*cluster.members.Find(compute)), nullptr);
  }
}

TEST(Members, AWorkerMayDrainAloneOnlyWhileNoOtherOfItsRoleDrains) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId first = cluster.Join(Role::kAttentionWorker, 2, "a1");
  const WorkerId second = cluster.Join(Role::kAttentionWorker, 3, "a2");
  cluster.Ready(compute, 0);
  for (const WorkerId worker : {first, second}) cluster.Ready(worker);
  for (const WorkerId worker : {compute, first, second}) cluster.Apply(worker);
  EXPECT_TRUE(cluster.members.MayDrainAlone(first).ok());
  ASSERT_TRUE(cluster.members.Drain(first, cluster.actions).ok());
  EXPECT_TRUE(cluster.members.MayDrainAlone(first).ok());  // asked again
  EXPECT_TRUE(cluster.members.MayDrainAlone(compute).ok());
  const absl::Status other = cluster.members.MayDrainAlone(second);
  EXPECT_EQ(other.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(other.message(), "a1 drains");
  cluster.members.Drained(first, cluster.actions);
  EXPECT_TRUE(cluster.members.MayDrainAlone(second).ok());
}

// A worker ends when it is dismissed as drained, and joins again after any other end.
TEST(Members, AWorkerToldToDrainDoesNotComeBackWhateverHappensOnItsWayOut) {
  const auto how_it_ended = [](const Cluster& cluster, WorkerId worker) {
    for (const MemberAction& action : cluster.actions)
      if (const auto* end = std::get_if<EndSession>(&action); end != nullptr && end->worker == worker)
        return absl::StrCat(end->dismissed ? "dismissed: " : "cut: ", end->why);
    return std::string("not yet");
  };
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.Ready(compute, 0);
  cluster.Ready(attention);
  cluster.Apply(compute);
  cluster.Apply(attention);
  ASSERT_TRUE(cluster.members.Drain(attention, cluster.actions).ok());
  cluster.members.Expire(kStart + absl::Hours(1), cluster.actions);
  EXPECT_EQ(how_it_ended(cluster, attention), "dismissed: drained");

  Cluster early;
  const WorkerId joining = early.Join(Role::kAttentionWorker, 2, "a");
  ASSERT_TRUE(early.members.Drain(joining, early.actions).ok());
  EXPECT_EQ(how_it_ended(early, joining), "dismissed: drained");
}

TEST(Members, AProcessThatWasDrainedIsToldSoAgainIfItMissedItAndAnotherOneMayHaveItsName) {
  const auto request = [](uint32_t node, uint64_t process) {
    control::JoinRequest made = Request(Role::kAttentionWorker, node, "a");
    made.process = process;
    return made;
  };
  // Drained while it served, and before; and one that left by itself, which may come back.
  for (const std::string how : {"serving", "joining", "left"}) {
    Cluster cluster;
    const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
    const auto reply = cluster.members.Join(request(2, 77), cluster.now);
    ASSERT_TRUE(reply.ok()) << reply.status();
    if (how == "serving") {
      ASSERT_TRUE(cluster.members.Attend(reply->worker, reply->epoch, cluster.now, cluster.actions).ok());
      cluster.Ready(compute, 0);
      cluster.Ready(reply->worker);
      cluster.Apply(compute);
      cluster.Apply(reply->worker);
      ASSERT_TRUE(cluster.Serves(reply->worker));
    }
    if (how != "left") {
      ASSERT_TRUE(cluster.members.Drain(reply->worker, cluster.actions).ok());
    }
    cluster.members.Gone(reply->worker, "its connection ended", cluster.actions);
    const auto again = cluster.members.Join(request(3, 77), cluster.now);
    EXPECT_EQ(again.status().code(), how == "left" ? absl::StatusCode::kOk : absl::StatusCode::kAborted) << how;
    if (how != "left") {
      EXPECT_TRUE(cluster.members.Join(request(4, 78), cluster.now).ok());
    }
  }
}

TEST(Members, OfTwoWorkersThatCannotReachEachOtherTheAttentionWorkerGoes) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId attention = cluster.Join(Role::kAttentionWorker, 2, "a");
  cluster.Ready(compute, 0);
  cluster.Ready(attention);
  cluster.members.LinkFailed(compute, {NodeId(2), Epoch(999), "reset"}, kStart, cluster.actions);
  EXPECT_NE(cluster.members.Find(attention), nullptr) << "the report was of a former incarnation";
  cluster.members.LinkFailed(compute, {NodeId(2), Epoch(20), "reset"}, cluster.now, cluster.actions);
  EXPECT_NE(cluster.members.Find(attention), nullptr) << "it may have ended, which would explain the link";
  cluster.Settle();
  EXPECT_EQ(cluster.members.Find(attention), nullptr);
  EXPECT_NE(cluster.members.Find(compute), nullptr);
}

TEST(Members, APeerThatIsListedButNotConnectedKeepsOnlyWhoNeedsItFromServing) {
  Cluster cluster;
  const WorkerId compute = cluster.Join(Role::kComputeWorker, 1, "c");
  const WorkerId near = cluster.Join(Role::kAttentionWorker, 2, "near");
  const WorkerId far = cluster.Join(Role::kAttentionWorker, 3, "far");
  for (const WorkerId worker : {compute, near, far}) cluster.Ready(worker, worker == compute ? 0 : 10);
  cluster.Apply(near);
  cluster.Apply(far);
  const uint64_t version = cluster.members.Find(compute)->sent.back().first;
  ASSERT_TRUE(cluster.members.Applied(compute, {version, {NodeId(3)}}, cluster.now, cluster.actions).ok());
  EXPECT_TRUE(cluster.Serves(compute) && cluster.Serves(near));
  EXPECT_FALSE(cluster.Serves(far));
  ASSERT_TRUE(cluster.members.Applied(compute, {version, {}}, cluster.now, cluster.actions).ok());
  EXPECT_TRUE(cluster.Serves(far));
}

// Whatever happens in whatever order: BeginServing and EndServing alternate, and no pair that must exchange frames
// serves unconnected.
TEST(Members, RandomLivesNeverUseAWorkerThatIsNotConnected) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Cluster cluster;
    std::map<WorkerId, bool> used;
    std::map<WorkerId, std::vector<control::Peers>> unread;
    uint32_t next_node = 1;
    for (int turn = 0; turn < 120; ++turn) {
      std::vector<WorkerId> ids;
      for (const auto& [id, member] : cluster.members.members()) ids.push_back(id);
      const WorkerId some = ids.empty() ? WorkerId(0) : ids[random() % ids.size()];
      switch (random() % 6) {
        case 0:
          if (ids.size() < 8) {
            const uint32_t node = next_node++;
            cluster.Join(node % 3 == 0 ? Role::kComputeWorker : Role::kAttentionWorker, node,
                         "w" + std::to_string(node));
          }
          break;
        case 1: cluster.members.Ready(some, {.kv_blocks = 10}, cluster.now, cluster.actions).IgnoreError(); break;
        case 2:
        case 3:
          if (!unread[some].empty()) {
            // In two steps now and then: first all but one are connected.
            control::Applied applied{unread[some].front().version, {}};
            if (random() % 2 == 0) applied.unconnected.push_back(unread[some].front().peers.back().node);
            EXPECT_TRUE(cluster.members.Applied(some, applied, cluster.now, cluster.actions).ok());
            if (applied.unconnected.empty()) unread[some].erase(unread[some].begin());
          }
          break;
        case 4:
          if (random() % 4 == 0) cluster.members.Gone(some, "test", cluster.actions);
          break;
        case 5:
          if (random() % 4 == 0) cluster.members.Drain(some, cluster.actions).IgnoreError();
          break;
      }
      for (const MemberAction& action : cluster.actions) {
        if (const auto* peers = std::get_if<SendPeers>(&action)) unread[peers->worker].push_back(peers->peers);
        if (const auto* begin = std::get_if<BeginServing>(&action)) {
          EXPECT_FALSE(std::exchange(used[begin->worker], true));
        }
        if (const auto* end = std::get_if<EndServing>(&action)) {
          EXPECT_TRUE(std::exchange(used[end->worker], false));
        }
        if (const auto* end = std::get_if<EndSession>(&action)) unread.erase(end->worker);
      }
      cluster.actions.clear();
      for (const auto& [a, one] : cluster.members.members())
        for (const auto& [b, other] : cluster.members.members())
          if (one.state == MemberState::kServing && other.state == MemberState::kServing &&
              one.request.role != other.request.role) {
            EXPECT_TRUE(one.known.contains(other.request.node))
                << a.value() << " serves but does not know " << b.value();
          }
    }
  }
}

}  // namespace
}  // namespace dovetail::scheduler
