#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "control/membership_client.h"
#include "control/table_limits.h"
#include "proto/frame.h"
#include "scheduler/scheduler_main.h"
#include "tests/cluster/inproc_hub.h"

// Hybrids whose convolutions have tens of megabytes of constants join, and their attention workers get them all.

namespace dovetail::control {
namespace {

using ::testing::HasSubstr;

// Of `ops` layers with 256 heads of 576 channels, 2.3 MB each.
proto::AttentionTable Table(int ops) {
  proto::LinearSpec state;
  state.heads = 256;
  state.key_dim = 256;
  state.value_dim = 64;
  state.conv_width = 4;
  std::vector<proto::LinearConstants> constants(ops);
  for (int op = 0; op < ops; ++op) {
    constants[op].log_decay.assign(state.heads, -0.5f);
    constants[op].conv.assign(state.conv_width * state.heads * state.channels(), 0.25f * static_cast<float>(op));
  }
  return *proto::AttentionTable::Build(std::vector<proto::AttentionSpec>(ops, state), constants);
}

class LargeTable : public ::testing::Test {
 protected:
  LargeTable() {
    scheduler::SchedulerMainOptions options;
    options.listen = "127.0.0.1:0";
    options.lease = absl::Seconds(20);
    options.scheduler.max_model_len = 64;
    auto started = scheduler::SchedulerMain::Start(options, Epoch(1), hub_.Create(NodeId(0), Epoch(1)));
    EXPECT_TRUE(started.ok()) << started.status();
    scheduler_ = *std::move(started);
  }

  MembershipClient::Options Member(Role role, uint32_t node) {
    MembershipClient::Options options;
    options.scheduler = absl::StrCat("127.0.0.1:", scheduler_->port());
    options.call_timeout = absl::Seconds(60);
    JoinRequest& request = options.request;
    request.role = role;
    request.name = absl::StrCat("member-", node);
    request.node = NodeId(node);
    request.epoch = Epoch(node);
    request.build_version = kBuildVersion;
    request.frame_version = proto::kFrameVersion;
    request.data_plane_version = "inproc 1";
    request.data_plane_address = absl::StrCat("inproc:", node, ":", node);
    request.capabilities = {uint64_t{1} << 30, 1, 1'000'000'000, "cpu"};
    return options;
  }
  static ModelSummary Model(int ops) {
    ModelSummary model;
    model.name = "large";
    model.digest = 7;
    model.attention = Table(ops);
    model.vocab_size = 10;
    model.max_positions = 64;
    return model;
  }

  test::InprocHub hub_;
  std::unique_ptr<scheduler::SchedulerMain> scheduler_;
};

TEST_F(LargeTable, GoesFromTheComputeWorkerThroughTheSchedulerToAttentionWorkers) {
  MembershipClient::Options compute = Member(Role::kComputeWorker, 1);
  compute.request.model = Model(20);
  const auto first = MembershipClient::Join(compute);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = MembershipClient::Join(Member(Role::kAttentionWorker, 2));
  ASSERT_TRUE(second.ok()) << second.status();
  std::optional<Configuration> got;
  MembershipClient::Handlers handlers;
  handlers.on_configuration = [&](Configuration configuration) {
    got = std::move(configuration);
    (*second)->Stop();
  };
  handlers.on_peers = [](Peers) {};
  handlers.heartbeat = [] { return Heartbeat{}; };
  EXPECT_TRUE((*second)->Run(handlers).ok());
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->attention.constants, compute.request.model->attention.constants);
  EXPECT_EQ(got->attention.op_count(), 20);
}

TEST_F(LargeTable, ThatIsLargerThanTheLimitIsRefusedByName) {
  MembershipClient::Options compute = Member(Role::kComputeWorker, 1);
  compute.request.model = Model(114);
  EXPECT_THAT(std::string(MembershipClient::Join(compute).status().message()),
              HasSubstr("the convolutions and decays of the model's linear layers have 269076480 bytes; at most "
                        "268435456"));
}

}  // namespace
}  // namespace dovetail::control
