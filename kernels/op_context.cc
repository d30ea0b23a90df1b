#include "kernels/op_context.h"

#include "kernels/kernel_table.h"

namespace dovetail::kernels {

const OpsTable& SelectOps(Isa isa) { return isa >= Isa::kAvx512 ? OpsTableAvx512() : OpsTableAvx2(); }

OpContext ContextOf(Stream& stream) { return {.pool = &stream.pool(), .table = stream.kernels().ops}; }

}  // namespace dovetail::kernels
