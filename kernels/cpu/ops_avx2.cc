#define DT_ISA_NS ops_avx2
#include "kernels/cpu/ops_table_body.h"

namespace dovetail::kernels {

const OpsTable& OpsTableAvx2() {
  static const OpsTable table = ops_avx2::MakeTable(Isa::kAvx2);
  return table;
}

}  // namespace dovetail::kernels
