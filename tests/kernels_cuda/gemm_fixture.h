#pragma once
#include <memory>

#include "kernels/cuda/products/cuda_gemm.h"
#include "tests/kernels_cuda/cuda_fixture.h"

// Products through CudaGemm for tests, or a skip that says what is missing.

namespace dovetail::kernels::cuda::testing {

class GemmTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    auto gemm = CudaGemm::Create(device());
    if (!gemm.ok() && absl::IsFailedPrecondition(gemm.status()))
      GTEST_SKIP() << "needs cuBLASLt: " << gemm.status().message();
    ASSERT_TRUE(gemm.ok()) << gemm.status();
    gemm_ = *std::move(gemm);
  }

  std::unique_ptr<CudaGemm> gemm_;
};

}  // namespace dovetail::kernels::cuda::testing
