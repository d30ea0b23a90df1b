#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "kernels/device.h"
#include "linear_attention/linear_heads.h"
#include "proto/state_blocks.h"

// A prompt that runs in parts, each in memory of its own that gets the state before it from the wire, gives the bits of
// the prompt that runs in one part.

namespace dovetail::linear_attention {
namespace {

using proto::LinearSpec;

struct Family {
  const char* name;
  bool delta = false, token_decay = false, vector_decay = false, normalise = false;
  int conv_width = 0;
  DType wire = DType::kF32, state = DType::kF32;
};

LinearSpec SpecOf(const Family& family) {
  LinearSpec spec;
  spec.heads = 2;
  spec.key_dim = 24;
  spec.value_dim = 40;
  spec.delta = family.delta;
  spec.token_decay = spec.token_rate = family.token_decay;
  spec.vector_decay = family.vector_decay;
  spec.normalise = family.normalise;
  spec.query_scale = 0.25f;
  spec.conv_width = family.conv_width;
  spec.wire = family.wire;
  spec.state = family.state;
  spec.blocks_per_head = 1;
  return spec;
}

proto::LinearConstants ConstantsOf(const LinearSpec& spec) {
  proto::LinearConstants constants;
  if (!spec.token_decay) constants.log_decay = {-0.01f, -0.2f};
  for (int i = 0; i < spec.conv_width * spec.heads * spec.channels(); ++i)
    constants.conv.push_back(0.1f + 0.05f * static_cast<float>(i % 7));
  return constants;
}

// What crosses for the tokens of a prompt: q, k, v, gates and room for o, each [token][head][..].
struct Prompt {
  Prompt(const LinearSpec& spec, int tokens) {
    std::mt19937 random(7);
    const auto fill = [&](std::vector<std::byte>& rows, int dim) {
      rows.resize(int64_t{tokens} * spec.heads * dim * SizeOf(spec.wire));
      for (size_t at = 0; at < rows.size(); at += SizeOf(spec.wire)) {
        const float number = static_cast<float>(random() % 2000) / 1000 - 1;
        const BF16 rounded = ToBF16(number);
        std::memcpy(&rows[at], spec.wire == DType::kF32 ? static_cast<const void*>(&number) : &rounded,
                    SizeOf(spec.wire));
      }
    };
    fill(q, spec.key_dim), fill(k, spec.key_dim), fill(v, spec.value_dim);
    o.resize(v.size());
    for (int64_t i = 0; i < int64_t{tokens} * spec.heads * spec.gates(); ++i)
      gates.push_back(i % spec.gates() < spec.decays() ? -static_cast<float>(random() % 1000) / 2000
                                                       : static_cast<float>(random() % 1000) / 1000);
  }
  std::vector<std::byte> q, k, v, o;
  std::vector<float> gates;
};

class CarriedState : public ::testing::TestWithParam<Family> {
 protected:
  const LinearSpec spec_ = SpecOf(GetParam());
  const proto::LinearConstants constants_ = ConstantsOf(spec_);
  const size_t block_bytes_ = kernels::LinearStateLayout(ShapeOf(spec_)).bytes();

  // Memory of one part: blocks that it needs or leaves, full of NaN.
  struct Memory {
    std::vector<std::vector<std::byte>> blocks;
    std::vector<std::byte*> pieces;
  };
  Memory Take(Position begin, Position end) const {
    Memory memory;
    const auto before = proto::StatesBefore(begin), left = proto::StatesLeft(begin, end);
    const auto names = [](const proto::StateBlocks& blocks, int64_t block) {
      return std::any_of(blocks.begin(), blocks.end(), [&](const auto& b) { return b.block == block; });
    };
    for (int64_t block = FirstBlock(begin); block < FirstBlock(begin) + BlocksTo(begin, end); ++block) {
      const bool holds = names(before, block) || names(left, block);
      if (holds) memory.blocks.emplace_back(block_bytes_, std::byte{0xff});
      memory.pieces.push_back(holds ? memory.blocks.back().data() : nullptr);
    }
    return memory;
  }

  // Tokens [begin, end) of one head; `wire` is the state before, then that after.
  void Run(Prompt& prompt, int head_index, Position begin, Position end, std::vector<std::byte>& wire) {
    const PackedState packed(spec_, block_bytes_);
    Memory memory = Take(begin, end);
    const std::byte* from = wire.data();
    for (const auto& block : proto::StatesBefore(begin))
      from = packed.Unpack(block.tokens, from, &memory.pieces[block.block - FirstBlock(begin)]);
    ASSERT_EQ(from, wire.data() + wire.size());
    LinearHead head;
    const size_t element = SizeOf(spec_.wire), key = spec_.key_dim * element, value = spec_.value_dim * element;
    head.head = head_index;
    head.first_position = begin;
    head.rows = static_cast<int>(end - begin);
    head.q_step = head.k_step = static_cast<int64_t>(spec_.heads * key);
    head.v_step = head.o_step = static_cast<int64_t>(spec_.heads * value);
    head.gate_step = int64_t{spec_.heads} * spec_.gates();
    head.q = &prompt.q[begin * head.q_step + head_index * key];
    head.k = &prompt.k[begin * head.k_step + head_index * key];
    head.v = &prompt.v[begin * head.v_step + head_index * value];
    head.o = &prompt.o[begin * head.o_step + head_index * value];
    if (spec_.gates() > 0) head.gates = &prompt.gates[begin * head.gate_step + head_index * spec_.gates()];
    head.pieces = memory.pieces.data();
    head.first_block = FirstBlock(begin);
    head.blocks = BlocksTo(begin, end);
    ASSERT_TRUE(heads_.Prepare(spec_, {.heads = 1, .rows = head.rows, .unkept = 1}).ok());
    const absl::Status ran = heads_.Run(kernels::ContextOf(*stream_), spec_, constants_, {&head, 1}, block_bytes_);
    ASSERT_TRUE(ran.ok()) << ran;
    const auto after = proto::StatesBefore(end);
    size_t bytes = 0;
    for (const auto& block : after) bytes += packed.bytes(block.tokens);
    wire.resize(bytes);
    std::byte* to = wire.data();
    for (const auto& block : after) to = packed.Pack(block.tokens, &memory.pieces[block.block - FirstBlock(begin)], to);
  }
  void RunInParts(Prompt& prompt, const std::vector<Position>& cuts) {
    for (int head = 0; head < spec_.heads; ++head) {
      std::vector<std::byte> wire;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) Run(prompt, head, cuts[i], cuts[i + 1], wire);
    }
  }

  std::unique_ptr<kernels::Device> device_ = *kernels::CreateCpuDevice({.threads = 1});
  std::unique_ptr<kernels::Stream> stream_ = device_->CreateStream();
  LinearHeads heads_{*device_};
};

TEST_P(CarriedState, GivesTheBitsOfThePromptInOnePart) {
  constexpr int kTokens = 1200;
  Prompt whole(spec_, kTokens);
  RunInParts(whole, {0, kTokens});
  std::mt19937 random(11);
  for (int round = 0; round < 12; ++round) {
    std::vector<Position> cuts = {0};
    const int most = round % 3 == 0 ? 8 : round % 3 == 1 ? 200 : 700;
    while (cuts.back() < kTokens)
      cuts.push_back(std::min<Position>(kTokens, cuts.back() + 1 + static_cast<Position>(random() % most)));
    if (round == 0) cuts = {0, 64, 128, 129, 640, kTokens};
    Prompt parts(spec_, kTokens);
    RunInParts(parts, cuts);
    ASSERT_EQ(std::memcmp(whole.o.data(), parts.o.data(), whole.o.size()), 0) << "round " << round;
  }
  for (size_t at = 0; at < whole.o.size() && spec_.wire == DType::kF32; at += sizeof(float)) {
    float number;
    std::memcpy(&number, &whole.o[at], sizeof(number));
    ASSERT_TRUE(std::isfinite(number)) << "element " << at / sizeof(float);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, CarriedState,
    ::testing::Values(
        Family{.name = "lightning"}, Family{.name = "mamba2", .token_decay = true, .conv_width = 4},
        Family{.name = "gated_delta", .delta = true, .token_decay = true, .normalise = true, .conv_width = 4},
        Family{.name = "kda",
               .delta = true,
               .token_decay = true,
               .vector_decay = true,
               .normalise = true,
               .conv_width = 2},
        Family{.name = "of_16_bits",
               .delta = true,
               .token_decay = true,
               .normalise = true,
               .conv_width = 3,
               .wire = DType::kBF16,
               .state = DType::kBF16}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::linear_attention
