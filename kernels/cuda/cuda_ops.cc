#include "kernels/cuda/cuda_ops.h"

#include <initializer_list>

namespace dovetail::kernels::cuda {
namespace {

constexpr int kGemmNotFound = -1;
constexpr int kBlasError = 10000;

bool AllThere(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (pointer == nullptr) return false;
  }
  return true;
}

bool AllEven(std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size % 2 != 0 || size < 0) return false;
  }
  return true;
}

template <typename Args>
absl::Status Enqueue(CudaStream& stream, int (*launch)(const Args*, void*), const Args& args, const char* op) {
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(launch(&args, stream.handle()), stream.device().name() + ": " + op);
}

absl::Status CheckRows(const char* op, int32_t rows, int32_t size) {
  if (rows >= 0 && rows <= kMaxOpRows && size > 0 && size % 2 == 0) return absl::OkStatus();
  return InvalidArgument(op, " on a GPU: ", rows, " rows of ", size, "; 0..", kMaxOpRows,
                         " rows of an even size are supported");
}

}  // namespace

absl::Status RmsNorm(CudaStream& stream, const RmsNormLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("rms_norm", args.rows, args.size));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.x, args.weight, args.out}) ||
      !AllEven({args.x_step, args.residual_step, args.out_step, args.part_step})) {
    return InvalidArgument("rms_norm on a GPU: x, weight or out is null, or a step is odd");
  }
  if (args.parts < 1) return InvalidArgument("rms_norm on a GPU: a residual of ", args.parts, " parts");
  return Enqueue(stream, stream.device().library()->rms_norm, args, "rms_norm");
}

absl::Status GatedActivation(CudaStream& stream, const ActivationLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("activation", args.rows, args.size));
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.gate, args.up, args.out}) || !AllEven({args.gate_step, args.up_step, args.out_step})) {
    return InvalidArgument("activation on a GPU: gate, up or out is null, or a step is odd");
  }
  return Enqueue(stream, stream.device().library()->gated_activation, args, "activation");
}

absl::StatusOr<bool> GatedProduct(CudaStream& stream, const GatedProductCall& call) {
  if (call.m < 0 || call.n < 0 || call.k < 0 || call.x_stride < call.k || call.w_stride < call.k ||
      call.y_stride < call.n) {
    return InvalidArgument("gated product on a GPU: ", call.m, " x ", call.n, " x ", call.k, " with strides ",
                           call.x_stride, ", ", call.w_stride, " and ", call.y_stride);
  }
  if (call.m == 0 || call.n == 0) return true;
  if (!AllThere({call.x, call.w, call.y})) return InvalidArgument("gated product on a GPU: x, w or y is null");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const CudaDevice& device = stream.device();
  const DeviceLimits limits = device.limits();
  const int error = device.library()->gated_product(&call, &limits, stream.handle());
  if (error == kProductRefused) return false;
  DT_RETURN_IF_ERROR(device.library().Check(error, device.name() + ": gated product"));
  return true;
}

absl::Status Embed(CudaStream& stream, const EmbedLaunch& args) {
  DT_RETURN_IF_ERROR(CheckRows("embedding", args.rows, args.size));
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

absl::Status Sample(CudaStream& stream, const SampleLaunch& args) {
  if (args.rows < 0 || args.vocab < 1 || args.vocab > (1 << 24) || args.step < args.vocab ||
      args.work_step < args.vocab) {
    return InvalidArgument("sampling on a GPU: ", args.rows, " rows of ", args.vocab, " logits, ", args.step,
                           " apart");
  }
  if (args.rows == 0) return absl::OkStatus();
  if (!AllThere({args.logits, args.work, args.params, args.out}))
    return InvalidArgument("sampling on a GPU: a pointer is null");
  return Enqueue(stream, stream.device().library()->sample, args, "sampling");
}

absl::StatusOr<std::unique_ptr<CudaGemm>> CudaGemm::Create(CudaDevice& device, size_t workspace_bytes) {
  void* handle = nullptr;
  char text[1024] = {};
  const int error = device.library()->gemm_open(device.index(), workspace_bytes, &handle, text, sizeof(text));
  if (error == kGemmNotFound) return FailedPrecondition(device.name(), ": ", text);
  if (error >= kBlasError)
    return Internal(device.name(), ": cuBLASLt does not start (status ", error - kBlasError, ")");
  DT_RETURN_IF_ERROR(device.library().Check(error, device.name() + ": workspace of the matrix products"));
  return std::unique_ptr<CudaGemm>(new CudaGemm(device, handle));
}

CudaGemm::~CudaGemm() { device_.library()->gemm_close(handle_); }

absl::Status CudaGemm::Run(CudaStream& stream, const GemmCall& call) {
  if (call.m < 0 || call.n < 0 || call.k < 1 || call.x_stride < call.k || call.w_stride < call.k ||
      call.y_stride < call.n) {
    return InvalidArgument("gemm on a GPU: ", call.m, " x ", call.n, " x ", call.k, " with strides ", call.x_stride,
                           ", ", call.w_stride, ", ", call.y_stride);
  }
  const int64_t most = (call.m - 1) * call.y_stride + call.n;
  if (call.parts < 0 || (call.parts > 1 && (call.k % call.parts != 0 || call.part_step < most || call.y_is_f32 == 0 ||
                                            call.accumulate != 0 || call.bias != nullptr))) {
    return InvalidArgument("gemm on a GPU: ", call.parts, " parts of ", call.k, " columns, ", call.part_step,
                           " elements apart; parts are equal, in f32, do not overlap and are not added to anything");
  }
  if (call.m == 0 || call.n == 0) return absl::OkStatus();
  if (!AllThere({call.x, call.w, call.y})) return InvalidArgument("gemm on a GPU: x, w or y is null");
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const int error = device_.library()->gemm_run(handle_, &call, stream.handle());
  if (error >= kBlasError) {
    return Internal(device_.name(), ": cuBLASLt refuses ", call.m, " x ", call.n, " x ", call.k, " (status ",
                    error - kBlasError, ")");
  }
  return device_.library().Check(error, device_.name() + ": gemm");
}

}  // namespace dovetail::kernels::cuda
