#include "kernels/cuda/state/cuda_state.h"

#include <cstdio>

#include "gtest/gtest.h"
#include "tests/kernels_cuda/state_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using testing::Family;
using testing::kFamilies;
using testing::StateOptions;
using testing::StateSequences;

// Of the largest output of a stream: keys, values and o are rounded to 8 bits (bf16), sums over up to 330 of them.
constexpr double kBudget = 8e-3;

bool RunsHere(const Family& family) { return family.update != StateUpdate::kRankOne; }

class CudaStateTest : public testing::StateTest {
 protected:
  StateSequences Sequences(const Family& family, int key_dim, int value_dim, int rows, int sequences,
                           const StateOptions& options = {}) {
    return StateSequences(*this, stream(), family, key_dim, value_dim, rows, sequences, options);
  }
};

TEST_F(CudaStateTest, TokenByTokenEqualsTheRecurrenceForEveryFamily) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const auto& [keys, values] : std::vector<std::pair<int, int>>{{128, 128}, {64, 32}, {20, 70}, {256, 16}}) {
      StateSequences all = Sequences(family, keys, values, 150, 3);
      for (int t = 0; t < 150; ++t) all.Run(*this, {{0, 1}, {1, 1}, {2, 1}}, AppendStates);
      const double error = all.WorstError();
      std::printf("measured %s %dx%d %.3g\n", family.name.data(), keys, values, error);
      EXPECT_LE(error, kBudget) << family.name << " " << keys << " x " << values;
    }
  }
}

TEST_F(CudaStateTest, RaggedChunksOfSeveralSequencesEqualTheRecurrence) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const bool even : {true, false}) {
      for (const size_t piece_bytes : {size_t{0}, size_t{4096}, size_t{9984}}) {
        StateSequences all = Sequences(family, 96, 80, 330, 3, {.heads = 3, .piece_bytes = piece_bytes, .even = even});
        all.Run(*this, {{0, 63}, {2, 16}}, AppendStates);
        all.Run(*this, {{0, 2}, {1, 129}, {2, 4}}, AppendStates);
        all.Run(*this, {{1, 1}}, AppendStates);
        all.Run(*this, {{0, 200}, {2, 44}}, AppendStates);
        all.Run(*this, {{0, 65}, {1, 200}, {2, 266}}, AppendStates);
        EXPECT_LE(all.WorstError(), kBudget) << family.name << " in pieces of " << piece_bytes << " even: " << even;
      }
    }
  }
}

TEST_F(CudaStateTest, ConvolutionNormsRatesAndSkipsComeWithIt) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    const bool delta = family.update == StateUpdate::kDelta;
    for (const WireType wire : {WireType::kBF16, WireType::kF16}) {
      for (const int values : {48, 64}) {  // by state_append.cu, by state_decode.cu
        StateSequences all = Sequences(family, 64, values, 200, 2,
                                       {.wire = wire, .conv_width = 4, .normalise = delta, .rate = true, .skip = true});
        all.Run(*this, {{0, 1}, {1, 70}}, AppendStates);
        all.Run(*this, {{0, 2}, {1, 1}}, AppendStates);
        for (int t = 0; t < 70; ++t) all.Run(*this, {{0, 1}, {1, 1}}, AppendStates);
        all.Run(*this, {{0, 127}, {1, 59}}, AppendStates);
        EXPECT_LE(all.WorstError(), kBudget) << family.name << " of " << values << " values";
      }
    }
  }
}

TEST_F(CudaStateTest, ARepeatedStepAndTokensTakenBackChangeNothing) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    StateSequences plain = Sequences(family, 64, 64, 140, 2, {.conv_width = 4});
    StateSequences again = Sequences(family, 64, 64, 140, 2, {.conv_width = 4});
    for (int t = 0; t < 140; t += 4) {
      plain.Run(*this, {{0, 4}, {1, 4}}, AppendStates);
      again.Run(*this, {{0, 4}, {1, 4}}, AppendStates, /*repeat=*/true);
      if (t % 20 == 0) {
        again.Back(1, 3);
        again.Run(*this, {{1, 3}}, AppendStates);
      }
    }
    for (int s = 0; s < 4; ++s) EXPECT_EQ(plain.done(s), again.done(s)) << family.name;
  }
}

// Its blocks may belong to another sequence by then.
TEST_F(CudaStateTest, AStepThatHasFailedChangesNothing) {
  const auto zeros = Upload(std::vector<float>(1 << 16)), words = Upload(std::vector<uint64_t>{0, 7});
  const std::vector<uint32_t> untouched(1 << 12, 0x5a5a5a5a);
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const int values : {48, 64}) {  // by state_append.cu, by state_decode.cu
      const auto out = Upload(untouched);
      const auto run = [&](CudaStream& on, const StateLaunch& launch) -> absl::Status {
        StateLaunch of = launch;
        of.failed = reinterpret_cast<const uint64_t*>(words->data());
        DT_RETURN_IF_ERROR(AppendStates(on, of));
        ++of.failed;
        of.query = of.key_value = zeros->data();
        of.out = out->data();
        return AppendStates(on, of);
      };
      StateSequences all = Sequences(family, 64, values, 140, 2);
      for (int t = 0; t < 140; t += 2) all.Run(*this, {{0, 2}, {1, 2}}, run);
      EXPECT_LE(all.WorstError(), kBudget) << family.name << " of " << values << " values";
      EXPECT_EQ(Download<uint32_t>(*out), untouched) << family.name << " of " << values << " values";
    }
  }
}

// Few heads are cut into slices of 32 columns, more into wider ones; sums keep their order.
TEST_F(CudaStateTest, HowManySequencesThereAreChangesNoBit) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    const auto run = [&](int sequences) {
      StateSequences all = Sequences(family, 128, 128, 68, sequences);
      for (const int rows : {59, 1, 1, 3, 1, 3}) {
        std::vector<StateSequences::Part> parts;
        for (int s = 0; s < sequences; ++s) parts.push_back({s, rows});
        all.Run(*this, parts, AppendStates);
      }
      return all;
    };
    const StateSequences few = run(2), more = run(30), most = run(60);
    EXPECT_LE(few.WorstError(), kBudget) << family.name;
    for (int s = 0; s < 4; ++s) {
      EXPECT_EQ(few.done(s), more.done(s)) << family.name;
      EXPECT_EQ(few.done(s), most.done(s)) << family.name;
    }
  }
}

TEST_F(CudaStateTest, StatesWhoseValuesAreNarrowOrManyGoInSlices) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const auto& [keys, values] : std::vector<std::pair<int, int>>{{64, 128}, {128, 96}, {64, 64}, {128, 256}}) {
      StateSequences all = Sequences(family, keys, values, 140, 3, {.piece_bytes = 9984, .state = DType::kF32});
      all.Run(*this, {{0, 62}, {1, 1}, {2, 16}}, AppendStates);
      for (int t = 0; t < 4; ++t) all.Run(*this, {{0, 1}, {1, 1}, {2, 1}}, AppendStates);
      all.Run(*this, {{0, 66}, {1, 130}, {2, 3}}, AppendStates);
      EXPECT_LE(all.WorstError(), kBudget) << family.name << " " << keys << " x " << values;
    }
  }
}

// Products of the chunked form take S, and faded q and k, in bf16: two roundings more.
constexpr double kChunkBudget = 1.6e-2;

class CudaStateChunkTest : public CudaStateTest {
 protected:
  void SetUp() override {
    CudaStateTest::SetUp();
    if (IsSkipped()) return;
    StateLaunch launch;
    launch.key_dim = 128;
    if (!StatesRunInChunks(device(), launch)) GTEST_SKIP() << "needs a GPU with more shared memory";
  }
  // With room for `chunks` chunks at a time.
  StateSequences::Op InChunks(int chunks = 1000) {
    return [this, chunks](CudaStream& stream, const StateLaunch& launch) -> absl::Status {
      StateLaunch wanted = launch;
      wanted.chunk_end = std::min(chunks, launch.chunk_end);
      const size_t bytes = StateWorkspaceBytes(wanted, size_t{1} << 40);
      if (workspace_ == nullptr || workspace_->size_bytes() < bytes) workspace_ = Empty(bytes);
      return AppendStatesInChunks(stream, launch, {workspace_->data(), bytes});
    };
  }
  void TearDown() override {
    workspace_.reset();
    CudaStateTest::TearDown();
  }
  std::unique_ptr<Buffer> workspace_;
};

TEST_F(CudaStateChunkTest, WholePromptsEqualTheRecurrenceForEveryFamily) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const auto& [keys, values] : std::vector<std::pair<int, int>>{{128, 128}, {64, 64}, {20, 70}, {96, 32}}) {
      StateSequences all = Sequences(family, keys, values, 330, 2);
      all.Run(*this, {{0, 330}, {1, 257}}, InChunks());
      const double error = all.WorstError();
      std::printf("measured chunks %s %dx%d %.3g\n", family.name.data(), keys, values, error);
      EXPECT_LE(error, kChunkBudget) << family.name << " " << keys << " x " << values;
    }
  }
}

TEST_F(CudaStateChunkTest, RaggedChunksMixWithSingleTokens) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const bool even : {true, false}) {
      const bool delta = family.update == StateUpdate::kDelta;
      StateSequences all = Sequences(family, 48, 80, 330, 3,
                                     {.heads = 3,
                                      .piece_bytes = 9984,
                                      .even = even,
                                      .conv_width = 4,
                                      .normalise = delta,
                                      .rate = true,
                                      .skip = true});
      all.Run(*this, {{0, 63}, {2, 17}}, InChunks());
      all.Run(*this, {{0, 2}, {1, 129}, {2, 4}}, InChunks());
      all.Run(*this, {{0, 1}, {1, 1}, {2, 1}}, AppendStates);
      all.Run(*this, {{0, 200}, {2, 44}}, InChunks(2));
      all.Run(*this, {{2, 3}}, AppendStates);
      all.Run(*this, {{0, 64}, {1, 200}, {2, 261}}, InChunks(1));
      EXPECT_LE(all.WorstError(), kChunkBudget) << family.name << (even ? "" : " apart");
    }
  }
}

// As in a long prompt, of which few snapshots are kept. Some come as products take them, some need norms first.
TEST_F(CudaStateChunkTest, BlocksThatAreNotKeptAreNotMissed) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const bool normalise : {false, true}) {
      for (const auto& [keys, values] : std::vector<std::pair<int, int>>{{128, 64}, {64, 128}, {40, 24}}) {
        StateSequences all =
            Sequences(family, keys, values, 420, 2, {.even = !normalise, .normalise = normalise, .sparse = true});
        all.Run(*this, {{0, 320}, {1, 30}}, InChunks());
        all.Run(*this, {{0, 1}, {1, 300}}, InChunks(2));
        for (int t = 0; t < 3; ++t) all.Run(*this, {{0, 1}, {1, 1}}, AppendStates);
        EXPECT_LE(all.WorstError(), kChunkBudget) << family.name << " " << keys << " x " << values;
      }
    }
  }
}

// S midway is missing where a prompt ends in a block's second half; a block's old owner may have left the word for it.
TEST_F(CudaStateChunkTest, WhatAPromptLeavesOfABlockBecomesSMidway) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const auto& [keys, values] : std::vector<std::pair<int, int>>{{128, 128}, {64, 32}, {128, 64}}) {
      StateSequences all = Sequences(family, keys, values, 140, 5, {.used = true});
      all.Run(*this, {{0, 33}, {1, 40}, {2, 63}, {3, 64}, {4, 97}}, InChunks());
      for (int t = 0; t < 40; ++t) all.Run(*this, {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}}, AppendStates);
      EXPECT_LE(all.WorstError(), kChunkBudget) << family.name << " " << keys << " x " << values;
    }
  }
}

// Thread blocks share a long prompt's chunks where there are few heads: the same bits, and the same in its blocks.
TEST_F(CudaStateChunkTest, HowManyThreadBlocksShareAPromptChangesNoBit) {
  constexpr int kRows = 900, kBack = 640, kDecoded = 40;
  const int many = device().info().multiprocessors / 2 + 1;  // heads: each has a thread block to itself
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    const auto outputs = [&](int sequences) {
      StateSequences all = Sequences(family, 64, 64, kRows + kDecoded, sequences, {.heads = 1});
      const auto run = [&](int rows, auto op) {
        std::vector<StateSequences::Part> parts;
        for (int i = 0; i < sequences; ++i) parts.push_back({i, rows});
        all.Run(*this, parts, op);
      };
      run(37, AppendStates);
      run(kRows - 37, InChunks());
      for (int i = 0; i < sequences; ++i) all.Back(i, kBack);
      run(kBack, InChunks());
      for (int t = 0; t < kDecoded; ++t) run(1, AppendStates);
      EXPECT_LE(all.WorstError(), kChunkBudget) << family.name;
      return all.done(0);
    };
    EXPECT_EQ(outputs(1), outputs(many)) << family.name;
  }
}

// As payloads lie: tokens of the block from before the prompt, and after its end.
TEST_F(CudaStateChunkTest, PromptsGoOnInTheMiddleOfABlock) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    StateSequences all = Sequences(family, 128, 96, 400, 2, {.heads = 3, .skip = true});
    all.Run(*this, {{0, 20}, {1, 90}}, AppendStates);
    all.Run(*this, {{0, 30}, {1, 200}}, InChunks());
    all.Run(*this, {{0, 300}, {1, 29}}, InChunks(3));
    all.Run(*this, {{0, 1}, {1, 1}}, AppendStates);
    all.Run(*this, {{0, 40}, {1, 80}}, InChunks());
    EXPECT_LE(all.WorstError(), kChunkBudget) << family.name;
  }
}

TEST_F(CudaStateChunkTest, PayloadsMayLieAtAnyMultipleOfFourBytes) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const int shift : {4, 8, 12}) {
      const int taps = shift == 8 ? 4 : 0;
      const bool normalise = taps > 0 && family.update == StateUpdate::kDelta;
      StateSequences all =
          Sequences(family, 128, 64, 240, 2, {.conv_width = taps, .normalise = normalise, .shift = shift});
      all.Run(*this, {{0, 20}, {1, 130}}, InChunks());
      all.Run(*this, {{0, 3}, {1, 1}}, AppendStates);
      all.Run(*this, {{0, 150}, {1, 100}}, InChunks());
      all.Run(*this, {{0, 1}, {1, 1}}, AppendStates);
      EXPECT_LE(all.WorstError(), kChunkBudget) << family.name << " behind " << shift << " bytes";
    }
  }
}

TEST_F(CudaStateChunkTest, StrongDecaysLeaveNothingBehind) {
  const Family family{"resets", DecayForm::kVector, StateUpdate::kDelta, 1e-3f, 120.0f, true, 0};
  StateSequences all = Sequences(family, 128, 64, 200, 1);
  all.Run(*this, {{0, 200}}, InChunks());
  EXPECT_LE(all.WorstError(), kChunkBudget);
}

TEST_F(CudaStateChunkTest, TooLittleWorkspaceIsSaid) {
  StateSequences all = Sequences(kFamilies[0], 32, 32, 64, 1);
  all.Run(*this, {{0, 20}}, InChunks());
  EXPECT_TRUE(absl::IsResourceExhausted(AppendStatesInChunks(stream(), all.launch(), {})));
}

TEST_F(CudaStateChunkTest, DoNotLookAtWhetherTheirStepHasFailed) {
  StateSequences all = Sequences(kFamilies[0], 32, 32, 64, 1);
  all.Run(*this, {{0, 20}}, InChunks());
  StateLaunch launch = all.launch();
  launch.failed = reinterpret_cast<const uint64_t*>(launch.query);
  EXPECT_TRUE(absl::IsInvalidArgument(AppendStatesInChunks(stream(), launch, {})));
}

TEST_F(CudaStateTest, AStateInBf16LosesWhatItsRoundingLoses) {
  StateSequences all = Sequences(kFamilies[4], 128, 128, 330, 1, {.state = DType::kBF16});
  all.Run(*this, {{0, 130}}, AppendStates);
  for (int t = 130; t < 330; t += 2) all.Run(*this, {{0, 2}}, AppendStates);
  EXPECT_LE(all.WorstError(), 2 * kBudget);
}

TEST_F(CudaStateTest, WrongShapesAreRefusedByName) {
  StateSequences all = Sequences(kFamilies[0], 32, 32, 64, 1);
  all.Run(*this, {{0, 1}}, AppendStates);
  StateLaunch launch = all.launch();
  launch.conv_width = 9;
  EXPECT_TRUE(absl::IsInvalidArgument(AppendStates(stream(), launch)));
  launch = all.launch();
  launch.gates = 7;
  EXPECT_TRUE(absl::IsInvalidArgument(AppendStates(stream(), launch)));
  launch = all.launch();
  launch.blocks = nullptr;
  EXPECT_TRUE(absl::IsInvalidArgument(AppendStates(stream(), launch)));
}

TEST(StateLayout, NeedsNoMorePiecesThanTheFormOfTheCpu) {
  for (const Family& family : kFamilies) {
    if (!RunsHere(family)) continue;
    for (const int dim : {8, 20, 64, 100, 128, 256}) {
      for (const size_t piece_bytes : {2048, 2112, 4096, 9984, 32768}) {
        LinearStateShape shape{dim, dim, family.decay, family.update, DType::kF32};
        shape.history_channels = 3 * dim;
        shape.history = DType::kBF16;
        const int on_cpu = LinearStateLayout(shape).pieces(piece_bytes);
        if (on_cpu == 0) continue;
        const int pieces = LayOutState(shape, piece_bytes).pieces;
        EXPECT_GE(pieces, 1);
        EXPECT_LE(pieces, on_cpu) << family.name << " " << dim << " in " << piece_bytes;
      }
    }
  }
}

TEST(StateLayout, WhatComesFromTheCpuHasNoStateMidway) {
  const LinearStateShape shape{64, 32, DecayForm::kScalar, StateUpdate::kAdd, DType::kF32};
  const size_t bytes = LinearStateLayout(shape).bytes();
  const StateSection midway = LayOutState(shape, bytes).midway;
  std::vector<std::byte> from(bytes), to(bytes, std::byte{0xff});
  std::byte *const from_piece = from.data(), *const to_piece = to.data();
  StateFromCpu(shape, 40, &from_piece, &to_piece, bytes);
  ASSERT_EQ(midway.rows, 1);
  ASSERT_EQ(midway.piece, 0);
  EXPECT_EQ(to[midway.offset], std::byte{0});
}

TEST(StateLayout, ABlockGoesToTheCpuFormAndBack) {
  for (const DecayForm decay : {DecayForm::kScalar, DecayForm::kVector}) {
    LinearStateShape shape{40, 24, decay, StateUpdate::kDelta, DType::kF32, 10, DType::kBF16};
    const size_t piece_bytes = 1024;
    const int cpu_pieces = LinearStateLayout(shape).pieces(piece_bytes);
    const int pieces = LayOutState(shape, piece_bytes).pieces;
    std::vector<std::byte> memory(pieces * piece_bytes), there(cpu_pieces * piece_bytes), back(memory.size());
    const auto point = [&](std::vector<std::byte>& bytes) {
      std::vector<std::byte*> out;
      for (size_t at = 0; at < bytes.size(); at += piece_bytes) out.push_back(bytes.data() + at);
      return out;
    };
    // Logs of decays that exp and log give back; everything else any bf16.
    std::mt19937 random(5);
    const auto random_bits = [&] { return ToBF16(std::uniform_real_distribution<float>(-2, -0.01f)(random)).bits; };
    for (size_t at = 0; at + 2 <= memory.size(); at += 2) {
      const uint16_t bits = random_bits();
      std::memcpy(memory.data() + at, &bits, 2);
    }
    StateToCpu(shape, 64, point(memory).data(), point(there).data(), piece_bytes);
    StateFromCpu(shape, 64, point(there).data(), point(back).data(), piece_bytes);
    std::vector<std::byte> again(there.size());
    StateToCpu(shape, 64, point(back).data(), point(again).data(), piece_bytes);
    int different = 0;
    for (size_t i = 0; i + 4 <= there.size(); i += 4) {
      float a, b;
      std::memcpy(&a, there.data() + i, 4);
      std::memcpy(&b, again.data() + i, 4);
      different += !(std::abs(a - b) <= 1e-5f * std::abs(a));
    }
    EXPECT_EQ(different, 0);
  }
}

}  // namespace
}  // namespace dovetail::kernels::cuda
