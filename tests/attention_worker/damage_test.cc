#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention_worker/attention_worker_node.h"
#include "base/dtype.h"
#include "tests/support/frail_device.h"
#include "transport/inproc/inproc_fabric.h"

// What an attention worker does when its KV blocks do not hold what was written there: a bit of memory changes, a block
// set is given to another use, two are exchanged, a move brings something else. No answer is made of such a block.

namespace dovetail::attention {
namespace {

using proto::FrameType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Epoch kEpoch{3};
constexpr int kPrompt = 256;  // tokens, 4 block sets

proto::AttentionTable Table() {
  proto::SoftmaxSpec spec;
  spec.query_heads = 4;
  spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 16;
  spec.scale = 0.25f;
  spec.kv = DType::kF32;
  return *proto::AttentionTable::Build({spec, spec});
}

std::vector<proto::BlockHash> Hashes(int count) {
  std::vector<proto::BlockHash> hashes;
  for (uint64_t i = 0; i < static_cast<uint64_t>(count); ++i) hashes.push_back({i + 1, 77});
  return hashes;
}

std::vector<std::byte> Numbers(int64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> out(bytes);
  for (size_t at = 0; at < out.size(); at += sizeof(float)) {
    const float number = static_cast<float>(random() % 1000) / 2000 - 0.25f;
    std::memcpy(out.data() + at, &number, sizeof(number));
  }
  return out;
}

class Damage : public ::testing::Test, public transport::FrameHandler {
 protected:
  Damage() { ports_.push_back(fabric_.CreatePort(nullptr)); }

  int AddWorker(Digests digests = Digests::kOfFinishedBlocks) {
    ports_.push_back(fabric_.CreatePort(nullptr));
    devices_.push_back(std::make_unique<test::FrailDevice>(*kernels::CreateCpuDevice({.threads = 1})));
    AttentionWorkerOptions options{WorkerId(static_cast<uint32_t>(nodes_.size())), kEpoch, 400};
    options.digests = digests;
    nodes_.push_back(*AttentionWorkerNode::Create(table_, options, *devices_.back(), *ports_.back()));
    return static_cast<int>(nodes_.size()) - 1;
  }

  // The block counts at which the sequence may start.
  std::vector<uint32_t> Open(int worker, uint64_t sequence, int hashes) {
    const proto::Placement placement = proto::WholePlacement(table_, WorkerId(worker), kEpoch);
    Tell(worker, FrameType::kOpenSequence,
         proto::OpenSequence{SequenceId(sequence), {placement.begin(), placement.end()}, Hashes(hashes)});
    return opened_.resumable;
  }
  // What was answered to the ops of a step; empty if it was refused.
  std::vector<std::byte> Step(int worker, uint64_t sequence, Position ctx_len, int q_len, int hashes = 0) {
    answer_.clear();
    refused_ = {};
    const uint64_t step = ++steps_;
    const auto all = Hashes(static_cast<int>(ctx_len / kSegmentTokens));
    Tell(worker, FrameType::kStepBegin,
         proto::StepBegin{{{SequenceId(sequence), ctx_len, q_len, {all.end() - hashes, all.end()}}}}, step);
    for (int op = 0; refused_.reason.empty() && op < table_.op_count(); ++op) {
      const proto::StepLayout& layout = nodes_[worker]->core().LayoutOf(MicroBatchId(0), table_.op_group[op]);
      Send(worker, FrameType::kQuery, step, op, Numbers(layout.query_bytes, 100 * ctx_len + op));
      Send(worker, FrameType::kKeyValue, step, op, Numbers(layout.key_value_bytes, 100 * ctx_len + 50 + op));
    }
    return answer_;
  }
  // The sequence's prompt, named and finished; what comes behind it is answered.
  std::vector<std::byte> Prefill(int worker, uint64_t sequence) {
    Open(worker, sequence, 0);
    Step(worker, sequence, 0, kPrompt);
    return Step(worker, sequence, kPrompt, 1, kPrompt / kSegmentTokens);
  }
  void Release(int worker, uint64_t sequence, Position ctx_len, int hashes) {
    Tell(worker, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(sequence), ctx_len, Hashes(hashes)});
  }
  SequenceTable& Sequences(int worker) { return nodes_[worker]->core().sequences(); }
  std::vector<BlockSetId>& SetsOf(int worker, uint64_t sequence) {
    return Sequences(worker).Find(SequenceId(sequence))->shards[0].sets;
  }
  const AttentionWorkerCounters& counters(int worker) const { return nodes_[worker]->core().counters(); }
  size_t BlockBytes() const { return KvBlockBytes(table_, KvStorage::kAsSent); }
  void FlipABitOf(int worker, KvBlockId block) {
    devices_[worker]->Alter([&](std::byte* data, size_t) { data[block * BlockBytes() + 100] ^= std::byte{4}; });
  }

  template <typename Message>
  void Tell(int worker, FrameType type, const Message& message, uint64_t step = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    Send(worker, type, step, 0, payload);
  }
  void Send(int worker, FrameType type, uint64_t step, int op, const std::vector<std::byte>& payload) {
    const auto header = proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(0), op, payload.size());
    tensors_.push_back(payload);
    const NodeId to = ports_[1 + worker]->id();
    const bool tensor = type == FrameType::kQuery || type == FrameType::kKeyValue;
    ASSERT_TRUE(
        (tensor ? ports_[0]->SendTensor(to, header, tensors_.back()) : ports_[0]->SendMessage(to, header, payload))
            .ok());
    for (int quiet = 0; quiet < 2;) {
      int work = 0;
      for (const auto& node : nodes_) work += node->Poll();
      quiet = work == 0 ? quiet + 1 : 0;
      while (ports_[0]->Poll(*this, 64) > 0) quiet = 0;
    }
  }
  void OnFrame(const transport::Delivery& delivery) override {
    const auto take = [&](auto& into) {
      into = *proto::Decode<std::remove_reference_t<decltype(into)>>(delivery.payload);
    };
    if (delivery.header.type == FrameType::kSequenceOpened) take(opened_);
    if (delivery.header.type == FrameType::kStepRefused) take(refused_);
    if (delivery.header.type == FrameType::kSequenceMoved) take(moved_);
    if (delivery.header.type == FrameType::kPartial)
      answer_.insert(answer_.end(), delivery.payload.begin(), delivery.payload.end());
  }

  const proto::AttentionTable table_ = Table();
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<std::unique_ptr<test::FrailDevice>> devices_;
  std::vector<std::unique_ptr<AttentionWorkerNode>> nodes_;
  std::deque<std::vector<std::byte>> tensors_;
  proto::SequenceOpened opened_;
  proto::StepRefused refused_;
  proto::SequenceMoved moved_;
  std::vector<std::byte> answer_;
  uint64_t steps_ = 0;
};

TEST_F(Damage, SoundBlocksAreComparedWhenTheyAreTakenAndTakenAsEver) {
  const int worker = AddWorker();
  const std::vector<std::byte> answer = Prefill(worker, 1);
  EXPECT_THAT(Open(worker, 2, 4), ElementsAre(4, 3, 2, 1, 0));
  EXPECT_EQ(Step(worker, 2, kPrompt, 1), answer);
  EXPECT_EQ(counters(worker).digests_compared, 4u);
  EXPECT_EQ(counters(worker).damaged_sets, 0u);
}

TEST_F(Damage, ABitThatChangedInACachedBlockIsFoundAndTheBlockIsNotTaken) {
  const int worker = AddWorker();
  Prefill(worker, 1);
  const BlockSetId third = SetsOf(worker, 1)[2];
  const KvBlockId block = Sequences(worker).pool().blocks(third)[3];
  Release(worker, 1, kPrompt, 4);
  FlipABitOf(worker, block);
  EXPECT_THAT(Open(worker, 2, 4), ElementsAre(2, 1, 0));
  EXPECT_EQ(counters(worker).damaged_sets, 1u);
  EXPECT_EQ(counters(worker).damaged_blocks, Sequences(worker).pool().blocks(SetsOf(worker, 2)[0]).size());
  Step(worker, 2, 2 * kSegmentTokens, kPrompt - 2 * kSegmentTokens);
  // K and V of a chunk that begins elsewhere are others in this test, so compare with a worker that ran the same steps.
  const int sound = AddWorker();
  Prefill(sound, 1);
  EXPECT_THAT(Open(sound, 2, 2), ElementsAre(2, 1, 0));
  Step(sound, 2, 2 * kSegmentTokens, kPrompt - 2 * kSegmentTokens);
  EXPECT_EQ(Step(worker, 2, kPrompt, 1), Step(sound, 2, kPrompt, 1));
  EXPECT_THAT(Open(worker, 3, 4), ElementsAre(4, 3, 2, 1, 0)) << "what was computed again took its place";
  EXPECT_EQ(counters(worker).damaged_sets, 1u);
}

TEST_F(Damage, WithoutDigestsTheSameBitChangesTheAnswer) {
  const int worker = AddWorker(Digests::kNone);
  const std::vector<std::byte> answer = Prefill(worker, 1);
  const KvBlockId block = Sequences(worker).pool().blocks(SetsOf(worker, 1)[2])[3];
  Release(worker, 1, kPrompt, 4);
  devices_[worker]->Alter([&](std::byte* data, size_t) { data[block * BlockBytes() + 103] ^= std::byte{64}; });
  EXPECT_THAT(Open(worker, 2, 4), ElementsAre(4, 3, 2, 1, 0));
  EXPECT_NE(Step(worker, 2, kPrompt, 1), answer);
}

TEST_F(Damage, ALiveSequenceThatSharesTheDamagedBlockMustBeginAgain) {
  const int worker = AddWorker();
  Prefill(worker, 1);
  FlipABitOf(worker, Sequences(worker).pool().blocks(SetsOf(worker, 1)[0])[0]);
  EXPECT_THAT(Open(worker, 2, 4), ElementsAre(0));
  EXPECT_TRUE(Step(worker, 1, kPrompt + 1, 1).empty());
  EXPECT_THAT(refused_.damaged, ElementsAre(SequenceId(1)));
  EXPECT_EQ(counters(worker).damaged_sequences, 1u);
  Release(worker, 1, kPrompt + 1, 0);
  EXPECT_FALSE(Step(worker, 2, 0, kPrompt).empty()) << "others go on";
  Release(worker, 2, kPrompt, 0);
  EXPECT_EQ(Sequences(worker).status().blocks_in_use, 0u);
}

TEST_F(Damage, ASequenceWhoseBlocksWereGivenToAnotherUseIsRefusedAndTheOtherGoesOn) {
  const int worker = AddWorker(Digests::kNone);
  Prefill(worker, 1);
  // As a fault in the bookkeeping would: the set is freed under the sequence and allocated again.
  const BlockSetId stale = SetsOf(worker, 1)[1];
  BlockPool& pool = Sequences(worker).pool();
  pool.DropReference(stale);
  pool.Free(stale);
  Open(worker, 2, 0);
  const std::vector<std::byte> other = Step(worker, 2, 0, kPrompt);
  EXPECT_FALSE(other.empty());
  EXPECT_TRUE(Step(worker, 1, kPrompt + 1, 1).empty());
  EXPECT_THAT(refused_.damaged, ElementsAre(SequenceId(1)));
  EXPECT_THAT(refused_.reason, HasSubstr("not what was written"));
  Release(worker, 1, kPrompt + 1, 0);
  EXPECT_FALSE(Step(worker, 2, kPrompt, 1, 4).empty());
}

// As a fault in the bookkeeping would: a set is freed under the sequence, and the prefix cache still names it.
TEST_F(Damage, ABlockThatWasFreedThoughItHasANameIsGivenToNoOther) {
  const int worker = AddWorker(Digests::kNone);
  Prefill(worker, 1);
  Tell(worker, FrameType::kPrefixProbe,
       proto::PrefixProbe{7, {proto::WholePlacement(table_, WorkerId(worker), kEpoch)[0]}, Hashes(4)});
  const BlockSetId stale = SetsOf(worker, 1)[1];
  BlockPool& pool = Sequences(worker).pool();
  while (pool.references(stale) > 0) pool.DropReference(stale);
  pool.Free(stale);
  EXPECT_THAT(Open(worker, 2, 4), ElementsAre(1, 0)) << "the block before it is sound";
  Tell(worker, FrameType::kForkSequence, proto::ForkSequence{SequenceId(1), SequenceId(3), kPrompt + 1});
  EXPECT_THAT(opened_.resumable, IsEmpty());
  Tell(worker, FrameType::kUnpin, proto::Unpin{7});
  EXPECT_TRUE(Step(worker, 1, kPrompt + 1, 1).empty());
  EXPECT_THAT(refused_.damaged, ElementsAre(SequenceId(1)));
  EXPECT_FALSE(Step(worker, 2, 64, 10, 1).empty());
  Release(worker, 1, kPrompt + 1, 0);
  Release(worker, 2, 0, 0);
  EXPECT_EQ(Sequences(worker).status().blocks_in_use, 0u);
}

TEST_F(Damage, ASequenceWithTwoBlocksExchangedIsNeitherMovedNorNamed) {
  const int giver = AddWorker(), taker = AddWorker();
  Prefill(giver, 1);
  std::swap(SetsOf(giver, 1)[0], SetsOf(giver, 1)[1]);
  Open(taker, 1, 0);
  Tell(giver, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, kPrompt + 1, 1, StepId(1000), ports_[1 + taker]->id(), kEpoch});
  EXPECT_FALSE(moved_.moved);
  EXPECT_THAT(moved_.reason, HasSubstr("not what was written"));
  EXPECT_EQ(counters(taker).moved_parts, 0u);
  EXPECT_TRUE(Step(giver, 1, kPrompt + 1, 1).empty());
  EXPECT_THAT(refused_.damaged, ElementsAre(SequenceId(1)));
}

TEST_F(Damage, ADamagedBlockIsNotGivenToAnotherWorker) {
  const int giver = AddWorker(), taker = AddWorker();
  Prefill(giver, 1);
  FlipABitOf(giver, Sequences(giver).pool().blocks(SetsOf(giver, 1)[3])[1]);
  Open(taker, 1, 0);
  Tell(giver, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, kPrompt + 1, 1, StepId(1000), ports_[1 + taker]->id(), kEpoch});
  EXPECT_FALSE(moved_.moved);
  EXPECT_EQ(counters(giver).damaged_sets, 1u);
  EXPECT_EQ(counters(taker).moved_parts, 0u);
}

TEST_F(Damage, AMoveThatBringsSomethingElseIsRefusedAndTheSequenceStaysWhereItIs) {
  const int taker = AddWorker();
  Open(taker, 1, 0);
  const proto::StepBegin part{
      {{.sequence = SequenceId(1), .q_len = kPrompt, .hashes = {}, .attend_end = 0, .fill_end = kPrompt}}};
  Tell(taker, FrameType::kStepBegin, part, 1000);
  // It came in the micro-batch of the first move.
  ASSERT_EQ(counters(taker).moved_parts, 0u) << "this frame was in a micro-batch of steps";
  std::vector<std::byte> begin;
  proto::Encode(part, begin);
  const auto in_slot = [&](FrameType type, std::span<const std::byte> payload, uint64_t digest) {
    return proto::MakeHeader(type, kEpoch, StepId(1001), MicroBatchId(1), 0, payload.size(), 0, digest);
  };
  ASSERT_TRUE(ports_[0]->SendMessage(ports_[1]->id(), in_slot(FrameType::kStepBegin, begin, 0), begin).ok());
  nodes_[taker]->Poll();
  ASSERT_EQ(counters(taker).moved_parts, 1u);
  const auto payload = Numbers(nodes_[taker]->core().LayoutOf(MicroBatchId(1), LayerGroup(0)).key_value_bytes, 1);
  refused_ = {};
  ASSERT_TRUE(ports_[0]->SendTensor(ports_[1]->id(), in_slot(FrameType::kKeyValue, payload, 12345), payload).ok());
  nodes_[taker]->Poll();
  ports_[0]->Poll(*this, 64);
  EXPECT_THAT(refused_.reason, HasSubstr("is not what node"));
}

}  // namespace
}  // namespace dovetail::attention
