#include <string>
#include <vector>

#include "attention_worker/core/attention_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/gather_frames.h"
#include "tests/attention_worker/sequence_fixture.h"

// K and V of earlier tokens that come in pieces: each is given once, in order, when it is asked for and k and v of its
// op are in place; the op's answer comes behind the last one, and whatever ends the step ends that, too.

namespace dovetail::attention::testing {
namespace {

using proto::FrameType;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr NodeId kScheduler{0};
constexpr SequenceId kSequence{1};

// 200 tokens, which other steps than those of the tests have brought. A row has 2 heads of 8 + 4 elements of 2 bytes.
class GatherPiecesTest : public ::testing::Test {
 protected:
  GatherPiecesTest() : core_(FullTable(), {kWorker, kEpoch, /*kv_blocks=*/256, /*micro_batches=*/3}) {
    std::vector<std::byte> payload;
    proto::Encode(proto::OpenSequence{kSequence, WholeShards(FullTable()), {}}, payload);
    Send(kScheduler, FrameType::kOpenSequence, payload, 0, 0, 0);
    Begin({{{kSequence, 0, 200, {}}}, {}}, 1, 2);
    for (int op = 0; op < 2; ++op) {
      Send(NodeOf(2), FrameType::kQuery, std::vector<std::byte>(200 * 64), 1, 2, op);
      Send(NodeOf(2), FrameType::kKeyValue, std::vector<std::byte>(200 * 48), 1, 2, op);
    }
  }
  static NodeId NodeOf(int batch) { return NodeId(10 + static_cast<uint32_t>(batch)); }
  std::vector<std::string> Send(NodeId from, FrameType type, const std::vector<std::byte>& payload, uint64_t step,
                                int batch, int op, uint64_t digest = 0) {
    const auto header = proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(static_cast<uint16_t>(batch)), op,
                                          payload.size(), 0, digest);
    std::vector<Action> actions;
    core_.Handle(ReadFrame(from, header, payload), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    std::vector<std::string> lines;
    for (const Action& action : actions) {
      if (const auto* give = std::get_if<GiveRows>(&action))
        lines.push_back(absl::StrCat("give ", give->piece, " of ", give->op, give->last ? ", answer" : ""));
      if (const auto* finish = std::get_if<AppendAndFinish>(&action))
        lines.push_back(absl::StrCat("append ", finish->op, finish->pieces_first ? ", pieces first" : ""));
      if (const auto* frame = std::get_if<SendFrame>(&action); frame && frame->type == FrameType::kStepRefused)
        lines.push_back(proto::Decode<proto::StepRefused>(frame->message)->reason);
    }
    return lines;
  }
  std::vector<std::string> Begin(const proto::StepBegin& begin, uint64_t step, int batch) {
    std::vector<std::byte> payload;
    proto::Encode(begin, payload);
    return Send(NodeOf(batch), FrameType::kStepBegin, payload, step, batch, 0);
  }
  // Ten tokens whose compute worker gathers the earlier ones from `first` on, 64 of them in a piece.
  std::vector<std::string> BeginGathering(uint64_t step, int batch, Position first = 0) {
    proto::StepBegin begin{{{kSequence, 200, 10, {}}}, {}, 64 * 48};
    begin.entries[0].attend_end = 0;
    begin.entries[0].gather_begin = first;
    return Begin(begin, step, batch);
  }
  std::vector<std::string> Ask(uint64_t step, int batch, int op, uint64_t piece) {
    return Send(NodeOf(batch), proto::kAskRows, {}, step, batch, op, piece);
  }
  std::vector<std::string> Query(uint64_t step, int batch, int op) {
    return Send(NodeOf(batch), FrameType::kQuery, {}, step, batch, op);
  }
  std::vector<std::string> KeyValue(uint64_t step, int batch, int op) {
    return Send(NodeOf(batch), FrameType::kKeyValue, std::vector<std::byte>(10 * 48), step, batch, op);
  }
  uint64_t Dropped() { return core_.counters().dropped_frames; }

  AttentionWorkerCore core_;
};

TEST_F(GatherPiecesTest, PiecesAreGivenAsTheyAreAskedForAndTheAnswerBehindTheLast) {
  EXPECT_THAT(BeginGathering(2, 0), IsEmpty());
  EXPECT_EQ(core_.LayoutOf(MicroBatchId(0), LayerGroup(0)).pieces, 4);
  EXPECT_EQ(core_.LayoutOf(MicroBatchId(0), LayerGroup(0)).partial_bytes, 0);
  for (int op = 0; op < 2; ++op) {
    const std::string of = absl::StrCat(" of ", op);
    EXPECT_THAT(Query(2, 0, op), IsEmpty());
    EXPECT_THAT(KeyValue(2, 0, op), ElementsAre(absl::StrCat("append ", op, ", pieces first")));
    EXPECT_THAT(Ask(2, 0, op, 0), ElementsAre("give 0" + of));
    EXPECT_THAT(Ask(2, 0, op, 1), ElementsAre("give 1" + of));
    EXPECT_THAT(Ask(2, 0, op, 2), ElementsAre("give 2" + of));
    EXPECT_THAT(Ask(2, 0, op, 3), ElementsAre("give 3" + of + ", answer"));
  }
  EXPECT_EQ(Dropped(), 0u);
}

TEST_F(GatherPiecesTest, OneThatIsAskedForBeforeKAndVCameIsGivenBehindThem) {
  BeginGathering(2, 0, 72);
  Query(2, 0, 0);
  EXPECT_THAT(Ask(2, 0, 0, 0), IsEmpty());
  EXPECT_THAT(KeyValue(2, 0, 0), ElementsAre("append 0, pieces first", "give 0 of 0"));
  EXPECT_THAT(Ask(2, 0, 0, 1), ElementsAre("give 1 of 0, answer")) << "128 tokens";
}

TEST_F(GatherPiecesTest, FewRowsComeWithTheAnswer) {
  BeginGathering(2, 0, 140);
  EXPECT_EQ(core_.LayoutOf(MicroBatchId(0), LayerGroup(0)).partial_bytes, 60 * 48);
  Query(2, 0, 0);
  EXPECT_THAT(Ask(2, 0, 0, 0), IsEmpty());
  EXPECT_THAT(KeyValue(2, 0, 0), ElementsAre("append 0"));
  EXPECT_EQ(Dropped(), 1u);
}

TEST_F(GatherPiecesTest, WrongAsksGiveNothing) {
  BeginGathering(2, 0);
  Query(2, 0, 0), KeyValue(2, 0, 0);
  Ask(2, 0, 0, 0);
  EXPECT_THAT(Ask(2, 0, 0, 0), IsEmpty()) << "it came before";
  EXPECT_THAT(Ask(2, 0, 0, 2), IsEmpty()) << "out of order";
  EXPECT_THAT(Ask(2, 0, 1, 1), IsEmpty()) << "of another op";
  EXPECT_THAT(Ask(3, 0, 0, 1), IsEmpty()) << "of another step";
  EXPECT_THAT(Ask(2, 1, 0, 1), IsEmpty()) << "of a micro-batch without a step";
  EXPECT_THAT(Ask(2, 9, 0, 1), IsEmpty()) << "of none";
  EXPECT_THAT(Send(NodeOf(1), proto::kAskRows, {}, 2, 0, 0, 1), IsEmpty()) << "from another node";
  EXPECT_THAT(Query(2, 0, 1), IsEmpty()) << "the next op, before this one's answer";
  EXPECT_EQ(Dropped(), 8u);
  EXPECT_THAT(Ask(2, 0, 0, 1), ElementsAre("give 1 of 0")) << "nothing was changed by it";
  Ask(2, 0, 0, 2), Ask(2, 0, 0, 3);
  EXPECT_THAT(Ask(2, 0, 0, 4), IsEmpty()) << "there are no more";
  EXPECT_EQ(Dropped(), 9u);
}

TEST_F(GatherPiecesTest, AStepThatIsTriedAgainBeginsWithTheFirstPiece) {
  BeginGathering(2, 0);
  Query(2, 0, 0), KeyValue(2, 0, 0);
  Ask(2, 0, 0, 0), Ask(2, 0, 0, 1);
  EXPECT_THAT(BeginGathering(3, 1), IsEmpty());
  EXPECT_THAT(Ask(2, 0, 0, 2), IsEmpty()) << "its step has ended";
  Query(3, 1, 0);
  EXPECT_THAT(KeyValue(3, 1, 0), ElementsAre("append 0, pieces first"));
  EXPECT_THAT(Ask(3, 1, 0, 0), ElementsAre("give 0 of 0"));
  std::vector<std::byte> release;
  proto::Encode(proto::ReleaseSequence{kSequence, 200, {}}, release);
  Send(kScheduler, FrameType::kReleaseSequence, release, 0, 0, 0);
  EXPECT_THAT(Ask(3, 1, 0, 1), IsEmpty());
  EXPECT_EQ(core_.status().blocks_in_use, 0u);
}

// Rank 1 gathers what rank 0 of the group writes meanwhile.
TEST_F(GatherPiecesTest, ARankGetsPiecesWhenTheRanksBeforeHaveWritten) {
  const auto rank = [&](int r, Position begin, int q_len) {
    proto::StepBegin step{{{kSequence, begin, q_len, {}}}, {StepId(2), 200, 300, r, 2}, 64 * 48};
    if (r > 0) step.entries[0].attend_end = step.entries[0].gather_begin = 0;
    return Begin(step, static_cast<uint64_t>(2 + r), r);
  };
  EXPECT_THAT(rank(0, 200, 56), IsEmpty());
  EXPECT_THAT(rank(1, 256, 44), IsEmpty());
  Query(3, 1, 0);
  EXPECT_THAT(Send(NodeOf(1), FrameType::kKeyValue, std::vector<std::byte>(44 * 48), 3, 1, 0), IsEmpty());
  EXPECT_THAT(Ask(3, 1, 0, 0), IsEmpty());
  Send(NodeOf(0), FrameType::kQuery, std::vector<std::byte>(56 * 64), 2, 0, 0);
  EXPECT_THAT(Send(NodeOf(0), FrameType::kKeyValue, std::vector<std::byte>(56 * 48), 2, 0, 0),
              ElementsAre("append 0", "append 0, pieces first", "give 0 of 0"));
}

}  // namespace
}  // namespace dovetail::attention::testing
