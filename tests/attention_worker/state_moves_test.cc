#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <random>

#include "attention_worker/attention_worker_node.h"
#include "attention_worker/core/state_snapshot.h"
#include "attention_worker/linear_executor.h"
#include "kernels/kv_block.h"
#include "transport/inproc/inproc_fabric.h"

// Linear states that go from one attention worker to another with the K and V of their sequence.

namespace dovetail::attention {
namespace {

using proto::FrameType;
using ::testing::HasSubstr;

constexpr Epoch kEpoch{3};
constexpr uint64_t kModel = 0x1234;

// Two gated delta layers with their convolutions, a softmax layer between them, and lightning. No head has the taps or
// the decay of another.
proto::AttentionTable Table(DType state) {
  proto::LinearSpec delta;
  delta.heads = 2;
  delta.key_dim = delta.value_dim = 16;
  delta.delta = delta.token_decay = delta.token_rate = delta.normalise = true;
  delta.conv_width = 4;
  delta.wire = DType::kF32;
  delta.state = state;
  const size_t block_bytes = (kernels::KvBlockLayout{16, 16, DType::kF32}.bytes() + 63) / 64 * 64;
  delta.blocks_per_head = kernels::LinearStateLayout(StateShapeOf(delta)).pieces(block_bytes);
  proto::LinearConstants constants, decays;
  for (int i = 0; i < delta.conv_width * delta.heads * delta.channels(); ++i)
    constants.conv.push_back(0.1f + 0.05f * static_cast<float>(i % 7));
  proto::LinearSpec lightning;
  lightning.heads = 2;
  lightning.key_dim = lightning.value_dim = 16;
  lightning.wire = DType::kF32;
  lightning.state = state;
  lightning.blocks_per_head = kernels::LinearStateLayout(StateShapeOf(lightning)).pieces(block_bytes);
  decays.log_decay = {-0.01f, -0.2f};
  proto::SoftmaxSpec softmax;
  softmax.query_heads = softmax.kv_heads = 2;
  softmax.key_dim = softmax.value_dim = 16;
  softmax.scale = 0.25f;
  softmax.kv = DType::kF32;
  return *proto::AttentionTable::Build({delta, softmax, delta, lightning}, {constants, {}, constants, decays});
}

class StateMoves : public ::testing::Test, public transport::FrameHandler {
 protected:
  explicit StateMoves(uint64_t taker_model = kModel, DType state = DType::kF32) : table_(Table(state)) {
    for (int i = 0; i < 3; ++i) ports_.push_back(fabric_.CreatePort(nullptr));
    for (uint32_t worker = 0; worker < 2; ++worker) {
      devices_.push_back(*kernels::CreateCpuDevice({.threads = 1}));
      nodes_.push_back(*AttentionWorkerNode::Create(
          table_, {WorkerId(worker), kEpoch, 400, 1, 50, worker == 0 ? kModel : taker_model}, *devices_.back(),
          *ports_[1 + worker]));
    }
  }

  template <typename Message>
  void Tell(int worker, FrameType type, const Message& message, uint64_t step = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    Send(worker, type, step, 0, payload);
  }
  void Send(int worker, FrameType type, uint64_t step, int op, const std::vector<std::byte>& payload) {
    const auto header = proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(0), op, payload.size());
    const NodeId to = ports_[1 + worker]->id();
    if (type == FrameType::kQuery || type == FrameType::kKeyValue) {
      tensors_.push_back(payload);
      ASSERT_TRUE(ports_[0]->SendTensor(to, header, tensors_.back()).ok());
    } else {
      ASSERT_TRUE(ports_[0]->SendMessage(to, header, payload).ok());
    }
    for (int quiet = 0; quiet < 2;) {
      quiet = nodes_[0]->Poll() + nodes_[1]->Poll() == 0 ? quiet + 1 : 0;
      while (ports_[0]->Poll(*this, 64) > 0) quiet = 0;
    }
  }
  void OnFrame(const transport::Delivery& delivery) override {
    if (delivery.header.type == FrameType::kSequenceMoved)
      moved_ = *proto::Decode<proto::SequenceMoved>(delivery.payload);
    if (delivery.header.type == FrameType::kStepRefused)
      refused_.push_back(proto::Decode<proto::StepRefused>(delivery.payload)->reason);
    if (delivery.header.type == FrameType::kPartial)
      answer_.insert(answer_.end(), delivery.payload.begin(), delivery.payload.end());
  }

  void Open(int worker) {
    const proto::Placement placement = proto::WholePlacement(table_, WorkerId(worker), kEpoch);
    Tell(worker, FrameType::kOpenSequence,
         proto::OpenSequence{SequenceId(1), {placement.begin(), placement.end()}, {}});
  }
  // What tokens bring depends on their positions alone. Returns what was answered.
  std::vector<std::byte> Step(int worker, uint64_t step, Position ctx_len, int q_len) {
    answer_.clear();
    Tell(worker, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), ctx_len, q_len, {}}}}, step);
    for (int op = 0; op < table_.op_count(); ++op) {
      const proto::StepLayout& layout = nodes_[worker]->core().LayoutOf(MicroBatchId(0), table_.op_group[op]);
      Send(worker, FrameType::kQuery, step, op, Numbers(layout.query_bytes, 100 * ctx_len + op));
      Send(worker, FrameType::kKeyValue, step, op, Numbers(layout.key_value_bytes, 100 * ctx_len + 50 + op));
    }
    return answer_;
  }
  // The same, but what a token brings is its own, whichever tokens come with it. Both groups are served whole.
  std::vector<std::byte> StepOf(int worker, uint64_t step, Position ctx_len, int q_len) {
    answer_.clear();
    Tell(worker, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), ctx_len, q_len, {}}}}, step);
    for (int op = 0; op < table_.op_count(); ++op) {
      const proto::StepLayout& layout = nodes_[worker]->core().LayoutOf(MicroBatchId(0), table_.op_group[op]);
      const proto::ShardStep& item = layout.items[0];
      std::vector<std::byte> query(layout.query_bytes), key_value(layout.key_value_bytes);
      for (int row = 0; row < q_len; ++row) {
        const auto put = [&](std::vector<std::byte>& into, int64_t offset, int64_t end, int kind) {
          const int64_t bytes = (end - offset) / q_len;
          const auto numbers = Numbers(bytes, ((ctx_len + row) * 10 + op) * 10 + kind);
          std::memcpy(into.data() + offset + row * bytes, numbers.data(), bytes);
        };
        const int64_t gates = table_.softmax(table_.op_group[op]).gates;
        const int64_t value_end = gates > 0 ? item.gate_offset : layout.key_value_bytes;
        put(query, item.query_offset, layout.query_bytes, 0);
        put(key_value, item.key_offset, item.value_offset, 1);
        put(key_value, item.value_offset, value_end, 2);
        if (gates > 0) put(key_value, item.gate_offset, layout.key_value_bytes, 3);
      }
      Send(worker, FrameType::kQuery, step, op, query);
      Send(worker, FrameType::kKeyValue, step, op, key_value);
    }
    return answer_;
  }
  // All below 0, as decays are.
  static std::vector<std::byte> Numbers(int64_t bytes, int64_t seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    std::vector<float> numbers(bytes / 4);
    for (float& number : numbers) number = -static_cast<float>(random() % 1000 + 1) / 2000;
    std::vector<std::byte> out(bytes);
    std::memcpy(out.data(), numbers.data(), out.size());
    return out;
  }
  void Move(Position end) {
    moved_ = {};
    Tell(0, FrameType::kMoveSequence,
         proto::MoveSequence{SequenceId(1), 0, end, 1, StepId(1000), ports_[2]->id(), kEpoch}, 0);
  }

  const proto::AttentionTable table_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<std::unique_ptr<kernels::Device>> devices_;
  std::vector<std::unique_ptr<AttentionWorkerNode>> nodes_;
  std::deque<std::vector<std::byte>> tensors_;  // stay until they are answered, and longer
  proto::SequenceMoved moved_;
  std::vector<std::string> refused_;
  std::vector<std::byte> answer_;
};

class StateMovesOf : public StateMoves, public ::testing::WithParamInterface<DType> {
 protected:
  StateMovesOf() : StateMoves(kModel, GetParam()) {}
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

TEST_F(StateMoves, AWorkerOfSomeHeadsAnswersAsOneOfAllDoes) {
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
      for (const auto& [begin, end] : {std::pair{item.key_offset, item.value_offset}, {item.value_offset, value_end},
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
  OfAnotherModel() : StateMoves(0x5678) {}
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
