#pragma once
#include <cublasLt.h>

#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// cuBLASLt as gemm_lt.cc and in_order_check.cc use it: its functions, which are looked up at run time, and what
// describes a product to it.
// Threads: plain values.

inline constexpr int kBlasError = 10000;

#define BLAS_OR_RETURN(expr)                                                                                  \
  do {                                                                                                        \
    if (const cublasStatus_t s = (expr); s != CUBLAS_STATUS_SUCCESS) return kBlasError + static_cast<int>(s); \
  } while (false)

// The functions of cuBLASLt that are used.
struct Blas {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
};

// False: the library lacks one of them.
bool FindAll(void* library, Blas& blas);

// A shape, ready to run.
struct Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  bool has_algorithm = false;  // else LaunchInOrderProduct does it
};

inline bool HasParts(const GemmCall& call) { return call.parts > 1; }

// All of a plan but its algorithm; what it made is Destroy's to give back, also where it fails. 0, or kBlasError and a
// cublasStatus_t.
int MakeLayouts(const Blas& blas, const GemmCall& call, Plan& plan);
void Destroy(const Blas& blas, Plan& plan);

}  // namespace dovetail::kernels::cuda
