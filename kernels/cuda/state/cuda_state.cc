#include "kernels/cuda/state/cuda_state.h"

#include <algorithm>

namespace dovetail::kernels::cuda {
namespace {

constexpr int kChunkSharedBytes = 227 << 10;   // of a thread block of the chunked form
constexpr int kDecodeSharedBytes = 227 << 10;  // of one of state_decode.cu

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
  if (args.wire == WireType::kF32) return InvalidArgument("linear state on a GPU: float32 on the wire");
  if (args.unit_count == 0) return absl::OkStatus();
  if (args.items == nullptr || args.blocks == nullptr || args.query == nullptr || args.key_value == nullptr ||
      args.out == nullptr || (!args.token_decay && args.log_decay == nullptr) ||
      (args.conv_width > 0 && (args.conv == nullptr || args.layout.history.rows == 0)))
    return InvalidArgument("linear state on a GPU: a pointer is null");
  return absl::OkStatus();
}

int64_t ChunkBytes(const StateLaunch& args) {
  return args.unit_count * StateChunkBytes(args);  // a chunk of each unit
}
int64_t CarryBytes(const StateLaunch& args) {
  return (args.unit_count * StateCarryBytes(args.key_dim, args.value_dim) + 255) / 256 * 256;
}

// Whether state_decode.cu has it: code for this GPU, room for whole heads, rows that bulk copies can take.
bool RunsAtMemorySpeed(const CudaDevice& device, const StateLaunch& args) {
  return device.info().major == 9 && device.info().shared_bytes >= kDecodeSharedBytes && args.layout.midway.rows > 0 &&
         args.step % 16 == 0;
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
  const auto append = RunsAtMemorySpeed(device, args) ? device.library()->state_decode : device.library()->state_append;
  return device.library().Check(append(&args, stream.handle()), device.name() + ": linear state");
}

bool StatesRunInChunks(const CudaDevice& device, const StateLaunch& args) {
  return args.key_dim <= StateChunkKeys(args.key_dim) && device.info().shared_bytes >= kChunkSharedBytes;
}

size_t StateWorkspaceBytes(const StateLaunch& args, size_t most) {
  if (StateChunksAreFused(args)) return 256;  // none; but something to allocate
  const int64_t room = (static_cast<int64_t>(most) - CarryBytes(args)) / std::max<int64_t>(1, ChunkBytes(args));
  return CarryBytes(args) + std::clamp<int64_t>(room, 1, std::max(1, args.chunk_end)) * ChunkBytes(args);
}

absl::Status AppendStatesInChunks(CudaStream& stream, const StateLaunch& args, std::span<std::byte> workspace) {
  DT_RETURN_IF_ERROR(Check(args));
  const CudaDevice& device = stream.device();
  if (!StatesRunInChunks(device, args))
    return InvalidArgument("linear state on a GPU: ", args.key_dim, " key dimensions do not run in chunks here");
  if (args.failed != nullptr)
    return InvalidArgument("linear state on a GPU: chunks do not look at whether their step has failed");
  if (args.unit_count == 0 || args.chunk_end == 0) return absl::OkStatus();
  if (StateChunksAreFused(args)) {
    DT_RETURN_IF_ERROR(stream.UseDevice());
    return device.library().Check(device.library()->state_chunks(&args, stream.handle()),
                                  device.name() + ": linear state");
  }
  const int64_t room = (static_cast<int64_t>(workspace.size()) - CarryBytes(args)) / ChunkBytes(args);
  if (room < 1)
    return ResourceExhausted("linear state on a GPU: ", workspace.size(), " bytes of workspace, ",
                             StateWorkspaceBytes(args, 0), " are needed");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  StateLaunch part = args;
  part.workspace = workspace.data() + CarryBytes(args);
  for (int64_t begin = 0; begin < args.chunk_end; begin += room) {
    part.chunk_begin = static_cast<int32_t>(begin);
    part.chunk_end = static_cast<int32_t>(std::min<int64_t>(begin + room, args.chunk_end));
    part.carry = room < args.chunk_end ? reinterpret_cast<float*>(workspace.data()) : nullptr;
    DT_RETURN_IF_ERROR(device.library().Check(device.library()->state_chunk_prepare(&part, stream.handle()),
                                              device.name() + ": linear state"));
    DT_RETURN_IF_ERROR(device.library().Check(device.library()->state_chunks(&part, stream.handle()),
                                              device.name() + ": linear state"));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels::cuda
