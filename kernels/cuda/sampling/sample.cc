#include "kernels/cuda/sampling/sample.h"

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {

absl::Status Sample(CudaStream& stream, const SampleLaunch& args) {
  if (args.rows < 0 || args.vocab < 1 || args.vocab > (1 << 24) || args.step < args.vocab ||
      args.work_step < args.vocab) {
    return InvalidArgument("sampling on a GPU: ", args.rows, " rows of ", args.vocab, " logits, ", args.step, " apart");
  }
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.logits, args.work, args.params, args.out}))
    return InvalidArgument("sampling on a GPU: a pointer is null");
  return Enqueue(stream, stream.device().library()->sample, args, "sampling");
}

}  // namespace dovetail::kernels::cuda
