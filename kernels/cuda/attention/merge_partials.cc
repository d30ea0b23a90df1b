#include "kernels/cuda/attention/merge_partials.h"

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {

absl::Status MergePartials(CudaStream& stream, const MergeLaunch& args) {
  if (args.rows < 0 || args.heads < 1 || args.value_dim < 2 || args.value_dim > 256 || args.value_dim % 2 != 0) {
    return InvalidArgument("merge on a GPU: ", args.rows, " rows of ", args.heads, " heads of ", args.value_dim);
  }
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.partial_o, args.partial_ml, args.first, args.order, args.o}) || args.o_row_step % 2 != 0) {
    return InvalidArgument("merge on a GPU: a pointer is null, or the row step is odd");
  }
  return Enqueue(stream, stream.device().library()->merge, args, "merge");
}

}  // namespace dovetail::kernels::cuda
