#include "kernels/cuda/cuda_hybrid_ops.h"

#include <algorithm>
#include <initializer_list>

#include "kernels/cuda/cuda_ops.h"

namespace dovetail::kernels::cuda {
namespace {

bool AllThere(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* p) { return p != nullptr; });
}

template <typename Args>
absl::Status Enqueue(CudaStream& stream, int (*launch)(const Args*, void*), const Args& args, const char* op) {
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(launch(&args, stream.handle()), stream.device().name() + ": " + op);
}

// `sizes` must be positive.
absl::Status Check(const char* op, int64_t rows, std::initializer_list<int64_t> sizes) {
  const bool positive = std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 0; });
  if (rows >= 0 && rows <= kMaxOpRows && positive) return absl::OkStatus();
  return InvalidArgument(op, " on a GPU: ", rows, " rows, or a size that is not positive; 0..", kMaxOpRows,
                         " rows are supported");
}

absl::Status Null(const char* op) { return InvalidArgument(op, " on a GPU: a pointer is null"); }

}  // namespace

absl::Status StateInputs(CudaStream& stream, const StateInputsLaunch& args) {
  DT_RETURN_IF_ERROR(Check("inputs of a state", args.rows, {args.q_width, args.k_width, args.v_width}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.qkv, args.q, args.k, args.v})) return Null("inputs of a state");
  return Enqueue(stream, stream.device().library()->state_inputs, args, "inputs of a state");
}

absl::Status StateGates(CudaStream& stream, const StateGatesLaunch& args) {
  const int rates = args.step_is_rate != 0 || args.rate != nullptr ? 1 : 0;
  DT_RETURN_IF_ERROR(Check("gates of a state", args.rows, {args.heads, args.width, args.stride}));
  if (args.stride < args.width + rates || (args.step_is_rate != 0 && (args.width != 1 || args.rate != nullptr)))
    return InvalidArgument("gates of a state on a GPU: ", args.width, " decays and ", rates, " rates in ", args.stride);
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.bias, args.factor, args.out})) return Null("gates of a state");
  return Enqueue(stream, stream.device().library()->state_gates, args, "gates of a state");
}

absl::Status OutputGate(CudaStream& stream, const OutputGateLaunch& args) {
  DT_RETURN_IF_ERROR(Check("output gate", args.rows, {args.width, args.size}));
  if (args.width % args.size != 0)
    return InvalidArgument("output gate on a GPU: vectors of ", args.size, " in rows of ", args.width);
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.out}) || (args.kind != GateKind::kNone) != (args.gate != nullptr))
    return Null("output gate");
  return Enqueue(stream, stream.device().library()->output_gate, args, "output gate");
}

absl::Status JoinKeys(CudaStream& stream, const JoinKeysLaunch& args) {
  DT_RETURN_IF_ERROR(Check("keys of a latent", args.rows, {args.heads, args.own_dim, args.shared_dim + 1}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.own, args.out}) || (args.shared_dim > 0 && args.shared == nullptr)) return Null("latent keys");
  return Enqueue(stream, stream.device().library()->join_keys, args, "keys of a latent");
}

absl::Status MlpActivation(CudaStream& stream, const MlpActivationLaunch& args) {
  if (args.rows < 0 || args.size < 1)
    return InvalidArgument("activation on a GPU: ", args.rows, " rows of ", args.size);
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.gate_up, args.out})) return Null("activation");
  return Enqueue(stream, stream.device().library()->mlp_activation, args, "activation");
}

absl::Status GatedAdd(CudaStream& stream, const GatedAddLaunch& args) {
  DT_RETURN_IF_ERROR(Check("gated sum", args.rows, {args.h_size, args.size}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.h, args.w, args.y, args.x})) return Null("gated sum");
  return Enqueue(stream, stream.device().library()->gated_add, args, "gated sum");
}

absl::Status RouteExperts(CudaStream& stream, const RouteLaunch& args) {
  DT_RETURN_IF_ERROR(Check("router", args.rows, {args.hidden, args.experts, args.chosen}));
  if (args.experts > kMostCudaExperts || args.chosen > args.experts || args.hidden > kMostRouterHidden)
    return InvalidArgument("router on a GPU: ", args.chosen, " of ", args.experts, " experts over ", args.hidden,
                           " dimensions; at most ", kMostCudaExperts, " and ", kMostRouterHidden, " are supported");
  if (args.groups < 1 || args.experts % args.groups != 0 || (args.groups > 1 && args.experts / args.groups < 2) ||
      args.chosen_groups < 1 || args.chosen_groups > args.groups ||
      args.chosen > args.chosen_groups * (args.experts / args.groups))
    return InvalidArgument("router on a GPU: ", args.chosen, " experts from ", args.chosen_groups, " of ", args.groups,
                           " groups of ", args.experts, " experts");
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.norm, args.router, args.expert, args.weight})) return Null("router");
  return Enqueue(stream, stream.device().library()->route, args, "router");
}

int32_t MostExpertTiles(int64_t pairs, int experts, int tile_rows) {
  return static_cast<int32_t>(std::min<int64_t>(pairs, experts + pairs / tile_rows));
}

absl::Status PlaceExperts(CudaStream& stream, const PlaceLaunch& args) {
  if (args.pairs < 0 || args.chosen < 1 || args.experts < 1 || args.experts > kMostCudaExperts ||
      args.tile_rows < 1 || args.most_tiles < MostExpertTiles(args.pairs, args.experts, args.tile_rows))
    return InvalidArgument("places of experts on a GPU: ", args.pairs, " pairs of ", args.experts, " experts in ",
                           args.most_tiles, " tiles");
  if (args.pairs == 0) return absl::OkStatus();
  if (!AllThere({args.expert, args.slot, args.member, args.tiles})) return Null("places of experts");
  return Enqueue(stream, stream.device().library()->place, args, "places of experts");
}

absl::Status MultiplyExperts(CudaStream& stream, const ExpertGemmLaunch& args) {
  DT_RETURN_IF_ERROR(Check("experts", args.most_tiles, {args.n, args.k}));
  if (args.k % 8 != 0 || (args.tile_rows != 16 && args.tile_rows != 64) || args.type == WireType::kF32)
    return InvalidArgument("experts on a GPU: ", args.n, " x ", args.k, " in tiles of ", args.tile_rows,
                           "; a multiple of 8 columns, 16 or 64 rows and 16-bit types are supported");
  if (args.most_tiles == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.w, args.y, args.tiles})) return Null("experts");
  return Enqueue(stream, stream.device().library()->expert_gemm, args, "experts");
}

absl::Status SumExperts(CudaStream& stream, const ExpertSumLaunch& args) {
  DT_RETURN_IF_ERROR(Check("sum of experts", args.rows, {args.chosen, args.size}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.y, args.slot, args.weight, args.out})) return Null("sum of experts");
  return Enqueue(stream, stream.device().library()->expert_sum, args, "sum of experts");
}

}  // namespace dovetail::kernels::cuda
