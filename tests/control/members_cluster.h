#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/frame.h"
#include "scheduler/control_members.h"

// Members as values, and what was asked of the shell about them.

namespace dovetail::scheduler {

using control::Role;

inline const absl::Time kStart = absl::UnixEpoch();

inline proto::AttentionTable Table(int heads = 4) {
  proto::SoftmaxSpec spec;
  spec.query_heads = heads;
  spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 8;
  spec.scale = 1;
  return *proto::AttentionTable::Build({spec, spec});
}

inline control::JoinRequest Request(Role role, uint32_t node, const std::string& name) {
  control::JoinRequest request;
  request.role = role;
  request.name = name;
  request.node = NodeId(node);
  request.epoch = Epoch(node * 10);
  request.build_version = "test";
  request.frame_version = proto::kFrameVersion;
  request.data_plane_version = "ucx 1";
  request.data_plane_address = "address of " + name;
  request.capabilities = {1 << 20, 4, 10'000'000'000, "cpu"};
  if (role == Role::kComputeWorker) {
    request.model.emplace();
    request.model->name = "tiny";
    request.model->digest = 7;
    request.model->attention = Table();
    request.model->vocab_size = 10;
    request.model->max_positions = 64;
  }
  return request;
}

inline MembershipOptions Options() {
  MembershipOptions options;
  options.data_plane_version = "ucx 1";
  options.data_plane_address = "scheduler";
  options.max_members = 8;
  return options;
}

// The members and what was asked of the shell. Says "applied" on a worker's behalf when told to.
struct Cluster {
  explicit Cluster(const MembershipOptions& options = Options()) : members(options) {}

  ControlMembers members;
  absl::Time now = kStart;
  std::vector<MemberAction> actions;

  WorkerId Join(Role role, uint32_t node, const std::string& name) {
    const auto reply = members.Join(Request(role, node, name), now);
    EXPECT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(members.Attend(reply->worker, reply->epoch, now, actions).ok());
    if (role == Role::kComputeWorker) members.ModelComplete(actions);
    return reply->worker;
  }
  void Ready(WorkerId worker, uint64_t blocks = 100) {
    ASSERT_TRUE(members.Ready(worker, {.kv_blocks = blocks}, now, actions).ok());
  }
  // The worker connects to every member that the newest list names.
  void Apply(WorkerId worker) {
    uint64_t version = 0;
    for (const MemberAction& action : actions)
      if (const auto* peers = std::get_if<SendPeers>(&action); peers != nullptr && peers->worker == worker)
        version = peers->peers.version;
    ASSERT_NE(version, 0u) << "worker " << worker.value() << " was sent no peers";
    ASSERT_TRUE(members.Applied(worker, {version, {}}, now, actions).ok());
  }
  // `from` hears nothing from `about`, and says so again while Settle() goes on.
  void HearsNothing(WorkerId from, WorkerId about, const std::string& why) {
    const Member* member = members.Find(about);
    said_again.emplace_back(
        from, control::LinkFailed{member->request.node, member->epoch, why, control::LinkFailed::Kind::kSilent});
    members.LinkFailed(from, said_again.back().second, now, actions);
  }
  std::vector<std::pair<WorkerId, control::LinkFailed>> said_again;
  // All members are heard for as long as it takes to judge a bad link.
  void Settle() {
    for (const absl::Time end = now + Options().settling; now < end;) {
      now += absl::Milliseconds(50);
      for (const auto& [worker, member] : members.members()) members.Heard(worker, {}, now);
      for (const auto& [from, silent] : said_again) members.LinkFailed(from, silent, now, actions);
      members.Expire(now, actions);
    }
  }
  template <typename Action>
  int Count(WorkerId worker) const {
    int count = 0;
    for (const MemberAction& action : actions)
      if (const auto* found = std::get_if<Action>(&action); found != nullptr && found->worker == worker) ++count;
    return count;
  }
  std::string WhyOut(WorkerId worker) const {
    for (const MemberAction& action : actions)
      if (const auto* end = std::get_if<EndSession>(&action); end != nullptr && end->worker == worker) return end->why;
    return "";
  }
  bool Serves(WorkerId worker) const {
    return members.Find(worker) != nullptr && members.Find(worker)->state == MemberState::kServing;
  }
};

}  // namespace dovetail::scheduler
