#include "compute_worker/seam_choice.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compute_worker/dense_backend.h"
#include "compute_worker/gpu_links.h"
#include "compute_worker/peer_crossing.h"
#include "gmock/gmock.h"
#include "proto/link_frames.h"
#include "tests/compute_worker/small_spec.h"

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Epoch kEpoch{1};
constexpr MicroBatchId kFirst{0};

proto::AttentionTable OneOp() { return *proto::AttentionTable::Build({SmallSpec()}); }

// Writes down what is sent, "type -> node" each.
class NotingPort final : public transport::Port {
 public:
  NodeId id() const override { return NodeId(1); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    sent.push_back(absl::StrCat("message ", static_cast<int>(header.type), " -> ", to.value()));
    messages.push_back(std::move(payload));
    return status;
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    if (room == 0) return ResourceExhausted("so many bytes are in flight");
    --room;
    sent.push_back(absl::StrCat("tensor ", static_cast<int>(header.type), " of ", payload.size(), " -> ", to.value()));
    return status;
  }
  int Poll(transport::FrameHandler&, int) override { return 0; }

  std::vector<std::string> sent;
  std::vector<std::vector<std::byte>> messages;
  absl::Status status;
  int room = 1 << 30;  // for so many tensors
};

class NoDense final : public DenseBackend {
 public:
  std::vector<SequenceId> PendingGrammars(const proto::StepPlan&) override { return {}; }
  absl::Status PrepareStep(const ComputeWorkerCore&, MicroBatchId, const exchange::Seam&) override {
    return absl::OkStatus();
  }
  absl::Status Run(const ComputeWorkerCore&, MicroBatchId, int) override { return absl::OkStatus(); }
  absl::Status AttendPrompts(const ComputeWorkerCore&, MicroBatchId, int) override { return absl::OkStatus(); }
  absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p, int) override {
    return std::span(bytes_).first(core.PartsOf(id)[p].layouts[0].query_bytes);
  }
  absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                    int) override {
    return std::span(bytes_).first(core.PartsOf(id)[p].layouts[0].key_value_bytes);
  }
  absl::Status Sample(const proto::StepPlan&, MicroBatchId, proto::StepResult&) override { return absl::OkStatus(); }

 private:
  std::vector<std::byte> bytes_ = std::vector<std::byte>(4096);
};

class SeamChoiceTest : public ::testing::Test {
 protected:
  SeamChoiceTest()
      : core_(OneOp(), {{StageKind::kDense, 0}},
              {.micro_batches = 2,
               .max_step_tokens = 2048,
               .vocab_size = 100,
               .prompt_tokens = 16,
               .prompt_blocks = 1000}) {
    for (int worker = 0; worker < 2; ++worker) core_.AddAttentionWorker(AddressOf(worker));
  }
  static AttentionWorkerAddress AddressOf(int worker) {
    return {WorkerId(static_cast<uint32_t>(worker)), kEpoch, NodeId(static_cast<uint32_t>(10 + worker))};
  }
  // A step of one sequence whole on worker 0, and of another on worker 1 if `divided`.
  SendStepBegin Begin(bool divided) {
    proto::StepPlan plan{StepId(7), kFirst, {}};
    for (uint32_t worker = 0; worker < (divided ? 2u : 1u); ++worker) {
      proto::StepEntry entry;
      entry.sequence = SequenceId(worker + 1);
      entry.tokens = {5};
      entry.placement = {{LayerGroup(0), WorkerId(worker), kEpoch, {0, 2}, {}}};
      plan.entries.push_back(std::move(entry));
    }
    std::vector<Action> actions;
    core_.Handle(PlanArrived{std::move(plan)}, actions);
    return std::get<SendStepBegin>(actions.at(0));
  }
  void Make(const exchange::GpuExchangeMeans& means) {
    links_.emplace(core_, port_, means);
    links_->AddPeer(AddressOf(0));
    links_->AddPeer(AddressOf(1));
    seam_.emplace(core_, WaysOf(core_, dense_, *links_, port_, /*shared_gpu=*/nullptr, means.required));
  }
  // A GPU that cannot be linked with another.
  static exchange::GpuExchangeMeans Unlinked(bool required) {
    exchange::GpuExchangeMeans means;
    means.why_not = "this build's UCX has no CUDA";
    means.required = required;
    means.on_cpu = false;
    return means;
  }

  ComputeWorkerCore core_;
  NoDense dense_;
  NotingPort port_;
  std::optional<GpuLinks> links_;
  std::optional<SeamChoice> seam_;
};

TEST_F(SeamChoiceTest, OnACpuAStepGoesInFramesAndNothingIsSaidOfGpus) {
  Make({});
  SendStepBegin begin = Begin(/*divided=*/true);
  ASSERT_TRUE(seam_->Choose(kFirst).ok());
  Crossing& way = seam_->Of(kFirst);
  EXPECT_TRUE(std::holds_alternative<exchange::ThroughHosts>(way.SeamOf(kFirst)));
  ASSERT_TRUE(way.SendBegin(begin).ok());
  ASSERT_TRUE(way.SendQuery(kFirst, 0).ok());
  ASSERT_TRUE(way.SendKeyValue(kFirst, 0).ok());
  EXPECT_FALSE(way.Answer(kFirst, 0, 1).has_value());
  EXPECT_EQ(way.Unanswered(kFirst, StepId(7)), -1);
  const int step_begin = static_cast<int>(proto::FrameType::kStepBegin), q = static_cast<int>(proto::FrameType::kQuery),
            kv = static_cast<int>(proto::FrameType::kKeyValue);
  const auto bytes = [&](int p) { return core_.PartsOf(kFirst)[p].layouts[0].query_bytes; };
  EXPECT_THAT(port_.sent, ElementsAre(absl::StrCat("message ", step_begin, " -> 10"),
                                      absl::StrCat("tensor ", q, " of ", bytes(0), " -> 10"),
                                      absl::StrCat("tensor ", q, " of ", bytes(1), " -> 11"),
                                      absl::StrCat("tensor ", kv, " of ", bytes(0), " -> 10"),
                                      absl::StrCat("tensor ", kv, " of ", bytes(1), " -> 11")))
      << "4 query heads of 8 are as large as 2 KV heads of 8 and 8";
  EXPECT_EQ(links_->Describe(NodeId(10)), "");
  EXPECT_FALSE(links_->Progress());
}

TEST_F(SeamChoiceTest, APeerThatCannotBeReachedEndsNoStepHere) {
  Make({});
  SendStepBegin begin = Begin(/*divided=*/false);
  port_.status = absl::UnavailableError("it has left");
  EXPECT_TRUE(seam_->Of(kFirst).SendBegin(begin).ok());
  EXPECT_TRUE(seam_->Of(kFirst).SendQuery(kFirst, 0).ok());
  port_.status = InvalidArgument("broken");
  EXPECT_FALSE(seam_->Of(kFirst).SendKeyValue(kFirst, 0).ok());
}

// Takes what it is told to, and counts how often it was asked.
class AskedWay final : public Crossing {
 public:
  AskedWay(absl::StatusOr<bool> takes, int& asked) : takes_(std::move(takes)), asked_(asked) {}
  absl::StatusOr<bool> Takes(MicroBatchId) override {
    ++asked_;
    return takes_;
  }
  exchange::Seam SeamOf(MicroBatchId) const override { return exchange::ThroughHosts(); }
  absl::Status SendBegin(SendStepBegin&) override { return absl::OkStatus(); }
  absl::Status SendQuery(MicroBatchId, int) override { return absl::OkStatus(); }
  absl::Status SendKeyValue(MicroBatchId, int) override { return absl::OkStatus(); }

 private:
  const absl::StatusOr<bool> takes_;
  int& asked_;
};

TEST_F(SeamChoiceTest, TheFirstWayThatTakesAStepCarriesItAndIsAskedOnce) {
  int asked[3] = {};
  std::vector<std::unique_ptr<Crossing>> ways;
  ways.push_back(std::make_unique<AskedWay>(false, asked[0]));
  ways.push_back(std::make_unique<AskedWay>(true, asked[1]));
  ways.push_back(std::make_unique<AskedWay>(true, asked[2]));
  Crossing* const second = ways[1].get();
  SeamChoice choice(core_, std::move(ways));
  Begin(/*divided=*/true);
  ASSERT_TRUE(choice.Choose(kFirst).ok());
  ASSERT_TRUE(choice.Choose(kFirst).ok()) << "for the second part";
  EXPECT_EQ(&choice.Of(kFirst), second);
  EXPECT_THAT(asked, ElementsAre(1, 1, 0));
}

TEST_F(SeamChoiceTest, AutoGoesThroughTheHostsAndSaysWhy) {
  Make(Unlinked(/*required=*/false));
  Begin(/*divided=*/false);
  EXPECT_TRUE(seam_->Choose(kFirst).ok());
  EXPECT_TRUE(std::holds_alternative<exchange::ThroughHosts>(seam_->Of(kFirst).SeamOf(kFirst)));
  EXPECT_EQ(links_->Describe(NodeId(10)), "host: this build's UCX has no CUDA");
  EXPECT_EQ(links_->Describe(NodeId(99)), "");
  EXPECT_THAT(port_.sent, IsEmpty());
  links_->LosePeer(WorkerId(0), kEpoch);
  EXPECT_EQ(links_->Describe(NodeId(10)), "");
}

TEST_F(SeamChoiceTest, DeviceRefusesAStepThatWouldGoThroughTheHostsInOneLine) {
  Make(Unlinked(/*required=*/true));
  Begin(/*divided=*/false);
  const absl::Status refused = seam_->Choose(kFirst);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(refused.message(), HasSubstr("--exchange device: with attention worker 0 it is host: this build's UCX"));
}

TEST_F(SeamChoiceTest, AStepOfSeveralWorkersIsTheGpusOwnIfAllAreLinkedAndNoneIsShared) {
  Begin(/*divided=*/true);
  PeerRows rows;
  const auto may = [&](std::string_view first, std::string_view second) {
    const auto gpu_of = [&](NodeId node) { return node == NodeId(10) ? first : second; };
    return GpusMayExchange(core_, kFirst, gpu_of, rows).ok();
  };
  EXPECT_TRUE(may("0000:01:00.0", "0000:02:00.0"));
  EXPECT_THAT(rows.spread.part_rows, ElementsAre(1, 1));
  EXPECT_FALSE(may("0000:01:00.0", "")) << "a worker on a CPU, or not linked yet";
  EXPECT_FALSE(may("0000:01:00.0", "0000:01:00.0")) << "two processes take turns on a GPU";
}

TEST_F(SeamChoiceTest, AStepOfOneWorkerIsTheGpusOwnIfItIsLinked) {
  Begin(/*divided=*/false);
  PeerRows rows;
  const auto may = [&](std::string_view gpu) {
    return GpusMayExchange(
        core_, kFirst, [gpu](NodeId) { return gpu; }, rows);
  };
  EXPECT_TRUE(may("0000:01:00.0").ok());
  EXPECT_FALSE(may("").ok());
}

// Prompts of 16 tokens and decodes by turns.
TEST_F(SeamChoiceTest, AStepOfPromptsIsTheGpusOwnUnlessItsRowsChangeTooOften) {
  const auto may = [this](uint64_t step, size_t entries) {
    proto::StepPlan plan{StepId(step), kFirst, {}};
    for (size_t e = 0; e < entries; ++e) {
      proto::StepEntry entry;
      entry.sequence = SequenceId(e + 1);
      entry.tokens.assign(e % 2 == 0 ? 16 : 1, 5);
      entry.placement = {{LayerGroup(0), WorkerId(0), kEpoch, {0, 2}, {}}};
      plan.entries.push_back(std::move(entry));
    }
    std::vector<Action> actions;
    core_.Handle(PlanArrived{std::move(plan)}, actions);
    EXPECT_EQ(core_.PromptsOf(kFirst).size(), (entries + 1) / 2);
    PeerRows rows;
    const absl::Status may = GpusMayExchange(
        core_, kFirst, [](NodeId) { return "0000:01:00.0"; }, rows);
    core_.Handle(StepFailed{kFirst, absl::CancelledError()}, actions);
    return may.ok();
  };
  EXPECT_TRUE(may(1, 1));
  EXPECT_TRUE(may(2, kMostPromptRuns));
  EXPECT_FALSE(may(3, kMostPromptRuns + 1));
}

TEST(GpuLinks, ExchangeModelsWithLinearStatesWhoseRowsAreWholeWords) {
  EXPECT_TRUE(GpuLinks::Supports(OneOp()).ok());
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  state.token_decay = true;
  EXPECT_TRUE(GpuLinks::Supports(*proto::AttentionTable::Build({state, SmallSpec()}, {{}, {}})).ok());
  state.key_dim = 15;
  EXPECT_THAT(GpuLinks::Supports(*proto::AttentionTable::Build({state, SmallSpec()}, {{}, {}})).message(),
              HasSubstr("linear states of 15 x 16"));
}

// Large prompts have more in flight than a port takes at a time.
TEST_F(SeamChoiceTest, WhatAPeerHasNoRoomForIsSentLateInOrderAndOnce) {
  Make({});
  SendStepBegin begin = Begin(/*divided=*/true);
  ASSERT_TRUE(seam_->Choose(kFirst).ok());
  Crossing& way = seam_->Of(kFirst);
  ASSERT_TRUE(way.SendBegin(begin).ok());
  port_.sent.clear();
  port_.room = 1;
  ASSERT_EQ(way.SendQuery(kFirst, 0), absl::OkStatus());
  ASSERT_EQ(way.SendKeyValue(kFirst, 0), absl::OkStatus());
  EXPECT_TRUE(way.HasLate(kFirst));
  const auto tensor = [&](proto::FrameType type, int p) {
    const proto::StepLayout& layout = core_.PartsOf(kFirst)[p].layouts[0];
    const auto bytes = type == proto::FrameType::kQuery ? layout.query_bytes : layout.key_value_bytes;
    return absl::StrCat("tensor ", static_cast<int>(type), " of ", bytes, " -> ", 10 + p);
  };
  const auto q = proto::FrameType::kQuery, kv = proto::FrameType::kKeyValue;
  EXPECT_THAT(port_.sent, ElementsAre(tensor(q, 0)));
  EXPECT_EQ(way.SendLate(kFirst)->waiting, 2) << "there is no room yet";
  port_.room = 2;
  const auto late = way.SendLate(kFirst);
  ASSERT_TRUE(late.ok());
  EXPECT_EQ(late->sent, 1);
  EXPECT_EQ(late->waiting, 1);
  EXPECT_THAT(port_.sent, ElementsAre(tensor(q, 0), tensor(q, 1), tensor(kv, 0)));
  port_.room = 1;
  EXPECT_EQ(way.SendLate(kFirst)->waiting, 0);
  EXPECT_THAT(port_.sent, ElementsAre(tensor(q, 0), tensor(q, 1), tensor(kv, 0), tensor(kv, 1)));
  EXPECT_FALSE(way.HasLate(kFirst));
}

}  // namespace
}  // namespace dovetail::compute
