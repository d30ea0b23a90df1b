#include "kernels/cuda/cuda_state.h"

namespace dovetail::kernels::cuda {
namespace {

absl::Status Check(const StateLaunch& args) {
  if (args.key_dim < 1 || args.key_dim > kStateMaxDim || args.value_dim < 1 || args.value_dim > kStateMaxDim)
    return InvalidArgument("linear state on a GPU: ", args.key_dim, " x ", args.value_dim, "; each may be 1..",
                           kStateMaxDim);
  if (args.unit_count < 0 || (args.units == nullptr && args.heads < 1 && args.unit_count > 0))
    return InvalidArgument("linear state on a GPU: ", args.unit_count, " units of ", args.heads, " heads");
  if (args.layout.pieces < 1 || args.layout.pieces > args.pieces)
    return InvalidArgument("linear state on a GPU: ", args.pieces, " pieces a block; the layout needs ",
                           args.layout.pieces);
  if (args.conv_width != 0 && (args.conv_width < 2 || args.conv_width > kStateMaxConv))
    return InvalidArgument("linear state on a GPU: a convolution of ", args.conv_width, " taps; 2..", kStateMaxConv);
  if (args.gates != (args.token_decay ? (args.vector_decay ? args.key_dim : 1) : 0) + (args.token_rate ? 1 : 0) ||
      (args.vector_decay && !args.token_decay))
    return InvalidArgument("linear state on a GPU: ", args.gates, " gates a token do not fit the decays and rates");
  if (args.unit_count == 0) return absl::OkStatus();
  if (args.items == nullptr || args.blocks == nullptr || args.query == nullptr || args.key_value == nullptr ||
      args.out == nullptr || (!args.token_decay && args.log_decay == nullptr) ||
      (args.conv_width > 0 && (args.conv == nullptr || args.layout.history.rows == 0)))
    return InvalidArgument("linear state on a GPU: a pointer is null");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StateLaunch> StateLaunchFor(const LinearStateShape& shape, size_t piece_bytes, WireType wire) {
  DT_RETURN_IF_ERROR(shape.Validate());
  if (shape.update == StateUpdate::kRankOne) return Unimplemented("rank-one updates of a state run on the CPU so far");
  StateLaunch launch;
  launch.layout = LayOutState(shape, piece_bytes);
  if (launch.layout.pieces == 0)
    return InvalidArgument("linear state on a GPU: a row of it does not fit into ", piece_bytes, " bytes");
  launch.pieces = launch.layout.pieces;
  launch.key_dim = shape.key_dim;
  launch.value_dim = shape.value_dim;
  launch.vector_decay = shape.decay == DecayForm::kVector;
  launch.delta = shape.update == StateUpdate::kDelta;
  launch.state_bf16 = shape.state == DType::kBF16;
  launch.wire = wire;
  return launch;
}

absl::Status AppendStates(CudaStream& stream, const StateLaunch& args) {
  DT_RETURN_IF_ERROR(Check(args));
  if (args.unit_count == 0) return absl::OkStatus();
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const CudaDevice& device = stream.device();
  return device.library().Check(device.library()->state_append(&args, stream.handle()),
                                device.name() + ": linear state");
}

}  // namespace dovetail::kernels::cuda
