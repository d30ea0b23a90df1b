#pragma once
#include <cmath>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/op_context.h"
#include "kernels/thread_pool.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda::testing {

inline constexpr WireType kHalves[] = {WireType::kBF16, WireType::kF16};

// Half a unit in the last place of a 16-bit type, relative.
inline double Rounding(WireType type) { return type == WireType::kBF16 ? 0x1p-8 : 0x1p-11; }
inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// A test of ops of layers, with what they take in 16 bits.
class CudaLayerTest : public CudaTest {
 protected:
  // x becomes what the type holds of it.
  std::unique_ptr<Buffer> UploadWire(WireType type, std::vector<float>& x) {
    const std::vector<std::byte> bytes = ToWireBytes(type, x);
    x = FromWireBytes(type, bytes);
    return Upload(bytes);
  }
  std::vector<float> DownloadWire(WireType type, Buffer& buffer) {
    return FromWireBytes(type, Download<std::byte>(buffer));
  }
  void ExpectNear(const std::vector<float>& got, const std::vector<double>& want, double relative, double absolute) {
    ASSERT_GE(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_LE(std::abs(got[i] - want[i]), std::abs(want[i]) * relative + absolute) << "element " << i;
    if (got.size() > want.size()) {
      EXPECT_TRUE(std::isnan(got[want.size()])) << "wrote behind out";
    }
  }
  OpContext cpu() { return {&pool_, &SelectOps(Isa::kAvx2)}; }

 private:
  ThreadPool pool_{{.threads = 1}};
};

}  // namespace dovetail::kernels::cuda::testing
