#include "kernels/cuda/rows/row_ops.h"

#include "kernels/cuda/runtime/enqueue.h"

namespace dovetail::kernels::cuda {

namespace {

// As CheckRows, and elements are moved in pairs.
absl::Status CheckPairs(const char* op, int32_t rows, int32_t size) {
  if (rows >= 0 && rows <= kMaxOpRows && size > 0 && size % 2 == 0) return absl::OkStatus();
  return InvalidArgument(op, " on a GPU: ", rows, " rows of ", size, "; 0..", kMaxOpRows,
                         " rows of an even size are supported");
}

}  // namespace

absl::Status RmsNorm(CudaStream& stream, const RmsNormLaunch& args) {
  DT_RETURN_IF_ERROR(CheckPairs("rms_norm", args.rows, args.size));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.weight, args.out}) ||
      !AllEven({args.x_step, args.residual_step, args.out_step, args.part_step})) {
    return InvalidArgument("rms_norm on a GPU: x, weight or out is null, or a step is odd");
  }
  if (args.parts < 1) return InvalidArgument("rms_norm on a GPU: a residual of ", args.parts, " parts");
  return Enqueue(stream, stream.device().library()->rms_norm, args, "rms_norm");
}

absl::Status GatedActivation(CudaStream& stream, const ActivationLaunch& args) {
  DT_RETURN_IF_ERROR(CheckPairs("activation", args.rows, args.size));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.gate, args.up, args.out}) || !AllEven({args.gate_step, args.up_step, args.out_step})) {
    return InvalidArgument("activation on a GPU: gate, up or out is null, or a step is odd");
  }
  return Enqueue(stream, stream.device().library()->gated_activation, args, "activation");
}

absl::Status MlpActivation(CudaStream& stream, const MlpActivationLaunch& args) {
  if (args.rows < 0 || args.size < 1)
    return InvalidArgument("activation on a GPU: ", args.rows, " rows of ", args.size);
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.gate_up, args.out})) return NullPointer("activation");
  return Enqueue(stream, stream.device().library()->mlp_activation, args, "activation");
}

absl::Status Embed(CudaStream& stream, const EmbedLaunch& args) {
  DT_RETURN_IF_ERROR(CheckPairs("embedding", args.rows, args.size));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.table, args.ids, args.out}))
    return InvalidArgument("embedding on a GPU: table, ids or out is null");
  return Enqueue(stream, stream.device().library()->embed, args, "embedding");
}

absl::Status RopeTable(CudaStream& stream, const RopeTableLaunch& args) {
  if (args.rows < 0 || args.count < 0) return InvalidArgument("rope table: ", args.rows, " rows of ", args.count);
  if (args.rows == 0 || args.count == 0) return absl::OkStatus();
  if (!AllThere({args.positions, args.inv_freq, args.cos, args.sin}))
    return InvalidArgument("rope table: a pointer is null");
  return Enqueue(stream, stream.device().library()->rope_table, args, "rope table");
}

absl::Status KvAppend(CudaStream& stream, const KvAppendLaunch& args) {
  const CudaKvLayout& layout = args.layout;
  for (const int dim : {layout.key_dim, layout.value_dim}) {
    if (dim < 8 || dim > 256 || dim % 8 != 0) {
      return InvalidArgument("KV append on a GPU: head dimensions ", layout.key_dim, " (keys) and ", layout.value_dim,
                             " (values) must be multiples of 8 in 8..256");
    }
  }
  if (args.rows < 0 || args.rows > kMaxOpRows || args.q_heads < 0 || args.kv_heads < 0) {
    return InvalidArgument("KV append on a GPU: ", args.rows, " rows of ", args.q_heads, " query and ", args.kv_heads,
                           " KV heads");
  }
  if (args.rotary < 0 || args.rotary > layout.key_dim || args.rotary % 2 != 0 ||
      (args.cos == nullptr) != (args.sin == nullptr)) {
    return InvalidArgument("KV append on a GPU: ", args.rotary, " of ", layout.key_dim,
                           " dimensions rotated; an even number is needed, and both cos and sin");
  }
  if (!(args.key_scale > 0) || !(args.value_scale > 0)) {
    return InvalidArgument("KV append on a GPU: scales ", args.key_scale, " and ", args.value_scale,
                           " must be positive");
  }
  if (args.rows == 0 || args.q_heads + args.kv_heads == 0) return absl::OkStatus();
  const bool to_rows = args.k_out != nullptr || args.v_out != nullptr;
  const bool to_peers = args.fan != nullptr && args.fan_rows != nullptr;
  const bool has_places = to_peers || ((args.q_heads == 0 || args.q_out != nullptr) &&
                                       (args.kv_heads == 0 || AllThere({args.k_out, args.v_out}) ||
                                        (!to_rows && AllThere({args.positions, args.row_items, args.items}))));
  if (args.qkv == nullptr || !has_places || (args.fan == nullptr) != (args.fan_rows == nullptr) ||
      !AllEven({args.qkv_step, args.q_out_step, args.v_step, args.k_out_step, args.v_out_step})) {
    return InvalidArgument("KV append on a GPU: a pointer is null, or a step is odd");
  }
  return Enqueue(stream, stream.device().library()->kv_append, args, "KV append");
}

absl::Status PackHeads(CudaStream& stream, const PackHeadsLaunch& args) {
  constexpr int64_t kRun = 8, kMostRuns = int64_t{1} << 31;
  const int64_t sizes[] = {args.row_step, args.head_step, args.dim, args.layout.key_dim, args.block_step / 2};
  for (const int64_t size : sizes)
    if (size < 0 || size % kRun != 0)
      return InvalidArgument("pack of heads on a GPU: ", size, " elements are no multiple of ", kRun);
  if (args.layout.type == KvType::kE4M3 || args.layout.key_dim != args.layout.value_dim || args.layout.key_dim > 256 ||
      args.dim > args.layout.key_dim || args.dim < 1 || args.heads < 1 || args.sequences < 0 || args.length < 0 ||
      args.block_step < args.layout.bytes())
    return InvalidArgument("pack of heads on a GPU: ", args.sequences, " sequences of ", args.length, " tokens, ",
                           args.heads, " heads of ", args.dim, " padded to ", args.layout.key_dim, " and ",
                           args.layout.value_dim, ", blocks of ", args.block_step, " bytes");
  const int64_t of_row = args.layout.key_dim / kRun * 3 * args.heads;
  const int64_t rows = static_cast<int64_t>(args.sequences) * args.length;
  if (of_row >= kMostRuns || rows >= kMostRuns || of_row * rows >= kMostRuns)
    return InvalidArgument("pack of heads on a GPU: ", rows, " rows of ", args.heads, " heads are 2^35 bytes or more");
  if (rows == 0) return absl::OkStatus();
  const auto odd = [](const void* p) { return reinterpret_cast<uint64_t>(p) % 16 != 0; };
  if (!AllThere({args.source, args.blocks}) || odd(args.source) || odd(args.blocks) || odd(args.q))
    return InvalidArgument("pack of heads on a GPU: a pointer is null or on no multiple of 16");
  return Enqueue(stream, stream.device().library()->pack_heads, args, "pack of heads");
}

absl::Status JoinKeys(CudaStream& stream, const JoinKeysLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("keys of a latent", args.rows, {args.heads, args.own_dim, args.shared_dim + 1}));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.own, args.out}) || (args.shared_dim > 0 && args.shared == nullptr))
    return NullPointer("latent keys");
  return Enqueue(stream, stream.device().library()->join_keys, args, "keys of a latent");
}

absl::Status Combine(CudaStream& stream, const CombineLaunch& args) {
  if (args.count < 0 || args.count % 2 != 0 || args.count > int64_t{1} << 39)
    return InvalidArgument("sum on a GPU: ", args.count, " elements; an even number is needed");
  if (args.count == 0) return absl::OkStatus();
  if (!AllThere({args.a, args.out})) return InvalidArgument("sum on a GPU: a or out is null");
  return Enqueue(stream, stream.device().library()->combine, args, "sum");
}

absl::Status FillRandom(CudaStream& stream, const RandomLaunch& args) {
  if (args.count < 0 || args.count % 2 != 0)
    return InvalidArgument("random numbers on a GPU: ", args.count, " elements; an even number is needed");
  if (args.count == 0) return absl::OkStatus();
  if (args.out == nullptr) return InvalidArgument("random numbers on a GPU: out is null");
  return Enqueue(stream, stream.device().library()->random, args, "random numbers");
}

}  // namespace dovetail::kernels::cuda
