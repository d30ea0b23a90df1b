#include "kernels/kernel_table.h"

namespace dovetail::kernels {

namespace {

GemmKernels GemmTableOf(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return avx2::GemmTable();
    case Isa::kAvx512: return avx512::GemmTable();
    case Isa::kAmx: return amx::GemmTable();
  }
  return avx2::GemmTable();
}

}  // namespace

KernelTable SelectKernels(Isa isa) { return {.isa = isa, .gemm = GemmTableOf(isa), .ops = &SelectOps(isa)}; }

}  // namespace dovetail::kernels
