#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/rows/row_ops.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr uint16_t kUntouched = 0xffff;

struct Shape {
  int sequences, length, heads, dim, padded, head_step;
  bool by_token, with_q;
};

class CudaPackHeadsTest : public testing::CudaTest {
 protected:
  struct Packed {
    std::vector<uint16_t> source, q, blocks;
  };
  static constexpr int kSpare = 16;  // elements behind each row

  static PackHeadsLaunch LaunchOf(const Shape& s) {
    PackHeadsLaunch pack;
    pack.layout = {s.padded, s.padded, KvType::kBF16};
    pack.row_step = 3 * s.heads * s.head_step + kSpare;
    pack.block_step = pack.layout.bytes() + 256;
    pack.head_step = s.head_step;
    pack.dim = s.dim;
    pack.heads = s.heads;
    pack.sequences = s.sequences;
    pack.length = s.length;
    pack.by_token = s.by_token ? 1 : 0;
    return pack;
  }

  Packed Pack(const Shape& s, unsigned seed) {
    PackHeadsLaunch pack = LaunchOf(s);
    const int64_t rows = int64_t{s.sequences} * s.length, segments = (s.length + 63) / 64;
    std::mt19937 random(seed);
    Packed packed;
    packed.source.resize(rows * pack.row_step);
    for (uint16_t& x : packed.source) x = static_cast<uint16_t>(random() % 0xff00);
    const auto source = Upload(packed.source);
    const auto q = Empty(rows * s.heads * s.padded * 2);
    const auto blocks = Empty(s.sequences * s.heads * segments * pack.block_step);
    pack.source = source->data();
    pack.blocks = blocks->data();
    pack.q = s.with_q ? q->data() : nullptr;
    EXPECT_TRUE(PackHeads(stream(), pack).ok());
    packed.q = Download<uint16_t>(*q);
    packed.blocks = Download<uint16_t>(*blocks);
    return packed;
  }
};

TEST_F(CudaPackHeadsTest, PutsEveryNumberWhereTheLayoutSaysAndZerosBehindIt) {
  for (const Shape& s : {Shape{3, 70, 2, 72, 80, 80, false, false}, Shape{3, 70, 2, 72, 80, 72, false, true},
                         Shape{70, 5, 3, 64, 64, 64, true, false}, Shape{67, 130, 1, 24, 24, 24, true, true},
                         Shape{2, 64, 2, 120, 128, 128, false, true}}) {
    const Packed packed = Pack(s, 1);
    const PackHeadsLaunch pack = LaunchOf(s);
    const int64_t segments = (s.length + 63) / 64;
    std::vector<uint16_t> q(packed.q.size(), kUntouched), blocks(packed.blocks.size(), kUntouched);
    for (int64_t i = 0; i < s.sequences; ++i)
      for (int64_t token = 0; token < s.length; ++token)
        for (int64_t head = 0; head < s.heads; ++head)
          for (int d = 0; d < s.padded; ++d) {
            const int64_t row = s.by_token ? token * s.sequences + i : i * s.length + token;
            const auto value = [&](int tensor) -> uint16_t {
              if (d >= s.dim) return 0;
              return packed.source[row * pack.row_step + (tensor * s.heads + head) * s.head_step + d];
            };
            if (s.with_q) q[(row * s.heads + head) * s.padded + d] = value(0);
            const int64_t block = ((i * s.heads + head) * segments + token / 64) * pack.block_step;
            const int at = static_cast<int>(token % 64);
            blocks[(block + pack.layout.key_offset(at, d)) / 2] = value(1);
            blocks[(block + pack.layout.value_offset(at, d)) / 2] = value(2);
          }
    EXPECT_EQ(packed.q, q) << s.dim << " padded to " << s.padded;
    EXPECT_EQ(packed.blocks, blocks) << s.dim << " padded to " << s.padded;
  }
}

TEST_F(CudaPackHeadsTest, RefusesOddSizesAndNullPointersBeforeAnythingRuns) {
  const auto memory = Empty(1 << 16);
  PackHeadsLaunch good = LaunchOf({1, 3, 1, 72, 80, 80, false, false});
  good.source = memory->data();
  good.blocks = memory->data() + (1 << 15);
  ASSERT_TRUE(PackHeads(stream(), good).ok());
  const auto refused = [&](auto change) {
    PackHeadsLaunch pack = good;
    change(pack);
    return absl::IsInvalidArgument(PackHeads(stream(), pack));
  };
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.source = nullptr; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.blocks = static_cast<std::byte*>(pack.blocks) + 2; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.dim = 88; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.dim = 71; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.row_step = 241; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.block_step = 256; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.heads = 0; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.layout.type = KvType::kE4M3; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.layout.value_dim = 64; }));
  EXPECT_TRUE(refused([](PackHeadsLaunch& pack) { pack.length = 1 << 30, pack.sequences = 4; }));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
