// The kernel for many rows (kernels/cuda/attention/prefill_kernel.cuh) against the reference in double.

#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "tests/kernels_cuda/attention_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using testing::Case;
using testing::SequenceSpec;
using Kernel = CudaAttention::Kernel;

class CudaPrefillTest : public testing::AttentionTest {
 protected:
  void SetUp() override {
    AttentionTest::SetUp();
    if (IsSkipped()) return;
    const CudaKvLayout layout{128, 128, KvType::kBF16};
    const DeviceLimits limits = device().limits();
    if (!device().library()->prefill_takes(&layout, WireType::kBF16, 0, &limits))
      GTEST_SKIP() << "needs a GPU with wgmma, and code for it";
  }

  // All by the kernel for many rows.
  void CheckMany(Case c, const std::vector<SequenceSpec>& specs, uint64_t seed) {
    c.kernel = Kernel::kForManyRows;
    Check(c, specs, seed);
    EXPECT_EQ(spans_, 0u);
    EXPECT_GT(tiles_, 0u);
  }

  static Case CaseOf(int dim, KvType type, int group, int kv_heads) {
    Case c;
    c.group = group, c.kv_heads = kv_heads;
    c.key_dim = c.value_dim = dim;
    c.type = type;
    c.wire = type == KvType::kF16 ? WireType::kF16 : WireType::kBF16;
    return c;
  }
};

TEST_F(CudaPrefillTest, OneRowOfOneToken) { CheckMany(CaseOf(128, KvType::kBF16, 1, 1), {{.q_rows = 1}}, 1); }

TEST_F(CudaPrefillTest, EveryHeadSizeAndType) {
  for (const int dim : {64, 80, 96, 128, 256}) {
    for (const KvType type : {KvType::kBF16, KvType::kF16, KvType::kE4M3}) {
      CheckMany(CaseOf(dim, type, 2, 2),
                {{.q_rows = 128},
                 {.q_rows = 130, .first_position = 100},
                 {.q_rows = 64, .first_position = 64},
                 {.q_rows = 1, .first_position = 200},
                 {.q_rows = 65, .first_position = 63}},
                100 + dim);
    }
  }
}

TEST_F(CudaPrefillTest, KeysAndValuesOf8BitsWithScales) {
  for (const WireType wire : {WireType::kBF16, WireType::kF16}) {
    Case c = CaseOf(128, KvType::kE4M3, 4, 2);
    c.wire = wire;
    c.key_scale = 0.5f, c.value_scale = 2;
    c.checks_every = 9;
    CheckMany(c, {{.q_rows = 300, .first_position = 1700, .sinks = true}, {.q_rows = 77}}, 150);
  }
}

TEST_F(CudaPrefillTest, EveryGroupSize) {
  for (const int group : {1, 2, 3, 4, 5, 7, 8, 16})
    CheckMany(CaseOf(64, KvType::kBF16, group, 2), {{.q_rows = 70}, {.q_rows = 33, .first_position = 150}},
              200 + group);
}

TEST_F(CudaPrefillTest, RandomRowsAgainstRandomEarlierTokens) {
  const uint64_t seed = 4711;
  std::mt19937_64 random(seed);
  const int dims[] = {64, 80, 96, 128, 256}, groups[] = {1, 2, 4, 5, 7, 8};
  for (int round = 0; round < 20; ++round) {
    const KvType types[] = {KvType::kBF16, KvType::kF16, KvType::kE4M3};
    Case c = CaseOf(dims[round % 5], types[round % 3], groups[random() % 6], 1 + static_cast<int>(random() % 3));
    if (random() % 3 == 0) c.window = 1 + static_cast<int>(random() % 700);
    c.checks_every = 29;
    std::vector<SequenceSpec> specs;
    for (uint64_t count = 1 + random() % 5; count > 0; --count) {
      SequenceSpec spec;
      spec.q_rows = 1 + static_cast<int>(random() % 300);
      spec.first_position = random() % 4 == 0 ? 0 : static_cast<int64_t>(random() % 5000);
      spec.sinks = random() % 4 == 0;
      specs.push_back(spec);
    }
    CheckMany(c, specs, seed + round);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaPrefillTest, WindowsAndSinksAcrossTheCut) {
  for (const int window : {1, 5, 63, 64, 65, 128, 200, 1000}) {
    Case c = CaseOf(128, KvType::kBF16, 4, 2);
    c.window = window;
    c.checks_every = 5;
    CheckMany(c,
              {{.q_rows = 150, .first_position = 431, .sinks = true},
               {.q_rows = 90, .sinks = true},
               {.q_rows = 129, .first_position = 3}},
              300 + window);
  }
}

TEST_F(CudaPrefillTest, ShardsReturnPartials) {
  CheckMany(CaseOf(64, KvType::kBF16, 4, 2),
            {{.q_rows = 70, .first_position = 1000, .token_begin = 128, .token_end = 640, .partial = true},
             {.q_rows = 40, .first_position = 500, .token_begin = 448, .partial = true},
             {.q_rows = 35, .first_position = 100},
             {.q_rows = 150, .first_position = 100, .token_begin = 128, .partial = true}},
            400);
  Case windowed = CaseOf(128, KvType::kF16, 1, 3);
  windowed.window = 100;
  CheckMany(windowed,
            {{.q_rows = 200, .first_position = 500, .token_begin = 64, .token_end = 512, .partial = true},
             {.q_rows = 9, .first_position = 508, .token_begin = 192, .token_end = 448, .partial = true}},
            401);
}

TEST_F(CudaPrefillTest, ManyTilesOfAThreadBlock) {
  Case c = CaseOf(128, KvType::kBF16, 8, 8);
  c.checks_every = 97;
  CheckMany(c, {{.q_rows = 600}, {.q_rows = 300, .first_position = 77}, {.q_rows = 5, .first_position = 900}}, 500);
}

TEST_F(CudaPrefillTest, FewRowsAndManyShareAStep) {
  Case c = CaseOf(128, KvType::kBF16, 4, 2);
  c.checks_every = 7;
  Check(c,
        {{.first_position = 700},
         {.q_rows = 300, .first_position = 40},
         {.q_rows = 2, .first_position = 5},
         {.q_rows = 80}},
        600);
  EXPECT_GT(spans_, 0u);
  EXPECT_GT(tiles_, 0u);
}

// One tile for a whole GPU, and a few.
TEST_F(CudaPrefillTest, AFewRowsOfALongContextAreDivided) {
  Case c = CaseOf(64, KvType::kBF16, 4, 1);
  c.checks_every = 50;
  Check(c, {{.q_rows = 20, .first_position = 9000}}, 700);
  EXPECT_EQ(spans_, 0u);
  EXPECT_GT(pieces_, 1);
  for (const int dim : {80, 128, 256}) {
    for (const KvType type : {KvType::kBF16, KvType::kF16, KvType::kE4M3}) {
      Case more = CaseOf(dim, type, 4, 1);
      more.checks_every = 11;
      CheckMany(more, {{.q_rows = 37, .first_position = 3000 + dim, .sinks = true}}, 700 + dim);
      EXPECT_GT(pieces_, 1) << "dims " << dim;
    }
  }
}

// Rows of a tile that is divided begin and end in different blocks, and see nothing of some that others see.
TEST_F(CudaPrefillTest, DividedTilesHaveBlocksThatSomeRowsDoNotSee) {
  for (const int group : {1, 4}) {
    for (const int window : {0, 2000}) {
      Case c = CaseOf(128, KvType::kBF16, group, 1);
      c.window = window;
      c.checks_every = 9;
      for (const int more : {0, 40, 100})
        CheckMany(c, {{.q_rows = 128 / group, .first_position = 3000 + more, .sinks = window > 0}}, 750 + more);
      EXPECT_GT(pieces_, 1) << "group " << group << " window " << window;
    }
  }
}

TEST_F(CudaPrefillTest, DividedShardsReturnPartials) {
  CheckMany(CaseOf(64, KvType::kBF16, 4, 1),
            {{.q_rows = 30, .first_position = 4000, .token_begin = 128, .token_end = 3200, .partial = true}}, 760);
  EXPECT_GT(pieces_, 1);
}

TEST_F(CudaPrefillTest, DividedTilesAndWholeOnesAndDecodesShareAStep) {
  Case c = CaseOf(128, KvType::kBF16, 4, 1);
  c.checks_every = 13;
  Check(c,
        {{.first_position = 70},
         {.q_rows = 32, .first_position = 4000},
         {.q_rows = 40, .first_position = 10},
         {.first_position = 600}},
        770);
  EXPECT_GT(spans_, 0u);
  EXPECT_GT(pieces_, 1);
  EXPECT_GT(tiles_, static_cast<size_t>(pieces_));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
