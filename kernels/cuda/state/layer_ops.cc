#include "kernels/cuda/state/layer_ops.h"

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {

absl::Status StateInputs(CudaStream& stream, const StateInputsLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("inputs of a state", args.rows, {args.q_width, args.k_width, args.v_width}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.qkv, args.q, args.k, args.v})) return NullPointer("inputs of a state");
  return Enqueue(stream, stream.device().library()->state_inputs, args, "inputs of a state");
}

absl::Status StateGates(CudaStream& stream, const StateGatesLaunch& args) {
  const int rates = args.step_is_rate != 0 || args.rate != nullptr ? 1 : 0;
  DT_RETURN_IF_ERROR(CheckRows("gates of a state", args.rows, {args.heads, args.width, args.stride}));
  if (args.stride < args.width + rates || (args.step_is_rate != 0 && (args.width != 1 || args.rate != nullptr)))
    return InvalidArgument("gates of a state on a GPU: ", args.width, " decays and ", rates, " rates in ", args.stride);
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.bias, args.factor, args.out})) return NullPointer("gates of a state");
  return Enqueue(stream, stream.device().library()->state_gates, args, "gates of a state");
}

absl::Status OutputGate(CudaStream& stream, const OutputGateLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("output gate", args.rows, {args.width, args.size}));
  if (args.width % args.size != 0)
    return InvalidArgument("output gate on a GPU: vectors of ", args.size, " in rows of ", args.width);
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.out}) || (args.kind != GateKind::kNone) != (args.gate != nullptr))
    return NullPointer("output gate");
  return Enqueue(stream, stream.device().library()->output_gate, args, "output gate");
}

}  // namespace dovetail::kernels::cuda
