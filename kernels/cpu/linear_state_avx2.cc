#define DT_ISA_NS linear_avx2
#include "kernels/cpu/linear_state_body.h"

namespace dovetail::kernels {

const LinearStateKernels& LinearStateAvx2() { return linear_avx2::kLinearStateKernels; }

}  // namespace dovetail::kernels
