#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention_worker/core/attention_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/cache_frames.h"
#include "tests/attention_worker/sequence_fixture.h"

// What an attention worker tells the scheduler of its prefix cache.

namespace dovetail::attention::testing {
namespace {

using proto::FrameType;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr NodeId kScheduler{0}, kCompute{1};

class CacheReportTest : public ::testing::Test {
 protected:
  // FullTable: 4 KvBlocks for 64 tokens.
  explicit CacheReportTest(bool reports = true) : core_(FullTable(), OptionsWith(reports)) {}

  static AttentionWorkerOptions OptionsWith(bool reports) {
    AttentionWorkerOptions options{kWorker, kEpoch, /*kv_blocks=*/4 * 4, /*micro_batches=*/1};
    options.reports_cache = reports;
    return options;
  }

  // Gives the core a frame. What it reports of block i of version v is kept in `reported`, "+v.i" or "-v.i".
  template <typename Message>
  void Send(NodeId from, FrameType type, const Message& message, uint64_t step = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    const auto header = proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(0), 0, payload.size());
    std::vector<Action> actions;
    core_.Handle(ReadFrame(from, header, payload), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto* const frame = std::get_if<SendFrame>(&actions[i]);
      if (frame == nullptr || frame->type != proto::kCacheChanged) continue;
      EXPECT_EQ(i, 0u) << "an action that fails before it must not keep it back";
      EXPECT_EQ(frame->to, kScheduler);
      EXPECT_EQ(frame->epoch, kEpoch);
      const auto changed = proto::Decode<proto::CacheChanged>(frame->message);
      for (const proto::CacheChange& change : changed->changes) Note(change);
    }
  }
  void Note(const proto::CacheChange& change) {
    EXPECT_EQ(change.group, LayerGroup(0));
    EXPECT_EQ(change.kv_heads, (proto::HeadRange{0, 2}));
    for (int version = 1; version <= 3; ++version)
      for (int block = 0; block < 4; ++block)
        if (HashesBetween(version, block, block + 1)[0] == change.block)
          reported.push_back(absl::StrCat(change.held ? "+" : "-", version, ".", block));
  }
  void Open(uint64_t id) {
    Send(kScheduler, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(id), WholeShards(FullTable()), {}});
  }
  void Begin(uint64_t id, Position ctx_len, int q_len, std::vector<proto::BlockHash> hashes) {
    Send(kCompute, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(id), ctx_len, q_len, std::move(hashes)}}},
         ++step_);
  }
  void Release(uint64_t id, Position ctx_len, std::vector<proto::BlockHash> hashes) {
    Send(kScheduler, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(id), ctx_len, std::move(hashes)});
  }
  std::vector<std::string> Reported() { return std::exchange(reported, {}); }

  AttentionWorkerCore core_;
  std::vector<std::string> reported;
  uint64_t step_ = 0;
};

TEST_F(CacheReportTest, ABlockIsToldWhenTheStepThatFilledItIsCommitted) {
  Open(1);
  Begin(1, 0, 130, {});
  EXPECT_THAT(Reported(), IsEmpty()) << "the step may fail yet";
  Begin(1, 130, 1, Hashes(1, 2));
  EXPECT_THAT(Reported(), ElementsAre("+1.0", "+1.1"));
  Begin(1, 131, 1, {});
  EXPECT_THAT(Reported(), IsEmpty());
}

TEST_F(CacheReportTest, WhatIsEvictedForAnotherSequenceIsToldWithTheStepThatNeededTheRoom) {
  Open(1);
  Begin(1, 0, 128, {});
  Release(1, 128, Hashes(1, 2));
  EXPECT_THAT(Reported(), ElementsAre("+1.0", "+1.1"));
  Open(2);
  Begin(2, 0, 3 * 64, {});
  EXPECT_EQ(Reported().size(), 1u) << "one of four sets is evicted: two were free";
  Release(2, 3 * 64, Hashes(2, 3));
  EXPECT_THAT(Reported(), ElementsAre("+2.0", "+2.1", "+2.2"));
}

TEST_F(CacheReportTest, ContentThatIsThereAlreadyIsNotToldAgain) {
  for (const uint64_t id : {1, 2}) Open(id), Begin(id, 0, 64, {});
  Release(1, 64, Hashes(1, 1));
  EXPECT_THAT(Reported(), ElementsAre("+1.0"));
  Release(2, 64, Hashes(1, 1));
  EXPECT_THAT(Reported(), IsEmpty());
}

class SilentWorkerTest : public CacheReportTest {
 protected:
  SilentWorkerTest() : CacheReportTest(false) {}
};

TEST_F(SilentWorkerTest, NothingIsToldWhereItIsNotAskedFor) {
  Open(1);
  Begin(1, 0, 64, {});
  Release(1, 64, Hashes(1, 1));
  EXPECT_THAT(Reported(), IsEmpty());
}

}  // namespace
}  // namespace dovetail::attention::testing
