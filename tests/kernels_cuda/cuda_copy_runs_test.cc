#include <cstring>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/exchange/cuda_exchange.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

struct Shape {
  int rows, runs, run_bytes, from_run_step, to_run_step, from_row_step, to_row_step, blocks;
};

class CudaCopyRunsTest : public testing::CudaTest {};

TEST_F(CudaCopyRunsTest, CopiesEveryRunAndLeavesWhatLiesBetweenAlone) {
  std::mt19937 random(1);
  for (const Shape& s : {Shape{1, 1, 16, 0, 0, 0, 0, 1}, Shape{70, 3, 144, 160, 160, 3 * 3 * 160, 480, 4},
                         Shape{300, 4, 48, 64, 48, 1024, 192, 1}, Shape{5, 2, 4096, 8192, 4096, 16384, 8208, 48}}) {
    const size_t from_bytes = (s.rows - 1) * s.from_row_step + (s.runs - 1) * s.from_run_step + s.run_bytes;
    const size_t to_bytes = (s.rows - 1) * s.to_row_step + (s.runs - 1) * s.to_run_step + s.run_bytes;
    std::vector<uint8_t> source(from_bytes), expected(to_bytes + 32, 0xff);
    for (uint8_t& x : source) x = static_cast<uint8_t>(random());
    for (int row = 0; row < s.rows; ++row)
      for (int run = 0; run < s.runs; ++run)
        std::memcpy(expected.data() + 16 + row * s.to_row_step + run * s.to_run_step,
                    source.data() + row * s.from_row_step + run * s.from_run_step, s.run_bytes);
    const auto from = Upload(source), to = Empty(to_bytes + 32);
    CopyRunsLaunch copy;
    copy.from = from->data();
    copy.to = to->data() + 16;
    copy.from_row_step = s.from_row_step;
    copy.to_row_step = s.to_row_step;
    copy.from_run_step = s.from_run_step;
    copy.to_run_step = s.to_run_step;
    copy.run_bytes = s.run_bytes;
    copy.runs = s.runs;
    copy.rows = s.rows;
    copy.blocks = s.blocks;
    ASSERT_TRUE(CopyRuns(stream(), copy).ok());
    EXPECT_EQ(Download<uint8_t>(*to), expected) << s.rows << " rows of " << s.runs << " runs of " << s.run_bytes;
  }
}

TEST_F(CudaCopyRunsTest, RefusesOddSizesAndNullPointersBeforeAnythingRuns) {
  const auto memory = Empty(4096);
  CopyRunsLaunch good;
  good.from = memory->data();
  good.to = memory->data() + 2048;
  good.run_bytes = 32;
  good.rows = 1;
  ASSERT_TRUE(CopyRuns(stream(), good).ok());
  const auto refused = [&](auto change) {
    CopyRunsLaunch copy = good;
    change(copy);
    return absl::IsInvalidArgument(CopyRuns(stream(), copy));
  };
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.from = nullptr; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.to = static_cast<std::byte*>(copy.to) + 8; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.run_bytes = 24; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.from_row_step = -16; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.to_run_step = 40; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.runs = 0; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.blocks = 0; }));
  EXPECT_TRUE(refused([](CopyRunsLaunch& copy) { copy.run_bytes = 1 << 30, copy.rows = 32; }));
  CopyRunsLaunch none = good;
  none.rows = 0;
  none.from = nullptr;
  EXPECT_TRUE(CopyRuns(stream(), none).ok());
}

}  // namespace
}  // namespace dovetail::kernels::cuda
