#include "kernels/kernel_table.h"

namespace dovetail::kernels {

KernelTable SelectKernels(Isa isa) {
  return {.isa = isa, .gemm = isa == Isa::kAvx512 ? avx512::GemmTable() : avx2::GemmTable(), .ops = &SelectOps(isa)};
}

}  // namespace dovetail::kernels
