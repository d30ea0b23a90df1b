#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/state/cuda_state.h"
#include "kernels/cuda/state/state_layout.h"
#include "kernels/cuda/state/state_pack.h"
#include "linear_attention/packed_state.h"
#include "tests/kernels_cuda/cuda_fixture.h"

// States between a GPU's blocks and the wire: on the GPU as by way of the host (state_layout.h, packed_state.h).

namespace dovetail::kernels::cuda::testing {
namespace {

struct Shape {
  int key_dim, value_dim;
  bool vector_decay = false, delta = false;
  int conv_width = 0;
  DType state = DType::kF32;
};

proto::LinearSpec SpecOf(const Shape& shape) {
  proto::LinearSpec spec;
  spec.heads = 3;
  spec.key_dim = shape.key_dim;
  spec.value_dim = shape.value_dim;
  spec.vector_decay = shape.vector_decay;
  spec.delta = shape.delta;
  spec.token_decay = true;
  spec.conv_width = shape.conv_width;
  spec.state = shape.state;
  return spec;
}

class StatePack : public CudaTest {
 protected:
  // Blocks as kernels leave them: S, keys and values of any size, decays as logarithms.
  std::vector<std::byte> Blocks(const StateLayout& layout, size_t bytes, int count, const Shape& shape) {
    std::vector<std::byte> blocks(bytes * count);
    std::normal_distribution<float> normal;
    const auto put_bf16 = [&](std::byte* at, float x) {
      const BF16 rounded = ToBF16(x);
      std::memcpy(at, &rounded.bits, 2);
    };
    for (int b = 0; b < count; ++b) {
      std::byte* const block = blocks.data() + b * bytes;
      const auto row = [&](const StateSection& section, int r) {
        return block + section.offset + size_t(r) * section.row_bytes;
      };
      for (int r = 0; r < shape.key_dim; ++r)
        for (int c = 0; c < shape.value_dim; ++c) {
          const float x = normal(random_);
          if (shape.state == DType::kBF16)
            put_bf16(row(layout.state, r) + 2 * c, x);
          else
            std::memcpy(row(layout.state, r) + 4 * c, &x, 4);
        }
      for (int t = 0; t < kStateTokens; ++t) {
        for (int c = 0; c < shape.key_dim; ++c) put_bf16(row(layout.keys, t) + 2 * c, normal(random_));
        for (int c = 0; c < shape.value_dim; ++c) put_bf16(row(layout.values, t) + 2 * c, normal(random_));
        const float log = t % 9 == 3 ? kLowestLogDecay : -std::abs(normal(random_));
        if (shape.vector_decay)
          for (int c = 0; c < shape.key_dim; ++c) put_bf16(row(layout.decays, t) + 2 * c, log * (1 + c % 3));
        else
          std::memcpy(row(layout.decays, 0) + 4 * t, &log, 4);
        if (layout.history.rows > 0)
          for (int c = 0; c < 2 * shape.key_dim + shape.value_dim; ++c)
            put_bf16(row(layout.history, t) + 2 * c, normal(random_));
      }
    }
    return blocks;
  }

  std::mt19937 random_{11};
};

// Values of a packed state, as f32: bits of S and inputs, decays within a rounding.
void ExpectNear(const std::vector<std::byte>& got, const std::vector<std::byte>& want, size_t at, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4) {
    float x, y;
    std::memcpy(&x, got.data() + at + i, 4);
    std::memcpy(&y, want.data() + at + i, 4);
    ASSERT_NEAR(x, y, 1e-6f * std::abs(y)) << "float " << i / 4;
  }
}

TEST_F(StatePack, OnTheGpuIsWhatTheHostPacks) {
  for (const Shape& shape :
       {Shape{64, 64}, Shape{128, 128, false, true, 4}, Shape{16, 24, true, true, 4}, Shape{40, 72, true, false, 3},
        Shape{128, 64, false, false, 4, DType::kBF16}, Shape{7, 5, false, true, 2}}) {
    SCOPED_TRACE(std::to_string(shape.key_dim) + " x " + std::to_string(shape.value_dim));
    const proto::LinearSpec spec = SpecOf(shape);
    const LinearStateShape state = linear_attention::ShapeOf(spec);
    const size_t piece = (LinearStateLayout(state).bytes() + 255) / 256 * 256;
    auto launch = StateLaunchFor(state, piece, WireType::kBF16);
    ASSERT_TRUE(launch.ok()) << launch.status();
    launch->conv_width = shape.conv_width;
    const std::vector<int> tokens = {64, 1, 37, 63, 64};
    const int count = static_cast<int>(tokens.size());
    const std::vector<std::byte> blocks = Blocks(launch->layout, piece, count, shape);
    // By way of the host.
    const linear_attention::PackedState packer(spec, piece);
    std::vector<std::byte> want;
    std::vector<int64_t> at;
    for (int b = 0; b < count; ++b) {
      std::vector<std::byte> from(blocks.begin() + b * piece, blocks.begin() + (b + 1) * piece), cpu(piece);
      std::byte* const there[] = {from.data()};
      std::byte* const here[] = {cpu.data()};
      StateToCpu(state, tokens[b], there, here, piece);
      at.push_back(static_cast<int64_t>(want.size()));
      want.resize(want.size() + packer.bytes(tokens[b]));
      packer.Pack(tokens[b], here, want.data() + at.back());
    }
    const auto on_device = Upload(blocks);
    std::vector<StatePackJob> jobs;
    for (int b = 0; b < count; ++b) jobs.push_back({on_device->data() + b * piece, at[b], tokens[b], 0});
    const auto jobs_there = Upload(jobs);
    const auto packed = Upload(std::vector<std::byte>(want.size() + 64, std::byte{0x5a}));
    StatePackLaunch args = StatePackFor(*launch);
    args.jobs = reinterpret_cast<const StatePackJob*>(jobs_there->data());
    args.packed = packed->data();
    args.count = count;
    ASSERT_TRUE(PackStates(stream(), args).ok());
    const auto got = Download<std::byte>(*packed);
    const size_t inputs = 2 * (shape.conv_width > 0 ? 2 * shape.key_dim + shape.value_dim : 0);
    for (int b = 0; b < count; ++b) {
      const size_t bytes = packer.bytes(tokens[b]), end = at[b] + bytes;
      if (tokens[b] == kStateTokens) {
        EXPECT_EQ(std::memcmp(got.data() + at[b], want.data() + at[b], bytes), 0) << "block " << b;
      } else {
        ExpectNear(got, want, at[b], bytes - tokens[b] * inputs);
        EXPECT_EQ(std::memcmp(got.data() + end - tokens[b] * inputs, want.data() + end - tokens[b] * inputs,
                              tokens[b] * inputs),
                  0)
            << "block " << b;
      }
    }
    for (size_t i = want.size(); i < got.size(); ++i) ASSERT_EQ(got[i], std::byte{0x5a}) << "wrote behind the end";
    // And back: what comes of that is packed as before.
    const auto fresh = Upload(std::vector<std::byte>(blocks.size(), std::byte{0xff}));
    for (int b = 0; b < count; ++b) jobs[b].block = fresh->data() + b * piece;
    const auto jobs_back = Upload(jobs);
    args.jobs = reinterpret_cast<const StatePackJob*>(jobs_back->data());
    ASSERT_TRUE(UnpackStates(stream(), args).ok());
    const auto again = Upload(std::vector<std::byte>(want.size() + 64, std::byte{0}));
    args.packed = again->data();
    ASSERT_TRUE(PackStates(stream(), args).ok());
    const auto second = Download<std::byte>(*again);
    for (int b = 0; b < count; ++b) {
      const size_t bytes = packer.bytes(tokens[b]);
      if (tokens[b] == kStateTokens)
        EXPECT_EQ(std::memcmp(second.data() + at[b], got.data() + at[b], bytes), 0) << "block " << b;
      else
        ExpectNear(second, got, at[b], bytes - tokens[b] * inputs);
    }
  }
}

TEST_F(StatePack, RefusesBlocksInSeveralPiecesAndNullPointers) {
  const LinearStateShape state = linear_attention::ShapeOf(SpecOf({64, 64}));
  auto launch = StateLaunchFor(state, 8192, WireType::kBF16);
  ASSERT_TRUE(launch.ok()) << launch.status();
  ASSERT_GT(launch->layout.pieces, 1);
  StatePackLaunch args = StatePackFor(*launch);
  args.count = 1;
  EXPECT_EQ(PackStates(stream(), args).code(), absl::StatusCode::kInvalidArgument);
  launch = StateLaunchFor(state, LinearStateLayout(state).bytes(), WireType::kBF16);
  ASSERT_TRUE(launch.ok()) << launch.status();
  args = StatePackFor(*launch);
  args.count = 1;
  EXPECT_EQ(UnpackStates(stream(), args).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dovetail::kernels::cuda::testing
