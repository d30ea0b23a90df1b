#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention_worker/attention_worker_node.h"
#include "compute_worker/compute_worker_node.h"
#include "scheduler/core/limits.h"
#include "scheduler/scheduler_node.h"
#include "tests/cluster/node_cluster.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"
#include "transport/inproc/inproc_fabric.h"

// Steps whose plan or result does not get through: cannot be sent, cannot be read, or is lost. A scheduler, compute
// workers and an attention worker in one thread, time by hand.

namespace dovetail::test {
namespace {

using proto::FrameType;
using ::testing::HasSubstr;

constexpr uint32_t kBlocks = 20000;
constexpr absl::Duration kStepTimeout = absl::Seconds(30);

// What becomes of a message that is sent: true if it goes on its way as it is then.
using OnSend = std::function<absl::StatusOr<bool>(const proto::FrameHeader& header, std::vector<std::byte>& payload)>;

class MeddlingPort final : public transport::Port {
 public:
  explicit MeddlingPort(std::unique_ptr<transport::Port> port) : port_(std::move(port)) {}
  NodeId id() const override { return port_->id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    if (on_send) {
      DT_ASSIGN_OR_RETURN(const bool sent, on_send(header, payload));
      if (!sent) return absl::OkStatus();
    }
    const auto now = proto::MakeHeader(header.type, Epoch(header.epoch), StepId(header.step),
                                       MicroBatchId(header.micro_batch), header.op, payload.size(), header.busy_us);
    return port_->SendMessage(to, now, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    return port_->SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override { return port_->Poll(handler, max_frames); }

  OnSend on_send;

 private:
  const std::unique_ptr<transport::Port> port_;
};

// Node 0 is the scheduler, node 1 the attention worker, those from 2 on are compute workers: worker 2 is on node 2.
class Cluster {
 public:
  Cluster(NodeModel& model, int compute_workers) : model_(model) {
    for (int i = 0; i < 2 + kMostCompute; ++i)
      ports_.push_back(std::make_unique<MeddlingPort>(fabric_.CreatePort(nullptr)));
    scheduler::SchedulerOptions options;
    options.max_num_batched_tokens = 128;
    options.max_num_seqs = 8;
    options.max_model_len = 512;
    options.attention = model.table;
    options.model_digest = 7;
    options.step_timeout = kStepTimeout;
    scheduler_ = std::make_unique<scheduler::SchedulerNode>(
        options, 0, *ports_[0], clock_,
        [this](requests::GenerationUpdate update) { streams_[update.request.value()].Take(std::move(update)); },
        [](const proto::StepResult&, int, int) {});
    attention::AttentionWorkerOptions attention;
    attention.worker = WorkerId(1);
    attention.epoch = Epoch(1);
    attention.kv_blocks = kBlocks;
    attention.micro_batches = 16;
    attention.model_digest = 7;
    attention_ = *attention::AttentionWorkerNode::Create(model_.table, attention, *model_.device, *ports_[1], clock_);
    scheduler_->AddAttentionWorker(WorkerId(1), Epoch(1), NodeId(1), kBlocks);
    for (int i = 0; i < compute_workers; ++i) AddCompute();
  }

  int AddCompute() {
    const int node = 2 + static_cast<int>(compute_.size());
    compute::ComputeWorkerOptions options;
    options.micro_batches = 16;
    options.max_step_tokens = 128;
    options.vocab_size = static_cast<int32_t>(model_.loaded->config().vocab_size);
    compute_.push_back(std::make_unique<compute::ComputeWorkerNode>(*model_.loaded, model_.table, options, NodeId(0),
                                                                    *model_.device, *ports_[node], clock_));
    compute_.back()->AddAttentionWorker({WorkerId(1), Epoch(1), NodeId(1)});
    scheduler_->AddComputeWorker(WorkerId(static_cast<uint32_t>(node)), NodeId(static_cast<uint32_t>(node)));
    return node;
  }

  MeddlingPort& port(int node) { return *ports_[node]; }

  uint64_t Submit(int prompt, int max_tokens, bool logits = false) {
    return Submit(prompt, max_tokens, {.logits_of_output = logits});
  }
  uint64_t Submit(int prompt, int max_tokens, requests::GenerationRequest request) {
    request.tenant = "test";
    for (int i = 0; i < prompt; ++i) request.prompt.push_back(1 + (17 * i * i + 31 * i) % 90);
    request.sampling.temperature = 0;
    request.max_tokens = max_tokens;
    request.id = RequestId(++requests_);
    scheduler_->Handle(scheduler::RequestArrived{std::make_shared<requests::GenerationRequest>(std::move(request))});
    return requests_;
  }

  // False: not in a time that only a hang takes. Nothing to do makes time jump to the scheduler's next deadline.
  bool Until(const std::function<bool()>& condition) {
    for (int turn = 0, quiet = 0; turn < 100'000; ++turn) {
      if (condition()) return true;
      clock_.now += absl::Microseconds(20);
      int frames = scheduler_->Poll() + attention_->Poll();
      for (const auto& compute : compute_) frames += compute->Poll();
      for (scheduler::SchedulerNode::Dismissal& gone : scheduler_->TakeDismissals()) dismissed.push_back(gone);
      const absl::Time deadline = scheduler_->NextDeadline();
      quiet = frames == 0 ? quiet + 1 : 0;
      if (quiet > 50 && deadline != absl::InfiniteFuture()) clock_.now = std::max(clock_.now, deadline);
    }
    return false;
  }
  bool UntilTheEndOf(uint64_t request) {
    return Until([&] { return streams_[request].finished; });
  }
  bool UntilNothingIsHeld() {
    return Until([&] { return attention_->core().status().blocks_in_use == 0; });
  }
  const Stream& stream(uint64_t request) { return streams_[request]; }
  absl::Duration time() const { return clock_.now - absl::UnixEpoch(); }

  std::vector<scheduler::SchedulerNode::Dismissal> dismissed;

 private:
  static constexpr int kMostCompute = 3;

  NodeModel& model_;
  HandClock clock_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<MeddlingPort>> ports_;
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::unique_ptr<attention::AttentionWorkerNode> attention_;
  std::vector<std::unique_ptr<compute::ComputeWorkerNode>> compute_;
  std::map<uint64_t, Stream> streams_;
  uint64_t requests_ = 0;
};

class StepFailures : public testing::Test {
 protected:
  std::vector<TokenId> Undisturbed(int prompt, int max_tokens) {
    Cluster cluster(model_, 1);
    const uint64_t id = cluster.Submit(prompt, max_tokens);
    EXPECT_TRUE(cluster.UntilTheEndOf(id));
    EXPECT_EQ(cluster.stream(id).tokens.size(), static_cast<size_t>(max_tokens));
    return cluster.stream(id).tokens;
  }
  NodeModel model_{WriteTinyModel({}, TempFolder())};
};

// The type's messages number `first`, ... `first + count - 1` of this port, from 0, are treated so; others pass.
OnSend Some(FrameType type, int first, int count, OnSend treat) {
  return
      [=, seen = 0](const proto::FrameHeader& header, std::vector<std::byte>& payload) mutable -> absl::StatusOr<bool> {
        if (header.type != type) return true;
        const int number = seen++;
        if (number < first || number >= first + count) return true;
        return treat(header, payload);
      };
}

absl::StatusOr<bool> Spoil(const proto::FrameHeader&, std::vector<std::byte>& payload) {
  payload[10] = std::byte{0xff};  // no such status
  return true;
}
absl::StatusOr<bool> Lose(const proto::FrameHeader&, std::vector<std::byte>&) { return false; }
absl::StatusOr<bool> TooLarge(const proto::FrameHeader&, std::vector<std::byte>&) {
  return InvalidArgument("a frame of 300000000 bytes; at most 268435456");
}

TEST_F(StepFailures, APlanThatCannotBeSentEndsItsRequestsAndNoOthers) {
  Cluster cluster(model_, 1);
  cluster.port(0).on_send = Some(FrameType::kStepPlan, 3, 1, TooLarge);
  const uint64_t ended = cluster.Submit(40, 20);
  ASSERT_TRUE(cluster.UntilTheEndOf(ended));
  EXPECT_THAT(cluster.stream(ended).error, HasSubstr("the step's plan cannot be sent: a frame of 300000000 bytes"));
  EXPECT_EQ(cluster.stream(ended).tokens.size(), 3u);
  const uint64_t next = cluster.Submit(40, 20);
  ASSERT_TRUE(cluster.UntilTheEndOf(next));
  EXPECT_EQ(cluster.stream(next).tokens, Undisturbed(40, 20));
  EXPECT_TRUE(cluster.UntilNothingIsHeld());
}

TEST_F(StepFailures, AResultThatCannotBeReadIsAskedForAgain) {
  for (const int workers : {1, 2}) {
    Cluster cluster(model_, workers);
    for (int node = 2; node < 2 + workers; ++node)
      cluster.port(node).on_send = Some(FrameType::kStepResult, 4, 1, Spoil);
    const uint64_t id = cluster.Submit(40, 20);
    ASSERT_TRUE(cluster.UntilTheEndOf(id));
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_EQ(cluster.stream(id).tokens, Undisturbed(40, 20));
    EXPECT_TRUE(cluster.dismissed.empty());
    EXPECT_TRUE(cluster.UntilNothingIsHeld());
  }
}

TEST_F(StepFailures, AnotherWorkerDoesTheStepsOfOneWhoseResultsCannotBeRead) {
  Cluster cluster(model_, 2);
  cluster.port(2).on_send = Some(FrameType::kStepResult, 0, 1'000'000, Spoil);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(cluster.Submit(40, 20));
  for (const uint64_t id : ids) {
    ASSERT_TRUE(cluster.UntilTheEndOf(id));
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_EQ(cluster.stream(id).tokens, Undisturbed(40, 20));
  }
}

TEST_F(StepFailures, ResultsThatCanNeverBeReadEndTheRequest) {
  Cluster cluster(model_, 1);
  cluster.port(2).on_send = Some(FrameType::kStepResult, 4, 1'000'000, Spoil);
  const uint64_t id = cluster.Submit(40, 20);
  ASSERT_TRUE(cluster.UntilTheEndOf(id));
  EXPECT_THAT(cluster.stream(id).error,
              HasSubstr("the last of 3 attempts at this step: StepResult: status is unknown"));
  EXPECT_EQ(cluster.stream(id).tokens.size(), 4u);
  EXPECT_TRUE(cluster.UntilNothingIsHeld());
}

TEST_F(StepFailures, AResultThatCannotBeSentSaysSo) {
  Cluster cluster(model_, 1);
  cluster.port(2).on_send = [](const proto::FrameHeader& header, std::vector<std::byte>& payload) {
    return header.type == FrameType::kStepResult && payload.size() > 300 ? TooLarge(header, payload) : true;
  };
  const uint64_t ended = cluster.Submit(40, 20, /*logits=*/true);
  const uint64_t fine = cluster.Submit(40, 20);
  ASSERT_TRUE(cluster.UntilTheEndOf(ended));
  EXPECT_THAT(cluster.stream(ended).error, HasSubstr("the step's result cannot be sent: a frame of 300000000 bytes"));
  ASSERT_TRUE(cluster.UntilTheEndOf(fine));
  EXPECT_TRUE(cluster.UntilNothingIsHeld());
}

TEST_F(StepFailures, AResultWaitsUntilTheSchedulerHasRoomForIt) {
  Cluster cluster(model_, 1);
  cluster.port(2).on_send = Some(FrameType::kStepResult, 4, 5, [](const auto&, auto&) -> absl::StatusOr<bool> {
    return ResourceExhausted("node 0 reads slowly");
  });
  const uint64_t id = cluster.Submit(40, 20);
  ASSERT_TRUE(cluster.UntilTheEndOf(id));
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).tokens, Undisturbed(40, 20));
  EXPECT_LT(cluster.time(), kStepTimeout);
}

TEST_F(StepFailures, AWorkerThatGivesNoResultInTimeIsDismissedAndAnotherGoesOn) {
  Cluster cluster(model_, 1);
  cluster.port(2).on_send = Some(FrameType::kStepResult, 4, 1, Lose);
  const uint64_t id = cluster.Submit(40, 20);
  ASSERT_TRUE(cluster.Until([&] { return !cluster.dismissed.empty(); }));
  EXPECT_GE(cluster.time(), kStepTimeout);
  EXPECT_LT(cluster.time(), 2 * kStepTimeout) << "after four steps it is known how long one takes";
  EXPECT_EQ(cluster.dismissed[0].worker, WorkerId(2));
  EXPECT_THAT(cluster.dismissed[0].why, HasSubstr("--step-timeout"));
  EXPECT_FALSE(cluster.stream(id).finished);
  cluster.AddCompute();
  ASSERT_TRUE(cluster.UntilTheEndOf(id));
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).tokens, Undisturbed(40, 20));
  EXPECT_EQ(cluster.dismissed.size(), 1u);
  EXPECT_TRUE(cluster.UntilNothingIsHeld());
}

// The longest lists that a request may have: 8 MiB of them.
requests::GenerationRequest WithLongLists(std::vector<TokenId> allowed) {
  requests::GenerationRequest request;
  while (allowed.size() < proto::kMaxTokenList) allowed.push_back(allowed[allowed.size() % 7]);
  request.sampling.allowed_token_ids = std::move(allowed);
  request.sampling.banned_token_ids.assign(proto::kMaxTokenList, 3);
  return request;
}

const std::vector<TokenId> kSomeTokens = {5, 11, 17, 29, 41, 53, 71};

// Notes the largest plan and the bytes of all.
struct Plans {
  size_t largest = 0, bytes = 0;
  OnSend Count() {
    return [this](const proto::FrameHeader& header, std::vector<std::byte>& payload) -> absl::StatusOr<bool> {
      if (header.type != FrameType::kStepPlan) return true;
      largest = std::max(largest, payload.size());
      bytes += payload.size();
      return true;
    };
  }
};

TEST_F(StepFailures, LongListsCrossOnceToEachComputeWorker) {
  const size_t lists = size_t{2} * proto::kMaxTokenList * sizeof(TokenId);
  std::vector<TokenId> expected;
  for (const int lost : {0, 1}) {
    Cluster cluster(model_, 1);
    Plans plans;
    cluster.port(0).on_send = plans.Count();
    const uint64_t id = cluster.Submit(40, 20, WithLongLists(kSomeTokens));
    ASSERT_TRUE(cluster.Until([&] { return cluster.stream(id).tokens.size() >= 5; }));
    if (lost == 1) {
      cluster.port(2).on_send = Some(FrameType::kStepResult, 0, 1, Lose);
      ASSERT_TRUE(cluster.Until([&] { return !cluster.dismissed.empty(); }));
      cluster.AddCompute();
    }
    ASSERT_TRUE(cluster.UntilTheEndOf(id));
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_GE(plans.bytes, lists * (1 + lost));
    EXPECT_LT(plans.bytes, lists * (1 + lost) + lists / 2);
    for (const TokenId token : cluster.stream(id).tokens) EXPECT_THAT(kSomeTokens, testing::Contains(token));
    if (lost == 0) expected = cluster.stream(id).tokens;
    EXPECT_EQ(cluster.stream(id).tokens, expected);
    EXPECT_TRUE(cluster.UntilNothingIsHeld());
  }
}

TEST_F(StepFailures, APlanGivesABoundedPartOfTheListsOfManySequences) {
  Cluster cluster(model_, 1);
  Plans plans;
  cluster.port(0).on_send = plans.Count();
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    requests::GenerationRequest request = WithLongLists(kSomeTokens);
    request.choices = 4;
    ids.push_back(cluster.Submit(40, 10, std::move(request)));
  }
  for (const uint64_t id : ids) {
    ASSERT_TRUE(cluster.UntilTheEndOf(id));
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_EQ(cluster.stream(id).tokens.size(), 40u);
  }
  EXPECT_LT(plans.largest, scheduler::kMaxBytesGiven + (size_t{1} << 20));
  EXPECT_GT(plans.bytes, scheduler::kMaxBytesGiven) << "the lists of all sequences must exceed what one plan gives";
}

TEST_F(StepFailures, ListsThatAWorkerDoesNotHaveAreGivenAgain) {
  Cluster undisturbed(model_, 1);
  const uint64_t whole = undisturbed.Submit(40, 20, WithLongLists(kSomeTokens));
  ASSERT_TRUE(undisturbed.UntilTheEndOf(whole));
  Cluster cluster(model_, 1);
  int withheld = 0;
  cluster.port(0).on_send = [&](const proto::FrameHeader& header,
                                std::vector<std::byte>& payload) -> absl::StatusOr<bool> {
    if (header.type != FrameType::kStepPlan || withheld > 0) return true;
    proto::StepPlan plan = *proto::DecodeStepPlan(payload);
    for (proto::StepEntry& entry : plan.entries) withheld += std::exchange(entry.given.lists, nullptr) != nullptr;
    proto::Encode(plan, payload);
    return true;
  };
  const uint64_t id = cluster.Submit(40, 20, WithLongLists(kSomeTokens));
  ASSERT_TRUE(cluster.UntilTheEndOf(id));
  EXPECT_EQ(withheld, 1);
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).tokens, undisturbed.stream(whole).tokens);
  EXPECT_TRUE(cluster.dismissed.empty());
}

TEST_F(StepFailures, AListThatIsTooLongIsTheRequestsError) {
  Cluster cluster(model_, 1);
  requests::GenerationRequest request;
  request.sampling.allowed_token_ids.assign(proto::kMaxTokenList + 1, 5);
  const uint64_t id = cluster.Submit(40, 20, std::move(request));
  ASSERT_TRUE(cluster.UntilTheEndOf(id));
  EXPECT_THAT(cluster.stream(id).error, HasSubstr("allowed_token_ids: 1048577 tokens; at most 1048576 are allowed"));
}

}  // namespace
}  // namespace dovetail::test
