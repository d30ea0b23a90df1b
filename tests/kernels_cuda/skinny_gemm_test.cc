#include <cmath>
#include <limits>
#include <tuple>

#include "gtest/gtest.h"
#include "kernels/reference/gemm.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/gemm_fixture.h"

// Products of at most 16 rows, which on a GPU of compute capability 9 are a kernel of ours (skinny_gemm.h).

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::FromWireBytes;
using testing::SpreadRows;
using testing::ToWireBytes;

class SkinnyGemmTest : public testing::GemmTest {
 protected:
  struct Product {
    int m = 1, n = 64, k = 64;
    bool bf16 = true, f32 = false, accumulate = false, bias = false;
    int x_extra = 0, w_extra = 0, y_extra = 0;  // elements between rows
  };

  std::vector<float> Run(const Product& p, const std::vector<float>& x, const std::vector<float>& w,
                         const std::vector<float>& y0, const std::vector<float>& bias) {
    const WireType wire = p.bf16 ? WireType::kBF16 : WireType::kF16, y_type = p.f32 ? WireType::kF32 : wire;
    const auto dx = Upload(ToWireBytes(wire, SpreadRows(x, p.m, p.k, p.x_extra))),
               dw = Upload(ToWireBytes(wire, SpreadRows(w, p.n, p.k, p.w_extra))),
               dy = Upload(ToWireBytes(y_type, SpreadRows(y0, p.m, p.n, p.y_extra))),
               dbias = Upload(ToWireBytes(y_type, bias));
    const absl::Status status = gemm_->Run(stream(), {.x = dx->data(),
                                                      .w = dw->data(),
                                                      .y = dy->data(),
                                                      .bias = p.bias ? dbias->data() : nullptr,
                                                      .m = p.m,
                                                      .n = p.n,
                                                      .k = p.k,
                                                      .x_stride = p.k + p.x_extra,
                                                      .w_stride = p.k + p.w_extra,
                                                      .y_stride = p.n + p.y_extra,
                                                      .type = p.bf16 ? GemmType::kBF16 : GemmType::kF16,
                                                      .y_is_f32 = p.f32,
                                                      .accumulate = p.accumulate});
    EXPECT_TRUE(status.ok()) << status;
    return FromWireBytes(y_type, Download<std::byte>(*dy));
  }

  void Check(const Product& p) {
    SCOPED_TRACE(absl::StrCat(p.m, " x ", p.n, " x ", p.k, p.bf16 ? " bf16" : " f16", p.f32 ? " to f32" : "",
                              p.accumulate ? ", added" : "", p.bias ? ", bias" : ""));
    const WireType wire = p.bf16 ? WireType::kBF16 : WireType::kF16, y_type = p.f32 ? WireType::kF32 : wire;
    const auto rounded = [](WireType type, std::vector<float> v) { return FromWireBytes(type, ToWireBytes(type, v)); };
    const auto x = rounded(wire, RandomFloats(static_cast<size_t>(p.m) * p.k, 1)),
               w = rounded(wire, RandomFloats(static_cast<size_t>(p.n) * p.k, 2)),
               y0 = rounded(y_type, RandomFloats(static_cast<size_t>(p.m) * p.n, 3)),
               bias = rounded(y_type, RandomFloats(p.n, 4));
    const auto got = Run(p, x, w, y0, bias);
    const auto want = reference::Gemm(x, w, p.m, p.n, p.k);
    const double rounding = p.f32 ? 6e-8 : p.bf16 ? 4e-3 : 5e-4;
    for (int row = 0; row < p.m; ++row) {
      for (int i = 0; i < p.n; ++i) {
        const int at = row * p.n + i;
        const double target = want[at] + (p.accumulate ? y0[at] : 0.0f) + (p.bias ? bias[i] : 0.0f);
        const double part = std::abs(want[at]) + std::abs(target);
        ASSERT_LE(std::abs(got[row * (p.n + p.y_extra) + i] - target), part * rounding + 2e-5 * std::sqrt(p.k))
            << "row " << row << " column " << i << ": " << got[row * (p.n + p.y_extra) + i] << " for " << target;
      }
      for (int i = p.n; i < p.n + p.y_extra; ++i)
        ASSERT_TRUE(std::isnan(got[row * (p.n + p.y_extra) + i])) << "wrote between rows";
    }
  }
};

TEST_F(SkinnyGemmTest, AgreeWithTheReferenceForEveryNumberOfRows) {
  for (int m = 1; m <= 17; ++m) Check({.m = m, .n = 80, .k = 640});
}

TEST_F(SkinnyGemmTest, RaggedShapes) {
  for (const auto& [n, k] : {std::pair{1, 64}, {15, 128}, {17, 512}, {33, 576}, {2500, 1024}, {40, 5120}}) {
    for (const int m : {1, 7, 16}) {
      Check({.m = m, .n = n, .k = k});
      Check({.m = m, .n = n, .k = k, .bf16 = false});
    }
  }
}

// Not a multiple of 64, or too long for 16 rows to lie in shared memory: whichever kernel computes it, it is the same
// product.
TEST_F(SkinnyGemmTest, ShapesThatTheKernelLeavesToCublasLt) {
  Check({.m = 3, .n = 48, .k = 200});
  Check({.m = 16, .n = 64, .k = 14336});
  Check({.m = 4, .n = 64, .k = 14336});
}

TEST_F(SkinnyGemmTest, BiasSumsAndOutputsInFloat) {
  for (const int m : {1, 9}) {
    for (const bool f32 : {false, true}) {
      Check({.m = m, .n = 100, .k = 256, .f32 = f32, .bias = true});
      Check({.m = m, .n = 100, .k = 256, .f32 = f32, .accumulate = true});
    }
  }
}

TEST_F(SkinnyGemmTest, RowsMayLieApart) {
  Check({.m = 5, .n = 70, .k = 320, .x_extra = 8, .w_extra = 64, .y_extra = 3});
}

TEST_F(SkinnyGemmTest, EveryTileOfManyGoesThroughTheRing) { Check({.m = 2, .n = 30000, .k = 1088}); }

// What is NaN in one row of x stays there, and bits do not depend on the other rows or on when the kernel runs.
TEST_F(SkinnyGemmTest, RowsAreIndependent) {
  const Product p{.m = 8, .n = 3000, .k = 1536, .f32 = true};
  auto x = RandomFloats(static_cast<size_t>(p.m) * p.k, 1);
  const auto w = RandomFloats(static_cast<size_t>(p.n) * p.k, 2);
  const std::vector<float> y0(static_cast<size_t>(p.m) * p.n), bias(p.n);
  const auto clean = Run(p, x, w, y0, bias);
  for (int again = 0; again < 3; ++again) ASSERT_EQ(Run(p, x, w, y0, bias), clean);
  x[3 * p.k + 77] = std::numeric_limits<float>::quiet_NaN();
  const auto got = Run(p, x, w, y0, bias);
  for (int i = 0; i < p.m * p.n; ++i) {
    if (i / p.n == 3)
      ASSERT_TRUE(std::isnan(got[i])) << i;
    else
      ASSERT_EQ(got[i], clean[i]) << i;
  }
  Product one = p;
  one.m = 1;
  const auto alone = Run(one, {x.begin(), x.begin() + p.k}, w, y0, bias);
  for (int i = 0; i < p.n; ++i) ASSERT_EQ(alone[i], clean[i]) << i;
}

}  // namespace
}  // namespace dovetail::kernels::cuda
