#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention_worker/attention_worker_node.h"
#include "base/dtype.h"
#include "kernels/kv_block.h"
#include "linear_attention/packed_state.h"
#include "transport/inproc/inproc_fabric.h"

// Attention workers of one process with a linear state each, and their only client: who moves what where.

namespace dovetail::attention::testing {

using proto::FrameType;

inline constexpr Epoch kEpoch{3};
inline constexpr uint64_t kModel = 0x1234;

// Two gated delta layers with their convolutions, a softmax layer between them, and lightning. No head has the taps or
// the decay of another.
inline proto::AttentionTable Table(DType state, DType wire = DType::kF32, bool vector_decay = false) {
  proto::LinearSpec delta;
  delta.heads = 2;
  delta.key_dim = delta.value_dim = 16;
  delta.delta = delta.token_decay = delta.token_rate = delta.normalise = true;
  delta.conv_width = 4;
  delta.wire = wire;
  delta.vector_decay = vector_decay;  // as Kimi's
  delta.state = state;
  const size_t block_bytes = (kernels::KvBlockLayout{16, 16, wire}.bytes() + 63) / 64 * 64;
  delta.blocks_per_head = kernels::LinearStateLayout(linear_attention::ShapeOf(delta)).pieces(block_bytes);
  proto::LinearConstants constants, decays;
  for (int i = 0; i < delta.conv_width * delta.heads * delta.channels(); ++i)
    constants.conv.push_back(0.1f + 0.05f * static_cast<float>(i % 7));
  proto::LinearSpec lightning;
  lightning.heads = 2;
  lightning.key_dim = lightning.value_dim = 16;
  lightning.wire = wire;
  lightning.state = state;
  lightning.blocks_per_head = kernels::LinearStateLayout(linear_attention::ShapeOf(lightning)).pieces(block_bytes);
  decays.log_decay = {-0.01f, -0.2f};
  proto::SoftmaxSpec softmax;
  softmax.query_heads = softmax.kv_heads = 2;
  softmax.key_dim = softmax.value_dim = 16;
  softmax.scale = 0.25f;
  softmax.kv = wire;
  return *proto::AttentionTable::Build({delta, softmax, delta, lightning}, {constants, {}, constants, decays});
}

class StateMoves : public ::testing::Test, public transport::FrameHandler {
 protected:
  explicit StateMoves(proto::AttentionTable table) : table_(std::move(table)) {
    ports_.push_back(fabric_.CreatePort(nullptr));  // the client's
  }

  void AddWorker(kernels::Device& device, uint64_t model = kModel) {
    ports_.push_back(fabric_.CreatePort(nullptr));
    const auto worker = WorkerId(static_cast<uint32_t>(nodes_.size()));
    auto node = AttentionWorkerNode::Create(table_, {worker, kEpoch, 400, /*micro_batches=*/2, 50, model}, device,
                                            *ports_.back());
    ASSERT_TRUE(node.ok()) << node.status();
    nodes_.push_back(*std::move(node));
  }
  void AddCpuWorker(uint64_t model = kModel) {
    devices_.push_back(*kernels::CreateCpuDevice({.threads = 1}));
    AddWorker(*devices_.back(), model);
  }

  template <typename Message>
  void Tell(int worker, FrameType type, const Message& message, uint64_t step = 0, uint16_t micro_batch = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    Send(worker, type, step, 0, payload, micro_batch);
  }
  void Send(int worker, FrameType type, uint64_t step, int op, const std::vector<std::byte>& payload,
            uint16_t micro_batch = 0) {
    const auto header = proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(micro_batch), op, payload.size());
    const NodeId to = ports_[1 + worker]->id();
    if (type == FrameType::kQuery || type == FrameType::kKeyValue) {
      tensors_.push_back(payload);
      ASSERT_TRUE(ports_[0]->SendTensor(to, header, tensors_.back()).ok());
    } else {
      ASSERT_TRUE(ports_[0]->SendMessage(to, header, payload).ok());
    }
    for (int quiet = 0; quiet < 2;) {
      int work = 0;
      for (const auto& node : nodes_) work += node->Poll();
      quiet = work == 0 ? quiet + 1 : 0;
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
    for (int op = 0; op < table_.op_count(); ++op) SendTokens(worker, step, op, ctx_len, q_len);
    return answer_;
  }
  // q, k, v and gates of tokens of an op.
  void SendTokens(int worker, uint64_t step, int op, Position ctx_len, int q_len, uint16_t micro_batch = 0) {
    const proto::StepLayout& layout = nodes_[worker]->core().LayoutOf(MicroBatchId(micro_batch), table_.op_group[op]);
    const proto::ShardStep& item = layout.items[0];
    std::vector<std::byte> query(layout.query_bytes), key_value(layout.key_value_bytes);
    for (int row = 0; row < q_len; ++row) {
      const auto put = [&](std::vector<std::byte>& into, int64_t offset, int64_t end, int kind) {
        const int64_t bytes = (end - offset) / q_len;
        const int64_t seed = ((ctx_len + row) * 10 + op) * 10 + kind;
        const auto numbers = Numbers(bytes, seed, kind == 3 ? DType::kF32 : Wire());
        std::memcpy(into.data() + offset + row * bytes, numbers.data(), bytes);
      };
      const int64_t gates = table_.softmax(table_.op_group[op]).gates;
      const int64_t value_end = gates > 0 ? item.gate_offset : layout.key_value_bytes;
      put(query, item.query_offset, layout.query_bytes, 0);
      put(key_value, item.key_offset, item.value_offset, 1);
      put(key_value, item.value_offset, value_end, 2);
      if (gates > 0) put(key_value, item.gate_offset, layout.key_value_bytes, 3);
    }
    Send(worker, FrameType::kQuery, step, op, query, micro_batch);
    Send(worker, FrameType::kKeyValue, step, op, key_value, micro_batch);
  }
  DType Wire() const { return table_.linear(table_.op_group[0])->wire; }
  // All below 0, as decays are.
  static std::vector<std::byte> Numbers(int64_t bytes, int64_t seed, DType type = DType::kF32) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    std::vector<std::byte> out(bytes);
    for (size_t at = 0; at < out.size(); at += SizeOf(type)) {
      const float number = -static_cast<float>(random() % 1000 + 1) / 2000;
      const BF16 rounded = ToBF16(number);
      std::memcpy(out.data() + at, type == DType::kF32 ? static_cast<const void*>(&number) : &rounded, SizeOf(type));
    }
    return out;
  }
  void Move(Position end, int from = 0, int to = 1, uint64_t step = 1000) {
    moved_ = {};
    Tell(from, FrameType::kMoveSequence,
         proto::MoveSequence{SequenceId(1), 0, end, 1, StepId(step), ports_[1 + to]->id(), kEpoch});
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

}  // namespace dovetail::attention::testing
