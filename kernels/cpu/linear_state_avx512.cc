#define DT_ISA_NS linear_avx512
#define DT_ISA_AVX512 1
// g++ 12 takes the undefined pass-through operand of its own AVX-512 intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "kernels/cpu/linear_state_body.h"

namespace dovetail::kernels {

const LinearStateKernels& LinearStateAvx512() { return linear_avx512::kLinearStateKernels; }

}  // namespace dovetail::kernels
