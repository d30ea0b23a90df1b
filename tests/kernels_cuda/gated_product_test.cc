#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/reference/activation.h"
#include "kernels/reference/gemm.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/cuda_fixture.h"

// The first half of a gated MLP as one kernel (gated_product.h), on GPUs of compute capability 9.

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::FromWireBytes;
using testing::SpreadRows;
using testing::ToWireBytes;

class GatedProductTest : public testing::CudaTest {
 protected:
  struct Product {
    int m = 256, n = 7168, k = 64;
    bool bf16 = true, gelu = false;
    int x_extra = 0, w_extra = 0, y_extra = 0;  // elements between rows
  };

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const DeviceLimits limits = device().limits();
    if (limits.major != 9) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }

  static GatedProductCall CallOf(const Product& p, Buffer& x, Buffer& w, Buffer& y) {
    return {.x = x.data(),
            .w = w.data(),
            .y = y.data(),
            .m = p.m,
            .n = p.n,
            .k = p.k,
            .x_stride = p.k + p.x_extra,
            .w_stride = p.k + p.w_extra,
            .y_stride = p.n + p.y_extra,
            .type = p.bf16 ? GemmType::kBF16 : GemmType::kF16,
            .gelu = p.gelu};
  }

  void Check(const Product& p) {
    SCOPED_TRACE(absl::StrCat(p.m, " x ", p.n, " x ", p.k, p.bf16 ? " bf16" : " f16", p.gelu ? " gelu" : ""));
    const WireType wire = p.bf16 ? WireType::kBF16 : WireType::kF16;
    const auto rounded = [&](std::vector<float> v) { return FromWireBytes(wire, ToWireBytes(wire, v)); };
    const auto x = rounded(RandomFloats(static_cast<size_t>(p.m) * p.k, 1)),
               w = rounded(RandomFloats(static_cast<size_t>(2) * p.n * p.k, 2, -0.5, 0.5));
    const auto dx = Upload(ToWireBytes(wire, SpreadRows(x, p.m, p.k, p.x_extra))),
               dw = Upload(ToWireBytes(wire, SpreadRows(w, 2 * p.n, p.k, p.w_extra)));
    const auto dy = Empty(static_cast<size_t>(p.m) * (p.n + p.y_extra) * 2);
    const auto done = GatedProduct(stream(), CallOf(p, *dx, *dw, *dy));
    ASSERT_TRUE(done.ok()) << done.status();
    ASSERT_TRUE(*done) << "there is no kernel for this shape";
    const auto got = FromWireBytes(wire, Download<std::byte>(*dy));
    const auto want = reference::Gemm(x, w, p.m, 2 * p.n, p.k);
    const double rounding = p.bf16 ? 4e-3 : 5e-4;
    for (int row = 0; row < p.m; ++row) {
      for (int i = 0; i < p.n; ++i) {
        const double gate = want[static_cast<size_t>(row) * 2 * p.n + i],
                     up = want[static_cast<size_t>(row) * 2 * p.n + p.n + i];
        const double target = p.gelu ? reference::GeluMul(gate, up) : reference::SiluMul(gate, up);
        const float mine = got[static_cast<size_t>(row) * (p.n + p.y_extra) + i];
        ASSERT_LE(std::abs(mine - target), std::abs(target) * rounding + 1e-4) << "row " << row << " column " << i;
      }
      for (int i = p.n; i < p.n + p.y_extra; ++i)
        ASSERT_TRUE(std::isnan(got[static_cast<size_t>(row) * (p.n + p.y_extra) + i])) << "wrote between rows";
    }
  }
};

TEST_F(GatedProductTest, AgreesWithTheReferenceForOneAndTwoTilesOfRows) {
  for (const int m : {65, 96, 127, 128, 129, 192, 255, 256}) Check({.m = m, .n = m > 128 ? 7168 : 14336, .k = 128});
}

// More steps than the ring has stages, steps that are not whole, two rounds, columns that fill no tile.
TEST_F(GatedProductTest, RaggedShapes) {
  for (const auto& [m, n, k] : {std::tuple{256, 7000, 392},
                                {200, 14336, 136},
                                {128, 13496, 72},
                                {72, 28000, 200},
                                {256, 6144, 640},
                                {130, 6144, 1000}})
    Check({.m = m, .n = n, .k = k});
}

TEST_F(GatedProductTest, TypesActivationsAndRowsThatLieApart) {
  Check({.m = 256, .n = 7168, .k = 256, .bf16 = false});
  Check({.m = 256, .n = 7168, .k = 256, .gelu = true});
  Check({.m = 100, .n = 12288, .k = 192, .bf16 = false, .gelu = true});
  Check({.m = 150, .n = 7160, .k = 200, .x_extra = 8, .w_extra = 24, .y_extra = 16});
}

TEST_F(GatedProductTest, GivesTheSameBitsEveryTime) {
  const Product p{.m = 256, .n = 14336, .k = 512};
  const auto x = Upload(ToWireBytes(WireType::kBF16, RandomFloats(static_cast<size_t>(p.m) * p.k, 3))),
             w = Upload(ToWireBytes(WireType::kBF16, RandomFloats(static_cast<size_t>(2) * p.n * p.k, 4)));
  std::vector<std::byte> first;
  for (int run = 0; run < 8; ++run) {
    const auto y = Empty(static_cast<size_t>(p.m) * p.n * 2);
    const auto done = GatedProduct(stream(), CallOf(p, *x, *w, *y));
    ASSERT_TRUE(done.ok() && *done) << done.status();
    const auto got = Download<std::byte>(*y);
    if (run == 0) first = got;
    ASSERT_TRUE(got == first) << "run " << run;
  }
}

// Enqueues nothing, so that the caller can do otherwise.
TEST_F(GatedProductTest, LeavesOtherShapesAlone) {
  const auto x = Empty(300 * 256 * 2), w = Empty(2 * 7168 * 256 * 2), y = Empty(300 * 7168 * 2);
  const Product most{.m = 256, .n = 7168, .k = 256};
  for (const Product& p : {Product{.m = 64, .n = 7168, .k = 256}, Product{.m = 257, .n = 7168, .k = 256},
                           Product{.m = 256, .n = 512, .k = 256}, Product{.m = 256, .n = 7168, .k = 56},
                           Product{.m = 256, .n = 7164, .k = 256}}) {
    const auto done = GatedProduct(stream(), CallOf(p, *x, *w, *y));
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_FALSE(*done) << p.m << " x " << p.n << " x " << p.k;
  }
  GatedProductCall odd = CallOf(most, *x, *w, *y);
  odd.x = x->data() + 2;
  EXPECT_FALSE(*GatedProduct(stream(), odd));
  const auto left = Download<std::byte>(*y);
  EXPECT_TRUE(std::all_of(left.begin(), left.end(), [](std::byte b) { return b == std::byte{0xff}; }));
}

TEST_F(GatedProductTest, RefusesWhatIsWrong) {
  const auto x = Empty(256 * 64 * 2);
  GatedProductCall call{.x = x->data(),
                        .w = nullptr,
                        .y = x->data(),
                        .m = 256,
                        .n = 7168,
                        .k = 64,
                        .x_stride = 64,
                        .w_stride = 64,
                        .y_stride = 7168,
                        .type = GemmType::kBF16,
                        .gelu = 0};
  EXPECT_EQ(GatedProduct(stream(), call).status().code(), absl::StatusCode::kInvalidArgument);
  call.w = x->data();
  call.w_stride = 32;
  EXPECT_EQ(GatedProduct(stream(), call).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
