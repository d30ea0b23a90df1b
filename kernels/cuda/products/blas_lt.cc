#include "kernels/cuda/products/blas_lt.h"

#include <dlfcn.h>

namespace dovetail::kernels::cuda {
namespace {

// Of `parts` matrices, each `step` elements behind the one before.
cublasStatus_t SetParts(const Blas& blas, cublasLtMatrixLayout_t layout, int32_t parts, int64_t step) {
  const cublasStatus_t status = blas.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &parts, sizeof(parts));
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  return blas.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step));
}

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

bool FindAll(void* library, Blas& blas) {
  return Find(library, "cublasLtCreate", blas.create) && Find(library, "cublasLtGetVersion", blas.version) &&
         Find(library, "cublasLtDestroy", blas.destroy) && Find(library, "cublasLtMatmul", blas.matmul) &&
         Find(library, "cublasLtMatmulAlgoGetHeuristic", blas.heuristic) &&
         Find(library, "cublasLtMatmulDescCreate", blas.desc_create) &&
         Find(library, "cublasLtMatmulDescDestroy", blas.desc_destroy) &&
         Find(library, "cublasLtMatmulDescSetAttribute", blas.desc_set) &&
         Find(library, "cublasLtMatrixLayoutCreate", blas.layout_create) &&
         Find(library, "cublasLtMatrixLayoutDestroy", blas.layout_destroy) &&
         Find(library, "cublasLtMatrixLayoutSetAttribute", blas.layout_set) &&
         Find(library, "cublasLtMatmulPreferenceCreate", blas.preference_create) &&
         Find(library, "cublasLtMatmulPreferenceDestroy", blas.preference_destroy) &&
         Find(library, "cublasLtMatmulPreferenceSetAttribute", blas.preference_set);
}

int MakeLayouts(const Blas& blas, const GemmCall& call, Plan& plan) {
  const cudaDataType_t type = call.type == GemmType::kBF16 ? CUDA_R_16BF : CUDA_R_16F;
  const cudaDataType_t y_type = call.y_is_f32 ? CUDA_R_32F : type;
  BLAS_OR_RETURN(blas.desc_create(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  // Column-major: y^T [n x m] = w [k x n]^T x^T [k x m].
  const cublasOperation_t transposed = CUBLAS_OP_T;
  BLAS_OR_RETURN(blas.desc_set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)));
  if (call.bias != nullptr) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    BLAS_OR_RETURN(blas.desc_set(plan.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)));
    BLAS_OR_RETURN(blas.desc_set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &y_type, sizeof(y_type)));
    BLAS_OR_RETURN(blas.desc_set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call.bias, sizeof(call.bias)));
  }
  const int64_t k = HasParts(call) ? call.k / call.parts : call.k;
  BLAS_OR_RETURN(blas.layout_create(&plan.w, type, k, call.n, call.w_stride));
  BLAS_OR_RETURN(blas.layout_create(&plan.x, type, k, call.m, call.x_stride));
  BLAS_OR_RETURN(blas.layout_create(&plan.y, y_type, call.n, call.m, call.y_stride));
  if (HasParts(call)) {
    BLAS_OR_RETURN(SetParts(blas, plan.w, call.parts, k));
    BLAS_OR_RETURN(SetParts(blas, plan.x, call.parts, k));
    BLAS_OR_RETURN(SetParts(blas, plan.y, call.parts, call.part_step));
  }
  return 0;
}

void Destroy(const Blas& blas, Plan& plan) {
  if (plan.desc != nullptr) blas.desc_destroy(plan.desc);
  for (const cublasLtMatrixLayout_t layout : {plan.w, plan.x, plan.y}) {
    if (layout != nullptr) blas.layout_destroy(layout);
  }
}

}  // namespace dovetail::kernels::cuda
