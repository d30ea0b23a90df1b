#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/reference/gemm.h"
#include "kernels/reference/rms_norm.h"
#include "tests/kernels/oracle.h"
#include "tests/kernels_cuda/gemm_fixture.h"

// Products cut along k (GemmCall::parts), and the norm that adds them up (RmsNormLaunch::parts).

namespace dovetail::kernels::cuda {
namespace {

using kernels::testing::RandomFloats;
using testing::As;
using testing::ToWireBytes;

class ProductPartsTest : public testing::GemmTest {
 protected:
  // Rounds the values to bf16, too.
  std::unique_ptr<Buffer> UploadBF16(std::vector<float>& values) {
    const auto bytes = ToWireBytes(WireType::kBF16, values);
    values = testing::FromWireBytes(WireType::kBF16, bytes);
    return Upload(bytes);
  }
};

TEST_F(ProductPartsTest, PartsOfAProductAddUpToIt) {
  for (const auto& [m, n, k, parts] : {std::tuple{9, 64, 128, 2}, {1, 80, 192, 3}, {130, 200, 96, 4}}) {
    std::vector<float> x = RandomFloats(m * k, 1), w = RandomFloats(n * k, 2);
    const auto dx = UploadBF16(x), dw = UploadBF16(w);
    const int step = m * n + 24;
    const auto dy = Empty(parts * step * 4);
    GemmCall call{.x = dx->data(),
                  .w = dw->data(),
                  .y = dy->data(),
                  .bias = nullptr,
                  .m = m,
                  .n = n,
                  .k = k,
                  .x_stride = k,
                  .w_stride = k,
                  .y_stride = n,
                  .type = GemmType::kBF16,
                  .y_is_f32 = true};
    call.parts = parts;
    call.part_step = step;
    const absl::Status status = gemm_->Run(stream(), call);
    ASSERT_TRUE(status.ok()) << status;
    const auto got = Download<float>(*dy);
    const auto want = reference::Gemm(x, w, m, n, k);
    for (int i = 0; i < m * n; ++i) {
      double sum = 0;
      for (int part = 0; part < parts; ++part) sum += got[part * step + i];
      ASSERT_LE(std::abs(sum - want[i]), 2e-5 * std::sqrt(k)) << m << " " << n << " " << k << " at " << i;
    }
    for (int part = 0; part < parts; ++part) ASSERT_TRUE(std::isnan(got[part * step + m * n])) << "wrote between parts";
    for (const auto& wrong : {std::pair{5, step}, {parts, m * n - 1}}) {
      call.parts = wrong.first;
      call.part_step = wrong.second;
      EXPECT_EQ(gemm_->Run(stream(), call).code(), absl::StatusCode::kInvalidArgument);
    }
    call.parts = parts;
    call.part_step = step;
    call.accumulate = 1;
    EXPECT_EQ(gemm_->Run(stream(), call).code(), absl::StatusCode::kInvalidArgument);
  }
}

using NormOfPartsTest = testing::CudaTest;

// A product in parts is added up by the norm that reads it.
TEST_F(NormOfPartsTest, AddsThemInTheirOrder) {
  for (const int size : {776, 778, 4096}) {  // in runs of eight, in pairs, as many threads as a block has
    const int rows = 3, parts = 5, step = rows * size + 8;
    const std::vector<float> x = RandomFloats(rows * size, 1), w = RandomFloats(size, 2, 0.5, 2),
                             r = RandomFloats(parts * step, 3);
    const auto dx = Upload(x), dw = Upload(w), dr = Upload(r), out = Empty(rows * size * 4);
    RmsNormLaunch args{.x = dx->data(),
                       .residual = dr->data(),
                       .weight = As<float>(dw),
                       .out = out->data(),
                       .x_step = size,
                       .residual_step = size,
                       .out_step = size,
                       .x_type = WireType::kF32,
                       .out_type = WireType::kF32,
                       .eps = 1e-5f,
                       .rows = rows,
                       .size = size,
                       .parts = parts,
                       .part_step = step};
    ASSERT_TRUE(RmsNorm(stream(), args).ok());
    const auto got = Download<float>(*out), x_now = Download<float>(*dx);
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < size; ++i) {
        float sum = x[row * size + i];
        for (int part = 0; part < parts; ++part) sum += r[part * step + row * size + i];
        ASSERT_EQ(x_now[row * size + i], sum) << "row " << row << " " << i;
      }
      const auto want = reference::RmsNorm({x_now.data() + row * size, size_t(size)}, {}, w, 1e-5);
      for (int i = 0; i < size; ++i)
        ASSERT_LE(std::abs(got[row * size + i] - want[i]), std::abs(want[i]) * 3e-6 + 1e-7) << size;
    }
    args.parts = 0;
    EXPECT_EQ(RmsNorm(stream(), args).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace dovetail::kernels::cuda
