#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "attention_worker/core/state_snapshot.h"
#include "tests/attention_worker/state_moves_fixture.h"

// Linear states that go from one attention worker to another with the K and V of their sequence.

namespace dovetail::attention {
namespace {

using proto::FrameType;
using ::testing::HasSubstr;
using testing::kEpoch;
using testing::kModel;
using testing::StateMoves;
using testing::Table;

class StateMovesOf : public StateMoves, public ::testing::WithParamInterface<DType> {
 protected:
  StateMovesOf() : StateMoves(Table(GetParam())) {
    AddCpuWorker();
    AddCpuWorker();
  }
};

TEST_P(StateMovesOf, TheTakerGoesOnWithTheSameBits) {
  for (const Position end : {Position{40}, Position{64}, Position{130}, Position{600}, Position{1152}}) {
    SCOPED_TRACE(end);
    Open(0);
    uint64_t step = static_cast<uint64_t>(end) * 100;
    for (Position at = 0; at < end; at += 100) Step(0, ++step, at, static_cast<int>(std::min<Position>(100, end - at)));
    Open(1);
    Tell(0, FrameType::kMoveSequence,
         proto::MoveSequence{SequenceId(1), 0, end, 1, StepId(++step), ports_[2]->id(), kEpoch});
    ASSERT_TRUE(moved_.moved) << moved_.reason;
    step += 10;
    for (Position at = end; at < end + 70; at += 7) {
      ++step;
      const auto expected = Step(0, step, at, 7);
      ASSERT_FALSE(expected.empty());
      EXPECT_EQ(Step(1, step, at, 7), expected) << "at " << at;
    }
    EXPECT_TRUE(refused_.empty()) << refused_[0];
    for (int worker = 0; worker < 2; ++worker)
      Tell(worker, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 0, {}});
  }
}

// As a prompt in chunks, as guesses that are taken back, and as a step that is repeated.
TEST_P(StateMovesOf, AnyChunkingGivesTheSameBits) {
  const auto softmax_and_state = [&](int worker, const std::vector<int>& chunks) {
    Open(worker);
    std::vector<std::byte> last;
    Position at = 0;
    uint64_t step = 0;
    for (const int rows : chunks) {
      last = StepOf(worker, ++step, at, rows);
      at += rows;
    }
    EXPECT_EQ(StepOf(worker, ++step, at - chunks.back(), chunks.back()), last) << "a repeated step";
    return StepOf(worker, ++step, at, 1);
  };
  const auto whole = softmax_and_state(0, {200});
  ASSERT_FALSE(whole.empty());
  EXPECT_EQ(softmax_and_state(1, {1, 62, 1, 5, 59, 70, 1, 1}), whole);
  EXPECT_TRUE(refused_.empty()) << refused_[0];
}

INSTANTIATE_TEST_SUITE_P(Types, StateMovesOf, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

// What head 1 of a step of one token brings.
std::vector<std::byte> SecondOf(const std::vector<std::byte>& of_two, int64_t begin, int64_t end) {
  return {of_two.begin() + begin + (end - begin) / 2, of_two.begin() + end};
}

class OfTwoWorkers : public StateMoves {
 protected:
  OfTwoWorkers() : StateMoves(Table(DType::kF32)) {
    AddCpuWorker();
    AddCpuWorker();
  }
};

TEST_F(OfTwoWorkers, AWorkerOfSomeHeadsAnswersAsOneOfAllDoes) {
  Open(0);
  std::vector<proto::Shard> shards;
  for (proto::Shard shard : proto::WholePlacement(table_, WorkerId(1), kEpoch)) {
    if (table_.linear(shard.group) == nullptr) continue;
    shard.kv_heads = {1, 2};
    shards.push_back(shard);
  }
  Tell(1, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), shards, {}});
  for (Position at = 0; at < 70; ++at) {
    const uint64_t step = static_cast<uint64_t>(at) + 1;
    for (int worker = 0; worker < 2; ++worker)
      Tell(worker, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), at, 1, {}}}}, step);
    for (int op = 0; op < table_.op_count(); ++op) {
      const proto::StepLayout& layout = nodes_[0]->core().LayoutOf(MicroBatchId(0), table_.op_group[op]);
      const proto::ShardStep& item = layout.items[0];
      const auto query = Numbers(layout.query_bytes, 100 * at + op);
      const auto key_value = Numbers(layout.key_value_bytes, 100 * at + 50 + op);
      answer_.clear();
      Send(0, FrameType::kQuery, step, op, query);
      Send(0, FrameType::kKeyValue, step, op, key_value);
      if (table_.linear(table_.op_group[op]) == nullptr) continue;
      const std::vector<std::byte> whole = answer_;
      std::vector<std::byte> part;
      const bool gates = table_.softmax(table_.op_group[op]).gates > 0;
      const int64_t value_end = gates ? item.gate_offset : layout.key_value_bytes;
      for (const auto& [begin, end] : {std::pair{item.key_offset, item.value_offset},
                                       {item.value_offset, value_end},
                                       {value_end, layout.key_value_bytes}}) {
        const auto second = SecondOf(key_value, begin, end);
        part.insert(part.end(), second.begin(), second.end());
      }
      answer_.clear();
      Send(1, FrameType::kQuery, step, op, SecondOf(query, 0, layout.query_bytes));
      Send(1, FrameType::kKeyValue, step, op, part);
      ASSERT_FALSE(answer_.empty()) << (refused_.empty() ? "no answer" : refused_[0]);
      ASSERT_EQ(answer_, SecondOf(whole, 0, static_cast<int64_t>(whole.size()))) << "op " << op << " at " << at;
    }
  }
}

class OfAnotherModel : public StateMoves {
 protected:
  OfAnotherModel() : StateMoves(Table(DType::kF32)) {
    AddCpuWorker();
    AddCpuWorker(0x5678);
  }
};

TEST_F(OfAnotherModel, AStateIsRefusedByName) {
  Open(0);
  Step(0, 1, 0, 100);
  Open(1);
  Move(100);
  EXPECT_FALSE(moved_.moved);
  EXPECT_THAT(moved_.reason, HasSubstr("snapshot of a state of model 1234; this worker serves model 5678"));
  Tell(1, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 0, {}});
  EXPECT_EQ(nodes_[1]->core().status().blocks_in_use, 0u);
  EXPECT_FALSE(Step(0, 2000, 100, 1).empty()) << "the giver still has it";
}

TEST(StateSnapshots, SayWhatDiffers) {
  proto::ShardStep item;
  item.kv_heads = {2, 4};
  item.ctx_len = 64;
  item.q_len = 70;
  const StateSnapshot good = SnapshotOf(item, kModel, 5, 3, 128);
  EXPECT_EQ(good.first_block, 1);
  EXPECT_EQ(good.blocks, 2);
  EXPECT_EQ(good.payload_bytes(), sizeof(good) + 2 * 2 * 3 * 128);
  std::vector<std::byte> bytes(good.payload_bytes());
  const auto error = [&](const StateSnapshot& snapshot, size_t size) {
    std::memcpy(bytes.data(), &snapshot, sizeof(snapshot));
    return std::string(CheckSnapshot({bytes.data(), size}, good).message());
  };
  EXPECT_EQ(error(good, bytes.size()), "");
  EXPECT_THAT(error(good, 20), HasSubstr("20 bytes"));
  EXPECT_THAT(error(good, bytes.size() - 1), HasSubstr("1591 bytes, not 1592"));
  StateSnapshot bad = good;
  bad.magic = 7;
  EXPECT_THAT(error(bad, bytes.size()), HasSubstr("this is none"));
  bad = good;
  bad.version = 2;
  EXPECT_THAT(error(bad, bytes.size()), HasSubstr("version 2; this worker knows 1"));
  bad = good;
  bad.op = 6;
  EXPECT_THAT(error(bad, bytes.size()), HasSubstr("op 6, heads 2..4, blocks 1+2 of 3 x 128 bytes; expected op 5"));
  bad = good;
  bad.block_bytes = 64;
  EXPECT_THAT(error(bad, bytes.size()), HasSubstr("3 x 64 bytes; expected"));
}

}  // namespace
}  // namespace dovetail::attention
