#include <algorithm>
#include <random>

#include "attention_worker/core/attention_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention_worker/sequence_fixture.h"

// Several writers of one sequence: whatever the order in which their frames come, a rank reads an op when all ranks
// before it have written theirs of that op, all of them get through, and the next step finds the sequence whole.

namespace dovetail::attention::testing {
namespace {

using proto::FrameType;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr NodeId kScheduler{0};
constexpr SequenceId kSequence{1};
constexpr int kOps = 3;

class PrefillGroupTest : public ::testing::Test {
 protected:
  explicit PrefillGroupTest(uint32_t blocks = 256)
      : core_(MixedTable(), {kWorker, kEpoch, blocks, /*micro_batches=*/6}) {
    std::vector<std::byte> payload;
    proto::Encode(proto::OpenSequence{kSequence, WholeShards(MixedTable()), {}}, payload);
    Send(kScheduler, FrameType::kOpenSequence, payload, 0, 0, 0);
  }

  std::vector<Action> Send(NodeId from, FrameType type, const std::vector<std::byte>& payload, uint64_t step, int batch,
                           int op) {
    const auto header =
        proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(static_cast<uint16_t>(batch)), op, payload.size());
    std::vector<Action> actions;
    core_.Handle(ReadFrame(from, header, payload), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    return actions;
  }
  std::vector<Action> Begin(const proto::StepBegin& begin, uint64_t step, int batch) {
    std::vector<std::byte> payload;
    proto::Encode(begin, payload);
    return Send(NodeOf(batch), FrameType::kStepBegin, payload, step, batch, 0);
  }
  std::vector<Action> BeginPlain(uint64_t step, Position ctx_len, int q_len, int batch = 5) {
    return Begin({{{kSequence, ctx_len, q_len, {}}}, {}}, step, batch);
  }
  static NodeId NodeOf(int batch) { return NodeId(10 + static_cast<uint32_t>(batch)); }
  static std::string Refusal(const std::vector<Action>& actions) {
    if (actions.empty()) return "nothing was sent";
    const auto* frame = std::get_if<SendFrame>(&actions.back());
    if (frame == nullptr || frame->type != FrameType::kStepRefused) return "accepted";
    return proto::Decode<proto::StepRefused>(frame->message)->reason;
  }
  const SequenceState& State() { return *core_.sequences().Find(kSequence); }

  AttentionWorkerCore core_;
};

// What the compute workers of a group do, one frame at a time and in any order. Rank r is in micro-batch r.
class Group {
 public:
  // Ranks with a bit in `gathers` ask for K and V of all tokens before theirs, if there are any, in place of attention.
  Group(uint64_t id, std::vector<Position> cuts, uint32_t gathers = 0)
      : id_(id), cuts_(std::move(cuts)), gathers_(gathers), ranks_(cuts_.size() - 1) {}

  int ranks() const { return static_cast<int>(ranks_.size()); }
  uint64_t StepOf(int rank) const { return id_ + rank; }
  proto::StepBegin BeginOf(int rank) const {
    proto::StepBeginEntry entry{kSequence, cuts_[rank], static_cast<int32_t>(cuts_[rank + 1] - cuts_[rank]), {}};
    if (Gathers(rank)) entry.attend_end = entry.gather_begin = 0;
    return {{entry}, {StepId(id_), cuts_.front(), cuts_.back(), rank, ranks()}};
  }
  bool Gathers(int rank) const { return (gathers_ >> rank & 1) != 0 && cuts_[rank] > 0; }
  size_t Rows(int rank) const { return static_cast<size_t>(cuts_[rank + 1] - cuts_[rank]); }

  // What the rank sends next: 0 its begin, then q and k, v of each op; nothing while an answer is due.
  bool MaySend(int rank) const { return ranks_[rank].sent <= 2 * kOps && !ranks_[rank].awaits; }
  bool done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.sent > 2 * kOps && !r.awaits; });
  }

  // Checks what the worker does: rank by rank, op by op.
  void Take(const std::vector<Action>& actions) {
    for (const Action& action : actions) {
      if (const auto* attend = std::get_if<AttendComplete>(&action)) {
        const int rank = attend->micro_batch.value();
        for (int before = 0; before < rank; ++before)
          EXPECT_GT(ranks_[before].written, attend->op) << "rank " << rank << " reads before " << before << " wrote";
        EXPECT_EQ(ranks_[rank].read++, attend->op);
      } else if (const auto* finish = std::get_if<AppendAndFinish>(&action)) {
        Rank& rank = ranks_[finish->micro_batch.value()];
        EXPECT_EQ(rank.written++, finish->op);
        EXPECT_EQ(rank.read, rank.written) << "k and v before q";
        rank.awaits = false;
      } else {
        EXPECT_FALSE(std::holds_alternative<SendFrame>(action)) << "a step was refused";
      }
    }
  }

  template <typename SendFn>
  void SendNext(int rank, SendFn&& send) {
    Rank& r = ranks_[rank];
    const int sent = r.sent++;
    if (sent == 0) return Take(send(FrameType::kStepBegin, 0, 0));
    const int op = (sent - 1) / 2;
    const size_t part = op == 1 ? 2 : 1;
    const bool query = sent % 2 == 1;
    r.awaits = !query;
    const size_t row_bytes = query ? Gathers(rank) ? 0 : 64 : 48;
    Take(send(query ? FrameType::kQuery : FrameType::kKeyValue, op, row_bytes * Rows(rank) / part));
  }

 private:
  struct Rank {
    int sent = 0;  // frames
    int read = 0, written = 0;
    bool awaits = false;
  };
  const uint64_t id_;
  const std::vector<Position> cuts_;
  const uint32_t gathers_;
  std::vector<Rank> ranks_;
};

std::vector<Position> SomeCuts(std::mt19937& random, Position base, int ranks) {
  std::vector<Position> cuts = {base};
  Position segment = base / 64;
  for (int r = 1; r < ranks; ++r) cuts.push_back(64 * (segment += 1 + random() % 3));
  cuts.push_back(cuts.back() + 1 + random() % 130);
  return cuts;
}

class PrefillGroupOrder : public PrefillGroupTest, public ::testing::WithParamInterface<int> {
 protected:
  void Run(Group& group, std::mt19937& random) {
    while (!group.done()) {
      const int rank = static_cast<int>(random() % group.ranks());
      if (group.MaySend(rank)) SendNext(group, rank);
    }
  }
  void SendNext(Group& group, int rank) {
    group.SendNext(rank, [&](FrameType type, int op, size_t bytes) {
      if (type == FrameType::kStepBegin) return Begin(group.BeginOf(rank), group.StepOf(rank), rank);
      return Send(NodeOf(rank), type, std::vector<std::byte>(bytes), group.StepOf(rank), rank, op);
    });
  }
};

TEST_P(PrefillGroupOrder, ARankReadsWhatAllRanksBeforeItHaveWritten) {
  std::mt19937 random(GetParam());
  const Position base = GetParam() % 2 == 0 ? 0 : 37;
  if (base > 0) {
    BeginPlain(5, 0, static_cast<int>(base));
    for (int op = 0; op < kOps; ++op) {
      Send(NodeOf(5), FrameType::kQuery, std::vector<std::byte>((op == 1 ? 32 : 64) * base), 5, 5, op);
      Send(NodeOf(5), FrameType::kKeyValue, std::vector<std::byte>((op == 1 ? 24 : 48) * base), 5, 5, op);
    }
  }
  uint64_t step = 10;
  Position at = base;
  for (int super_chunk = 0; super_chunk < 2; ++super_chunk, step += 10) {
    const auto cuts = SomeCuts(random, at, 2 + static_cast<int>(random() % 4));
    const auto gathers = static_cast<uint32_t>(random() % 32);
    Group group(step, cuts, gathers);
    // A group that some of its ranks never finish is repeated with another number.
    if (random() % 2 == 0) {
      for (int frames = static_cast<int>(random() % 12); frames > 0; --frames) {
        const int rank = static_cast<int>(random() % group.ranks());
        if (group.MaySend(rank)) SendNext(group, rank);
      }
      step += 10;
    }
    Group again(step, cuts, gathers);
    Run(again, random);
    EXPECT_EQ(State().ctx_len, at);
    EXPECT_EQ(State().ctx_len + State().q_len, cuts.back());
    at = cuts.back();
  }
  EXPECT_EQ(Refusal(BeginPlain(step, at, 1)), "accepted");
  EXPECT_EQ(State().ctx_len, at);
  EXPECT_EQ(core_.counters().dropped_frames, 0u);
  EXPECT_EQ(core_.counters().refused_steps, 0u);
}

// Where a rank gets what the ranks before it have from themselves, it asks here about tokens before the group only.
TEST_F(PrefillGroupTest, WhatIsAskedOfTokensBeforeTheGroupWaitsForNoRank) {
  BeginPlain(5, 0, 37);
  for (int op = 0; op < kOps; ++op) {
    Send(NodeOf(5), FrameType::kQuery, std::vector<std::byte>((op == 1 ? 32 : 64) * 37), 5, 5, op);
    Send(NodeOf(5), FrameType::kKeyValue, std::vector<std::byte>((op == 1 ? 24 : 48) * 37), 5, 5, op);
  }
  for (const Position gather_end : {Position{37}, Position{38}}) {
    const uint64_t group = gather_end == 37 ? 10 : 20;
    proto::StepBegin begin{{{kSequence, 64, 30, {}}}, {StepId(group), 37, 94, 1, 2}};
    begin.entries[0].attend_end = begin.entries[0].gather_begin = 0;
    begin.entries[0].gather_end = gather_end;
    ASSERT_EQ(Refusal(Begin(begin, group + 1, 1)), "accepted");
    const std::vector<Action> actions = Send(NodeOf(1), FrameType::kQuery, {}, group + 1, 1, 0);
    EXPECT_EQ(actions.size(), gather_end == 37 ? 1u : 0u) << "up to token " << gather_end;
  }
}

// What it sent lies in memory that goes with it.
TEST_F(PrefillGroupTest, WhatALostRankHasSentIsNotReadWhenThoseBeforeItGoOn) {
  const Group group(10, {0, 64, 128, 200});
  for (int rank = 0; rank < 3; ++rank) Begin(group.BeginOf(rank), group.StepOf(rank), rank);
  const auto send = [&](int rank, FrameType type) {
    const size_t bytes = (type == FrameType::kQuery ? 64 : 48) * group.Rows(rank);
    return Send(NodeOf(rank), type, std::vector<std::byte>(bytes), group.StepOf(rank), rank, 0);
  };
  for (const int rank : {1, 2})
    for (const FrameType type : {FrameType::kQuery, FrameType::kKeyValue})
      EXPECT_THAT(send(rank, type), IsEmpty()) << "it waits for rank 0";
  core_.LosePeer(NodeOf(1));
  EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
  for (const FrameType type : {FrameType::kQuery, FrameType::kKeyValue})
    for (const Action& action : send(0, type)) {
      const auto* finish = std::get_if<AppendAndFinish>(&action);
      const auto* attend = std::get_if<AttendComplete>(&action);
      ASSERT_TRUE(finish != nullptr || attend != nullptr);
      EXPECT_EQ(finish != nullptr ? finish->micro_batch.value() : attend->micro_batch.value(), 0);
    }
  // Its tokens never come, so rank 2 never goes on. A group that is tried again, with another worker, gets through.
  EXPECT_THAT(send(1, FrameType::kKeyValue), IsEmpty());
  const Group again(20, {0, 64, 200});
  EXPECT_EQ(Refusal(Begin(again.BeginOf(0), 20, 0)), "accepted");
  EXPECT_EQ(Refusal(Begin(again.BeginOf(1), 21, 2)), "accepted");
}

INSTANTIATE_TEST_SUITE_P(Seeds, PrefillGroupOrder, ::testing::Range(0, 200));

TEST_F(PrefillGroupTest, AStepThatRefersToAGroupWithoutAllItsTokensIsRefused) {
  const Group group(10, {0, 64, 130});
  EXPECT_EQ(Refusal(Begin(group.BeginOf(1), 11, 1)), "accepted");
  // Rank 0 never came: what it should have written is not there.
  EXPECT_THAT(Refusal(BeginPlain(20, 130, 1)), HasSubstr("did not reach this worker as a whole"));
  EXPECT_EQ(Refusal(BeginPlain(21, 0, 64)), "accepted");
}

TEST_F(PrefillGroupTest, RanksOfAGroupThatHasEndedAreRefused) {
  const Group group(10, {0, 64, 130});
  EXPECT_EQ(Refusal(Begin(group.BeginOf(0), 10, 0)), "accepted");
  const Group again(12, {0, 64, 130});
  EXPECT_EQ(Refusal(Begin(again.BeginOf(1), 13, 3)), "accepted");
  EXPECT_THAT(Refusal(Begin(group.BeginOf(1), 11, 1)), HasSubstr("is in step 13 of micro-batch 3"));
  // What the ended rank still sends goes nowhere.
  EXPECT_THAT(Send(NodeOf(0), FrameType::kQuery, std::vector<std::byte>(64 * 64), 10, 0, 0), IsEmpty());
  EXPECT_EQ(core_.counters().dropped_frames, 1u);
}

TEST_F(PrefillGroupTest, ARankComesOnceAndFitsItsGroup) {
  const Group group(10, {0, 64, 128, 200});
  EXPECT_EQ(Refusal(Begin(group.BeginOf(2), 12, 2)), "accepted");
  EXPECT_THAT(Refusal(Begin(group.BeginOf(2), 12, 3)), HasSubstr("rank 2 of group 10 has begun before"));
  proto::StepBegin other = group.BeginOf(1);
  other.part.end = 192;
  EXPECT_THAT(Refusal(Begin(other, 11, 1)), HasSubstr("group 10 has 3 ranks for tokens 0..200, not 3 for 0..192"));
  EXPECT_EQ(Refusal(Begin(group.BeginOf(1), 11, 4)), "accepted");
}

class SmallWorkerTest : public PrefillGroupTest {
 protected:
  SmallWorkerTest() : PrefillGroupTest(10) {}  // two times 64 tokens
};

TEST_F(SmallWorkerTest, TheFirstRankGetsRoomForAllOrNone) {
  const Group group(10, {0, 64, 130});
  EXPECT_THAT(Refusal(Begin(group.BeginOf(0), 10, 0)), HasSubstr("the step needs 15 KvBlocks; 10 of 10 are free"));
  EXPECT_THAT(Refusal(Begin(group.BeginOf(1), 11, 1)), HasSubstr("the step needs 15 KvBlocks"));
  EXPECT_EQ(core_.sequences().status().blocks_in_use, 0u);
  const Group smaller(20, {0, 64, 128});
  EXPECT_EQ(Refusal(Begin(smaller.BeginOf(1), 21, 1)), "accepted");
  EXPECT_EQ(core_.sequences().status().blocks_in_use, 10u);
}

}  // namespace
}  // namespace dovetail::attention::testing
