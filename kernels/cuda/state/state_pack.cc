#include "kernels/cuda/state/state_pack.h"

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {
namespace {

absl::Status Check(const StatePackLaunch& args) {
  if (args.layout.pieces != 1)
    return InvalidArgument("states of the wire on a GPU: blocks in ", args.layout.pieces, " pieces; one is taken");
  if (args.count < 0 || args.key_dim < 1 || args.value_dim < 1)
    return InvalidArgument("states of the wire on a GPU: ", args.count, " blocks of ", args.key_dim, " x ",
                           args.value_dim);
  if (!AllThere({args.jobs, args.packed})) return NullPointer("states of the wire");
  return absl::OkStatus();
}

}  // namespace

StatePackLaunch StatePackFor(const StateLaunch& of) {
  StatePackLaunch launch;
  launch.layout = of.layout;
  launch.key_dim = of.key_dim;
  launch.value_dim = of.value_dim;
  launch.state_bytes = of.state_bf16 ? 2 : 4;
  launch.vector_decay = of.vector_decay;
  if (of.conv_width > 0) {
    launch.history_tokens = of.conv_width - 1;
    launch.history_channels = 2 * of.key_dim + of.value_dim;
  }
  return launch;
}

absl::Status PackStates(CudaStream& stream, const StatePackLaunch& args) {
  if (args.count == 0) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Check(args));
  return Enqueue(stream, stream.device().library()->state_pack, args, "states for the wire");
}

absl::Status UnpackStates(CudaStream& stream, const StatePackLaunch& args) {
  if (args.count == 0) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Check(args));
  return Enqueue(stream, stream.device().library()->state_unpack, args, "states from the wire");
}

}  // namespace dovetail::kernels::cuda
