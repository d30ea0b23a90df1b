#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "attention_worker/attention_worker_node.h"
#include "kernels/kv_block.h"
#include "linear_attention/packed_state.h"
#include "transport/inproc/inproc_fabric.h"

#ifndef DOVETAIL_SEED_COUNT
#define DOVETAIL_SEED_COUNT 100
#endif

// A whole attention worker, and the test as the scheduler and the compute worker around it. Frames come twice, come
// again long after, and steps are begun, given up in the middle and tried again under another number. Every answer that
// counts is to the bit that of an undisturbed worker: nothing is appended, forgotten or advanced twice.

namespace dovetail::attention {
namespace {

using proto::FrameType;

constexpr WorkerId kWorker{7};
constexpr Epoch kEpoch{3};
constexpr int kMicroBatches = 2;

proto::SoftmaxSpec Softmax(int window) {
  proto::SoftmaxSpec spec;
  spec.query_heads = 4;
  spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 16;
  spec.scale = 0.25f;
  spec.window = window;
  spec.kv = DType::kF32;
  return spec;
}

// Gated DeltaNet with its convolution, KDA, lightning, Mamba-2's rate; between them softmax with and without a window.
proto::AttentionTable Table() {
  proto::LinearSpec delta;
  delta.heads = 2;
  delta.key_dim = delta.value_dim = 16;
  delta.delta = delta.token_decay = delta.token_rate = delta.normalise = true;
  delta.query_scale = 0.25f;
  delta.conv_width = 4;
  delta.wire = DType::kF32;
  proto::LinearSpec kda = delta;
  kda.vector_decay = true;
  kda.conv_width = 0;
  proto::LinearSpec lightning;
  lightning.heads = 2;
  lightning.key_dim = lightning.value_dim = 16;
  lightning.wire = DType::kF32;
  proto::LinearSpec mamba = lightning;
  mamba.token_decay = mamba.token_rate = true;
  mamba.conv_width = 4;
  const size_t block_bytes = (kernels::KvBlockLayout{16, 16, DType::kF32}.bytes() + 63) / 64 * 64;
  std::vector<proto::LinearConstants> constants;
  std::vector<proto::AttentionSpec> ops;
  const auto add = [&](proto::LinearSpec spec) {
    spec.blocks_per_head = kernels::LinearStateLayout(linear_attention::ShapeOf(spec)).pieces(block_bytes);
    proto::LinearConstants& of_op = constants.emplace_back();
    if (!spec.token_decay) of_op.log_decay = {-0.01f, -0.2f};
    for (int i = 0; i < spec.conv_width * spec.heads * spec.channels(); ++i)
      of_op.conv.push_back(0.1f + 0.3f * static_cast<float>(i % 3));
    ops.emplace_back(spec);
  };
  add(delta);
  ops.emplace_back(Softmax(0)), constants.emplace_back();
  add(kda);
  add(lightning);
  ops.emplace_back(Softmax(100)), constants.emplace_back();
  add(mamba);
  return *proto::AttentionTable::Build(ops, constants);
}

// Some number of (-0.5, 0.5) for each name.
float Value(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * 0x9e3779b97f4a7c15 + b * 0xbf58476d1ce4e5b9 + c * 0x94d049bb133111eb + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return static_cast<float>(static_cast<double>((x ^ (x >> 31)) >> 40) / (1 << 24) - 0.5);
}

// How one sequence goes on: from ctx_len, so many tokens.
struct StepOf {
  uint64_t sequence = 0;
  Position ctx_len = 0;
  int q_len = 0;
};

class Faulty : public transport::FrameHandler {
 public:
  // Nothing goes wrong without a seed.
  explicit Faulty(std::optional<uint64_t> seed)
      : table_(Table()),
        random_(seed.value_or(0)),
        faulty_(seed.has_value()),
        device_(*kernels::CreateCpuDevice({.threads = 1})) {
    for (int i = 0; i < 2; ++i) ports_.push_back(fabric_.CreatePort(nullptr));
    node_ = *AttentionWorkerNode::Create(table_, {kWorker, kEpoch, 4000, kMicroBatches}, *device_, *ports_[1]);
  }

  void Open(uint64_t sequence) {
    const proto::Placement placement = proto::WholePlacement(table_, kWorker, kEpoch);
    Order(FrameType::kOpenSequence,
          proto::OpenSequence{SequenceId(sequence), {placement.begin(), placement.end()}, {}});
  }
  void Release(uint64_t sequence, Position ctx_len) {
    Order(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(sequence), ctx_len, {}});
  }

  // Runs the step to its end; what was answered to its ops, one after the other.
  std::vector<std::byte> Step(const std::vector<StepOf>& entries) {
    while (faulty_ && OneIn(4)) Attempt(entries, static_cast<int>(random_() % (2 * table_.op_count())));
    return Attempt(entries, 2 * table_.op_count());
  }

  const AttentionWorkerCore& core() const { return node_->core(); }
  int echoes() const { return echoes_; }
  std::vector<std::string> refusals;

  void OnFrame(const transport::Delivery& delivery) override {
    if (delivery.header.type == FrameType::kStepRefused) {
      const auto refused = proto::Decode<proto::StepRefused>(delivery.payload);
      refused_.emplace_back(delivery.header.step, refused->reason);
    } else if (delivery.header.type == FrameType::kPartial) {
      answers_[{delivery.header.step, delivery.header.op}].emplace_back(delivery.payload.begin(),
                                                                        delivery.payload.end());
    }
  }

 private:
  struct Frame {
    proto::FrameHeader header;
    std::vector<std::byte> payload;
  };

  bool OneIn(uint64_t n) { return random_() % n == 0; }

  template <typename Message>
  void Order(FrameType type, const Message& message) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    Send({proto::MakeHeader(type, kEpoch, StepId(++orders_), MicroBatchId(0), 0, payload.size()), payload});
  }

  // Tensors stay where they are until they are answered, and longer.
  void Deliver(const Frame& frame) {
    const bool tensor = frame.header.type == FrameType::kQuery || frame.header.type == FrameType::kKeyValue;
    const NodeId to = ports_[1]->id();
    EXPECT_TRUE((tensor ? ports_[0]->SendTensor(to, frame.header, frame.payload)
                        : ports_[0]->SendMessage(to, frame.header, frame.payload))
                    .ok());
    while (node_->Poll() > 0) {
    }
    while (ports_[0]->Poll(*this, 64) > 0) {
    }
  }
  void Send(Frame frame) {
    sent_.push_back(std::move(frame));
    Deliver(sent_.back());
    while (faulty_ && OneIn(3)) {  // any frame again, most often a late one
      ++echoes_;
      const size_t back = OneIn(2) ? random_() % std::min<size_t>(sent_.size(), 30) : random_() % sent_.size();
      Deliver(sent_[sent_.size() - 1 - back]);
    }
  }

  std::vector<std::byte> Attempt(const std::vector<StepOf>& entries, int tensors) {
    const StepId step(++steps_);
    const MicroBatchId id(static_cast<uint16_t>(faulty_ ? random_() % kMicroBatches : 0));
    proto::StepBegin begin;
    for (const StepOf& entry : entries)
      begin.entries.push_back({SequenceId(entry.sequence), entry.ctx_len, entry.q_len, {}});
    std::vector<std::byte> message;
    proto::Encode(begin, message);
    Send({proto::MakeHeader(FrameType::kStepBegin, kEpoch, step, id, 0, message.size()), message});
    std::vector<std::byte> all;
    for (int op = 0; op < table_.op_count() && 2 * op < tensors; ++op) {
      Send(Tensor(FrameType::kQuery, step, id, op, entries));
      if (2 * op + 1 >= tensors) break;
      Send(Tensor(FrameType::kKeyValue, step, id, op, entries));
      const auto& answers = answers_[{step.value(), op}];
      EXPECT_EQ(answers.size(), 1u) << "step " << step.value() << " op " << op;
      if (answers.size() == 1) all.insert(all.end(), answers[0].begin(), answers[0].end());
    }
    for (const auto& [number, reason] : refused_)
      if (number == step.value()) refusals.push_back(reason);
    refused_.clear();
    return all;
  }

  // As the compute worker would pack it: what a token brings depends on the token alone.
  Frame Tensor(FrameType type, StepId step, MicroBatchId id, int op, const std::vector<StepOf>& entries) {
    const LayerGroup group = table_.op_group[op];
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    proto::StepLayout layout;
    for (size_t e = 0; e < entries.size(); ++e)
      layout.Add(static_cast<int>(e), group.value(), {0, spec.kv_heads}, {}, entries[e].ctx_len, entries[e].q_len,
                 spec);
    layout.Finish(spec);
    const bool query = type == FrameType::kQuery;
    std::vector<float> floats((query ? layout.query_bytes : layout.key_value_bytes) / sizeof(float));
    for (size_t e = 0; e < entries.size(); ++e) {
      const proto::ShardStep& item = layout.items[e];
      const auto fill = [&](int64_t offset, int row_floats, uint64_t kind) {
        for (int row = 0; row < entries[e].q_len; ++row)
          for (int i = 0; i < row_floats; ++i)
            floats[offset / 4 + int64_t{row} * row_floats + i] =
                Value(entries[e].sequence * 100 + static_cast<uint64_t>(op), entries[e].ctx_len + row, kind * 1000 + i);
      };
      if (query) {
        fill(item.query_offset, item.query_heads * spec.key_dim, 1);
        continue;
      }
      fill(item.key_offset, spec.kv_heads * spec.key_dim, 2);
      fill(item.value_offset, spec.kv_heads * spec.value_dim, 3);
      if (spec.gates == 0) continue;
      fill(item.gate_offset, spec.kv_heads * spec.gates, 4);
      const int decays = table_.linear(group)->decays();
      for (int64_t at = 0; at < int64_t{entries[e].q_len} * spec.kv_heads * spec.gates; ++at) {
        float& gate = floats[item.gate_offset / 4 + at];
        gate = at % spec.gates < decays ? -0.1f - 0.2f * gate : 0.5f + gate;
      }
    }
    Frame frame{proto::MakeHeader(type, kEpoch, step, id, op, floats.size() * 4), {}};
    frame.payload.resize(floats.size() * 4);
    std::memcpy(frame.payload.data(), floats.data(), frame.payload.size());
    return frame;
  }

  const proto::AttentionTable table_;
  std::mt19937_64 random_;
  const bool faulty_;
  std::unique_ptr<kernels::Device> device_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::unique_ptr<AttentionWorkerNode> node_;
  std::deque<Frame> sent_;
  std::map<std::pair<uint64_t, int>, std::vector<std::vector<std::byte>>> answers_;
  std::vector<std::pair<uint64_t, std::string>> refused_;
  uint64_t steps_ = 0, orders_ = 0;
  int echoes_ = 0;
};

// Prompts in chunks, single tokens over boundaries, guesses of which some are taken back; two sequences at a time.
std::vector<std::vector<std::byte>> Converse(Faulty& worker) {
  std::vector<std::vector<std::byte>> answers;
  worker.Open(1);
  answers.push_back(worker.Step({{1, 0, 70}}));
  answers.push_back(worker.Step({{1, 70, 57}}));
  worker.Open(2);
  answers.push_back(worker.Step({{1, 127, 1}, {2, 0, 64}}));  // the last of a block
  answers.push_back(worker.Step({{1, 128, 1}, {2, 64, 60}}));
  Position one = 129, two = 124;
  for (int i = 0; i < 30; ++i) {
    answers.push_back(worker.Step({{2, two, 5}, {1, one, 3}}));  // some of the guesses were right
    one += 1 + i % 3;
    two += 1 + i % 5;
  }
  worker.Release(2, two);
  answers.push_back(worker.Step({{1, one, 140}}));
  answers.push_back(worker.Step({{1, one + 140, 1}}));
  worker.Release(1, one + 141);
  return answers;
}

TEST(ExactlyOnce, WhateverComesTwiceLateOrInVainTheAnswersAreThoseOfAnUndisturbedWorker) {
  Faulty sound(std::nullopt);
  const auto expected = Converse(sound);
  ASSERT_TRUE(sound.refusals.empty()) << sound.refusals[0];
  for (const auto& answer : expected) ASSERT_FALSE(answer.empty());
  EXPECT_EQ(sound.core().counters().dropped_frames, 0u);

  const char* given = std::getenv("DOVETAIL_SEED");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  const int seeds = given != nullptr ? 1 : DOVETAIL_SEED_COUNT;
  int64_t echoes = 0, dropped = 0;
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(seeds); ++seed) {
    SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed));
    Faulty worker(seed);
    const auto answers = Converse(worker);
    ASSERT_TRUE(worker.refusals.empty()) << worker.refusals[0];
    ASSERT_EQ(answers.size(), expected.size());
    for (size_t i = 0; i < answers.size(); ++i) {
      size_t same = 0;
      while (same < std::min(answers[i].size(), expected[i].size()) && answers[i][same] == expected[i][same]) ++same;
      ASSERT_TRUE(answers[i] == expected[i])
          << "step " << i << ": " << same << " bytes of " << expected[i].size() << " are equal";
    }
    EXPECT_EQ(worker.core().status().blocks_in_use, 0u);
    EXPECT_EQ(worker.core().status().sequences, 0u) << "nothing that was released is open again";
    echoes += worker.echoes();
    dropped += static_cast<int64_t>(worker.core().counters().dropped_frames);
  }
  EXPECT_GT(echoes, 100 * seeds);
  EXPECT_GT(dropped, echoes / 2);
}

}  // namespace
}  // namespace dovetail::attention
