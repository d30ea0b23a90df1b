#define DT_ISA_NS ops_avx512
#define DT_ISA_AVX512 1
// g++ 12 takes the undefined pass-through operand of its own AVX-512 intrinsics for a mistake of
// ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "kernels/cpu/ops_table_body.h"

namespace dovetail::kernels {

const OpsTable& OpsTableAvx512() {
  static const OpsTable table = ops_avx512::MakeTable(Isa::kAvx512);
  return table;
}

}  // namespace dovetail::kernels
