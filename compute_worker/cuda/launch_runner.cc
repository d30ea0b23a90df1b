#include "compute_worker/cuda/launch_runner.h"

#include <variant>

#include "compute_worker/cuda/cuda_crossing.h"
#include "compute_worker/cuda/weight_names.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::compute {
namespace {

constexpr int64_t kMostPadded = 256;

int32_t Rows(const CudaBatch& batch) { return static_cast<int32_t>(batch.rows); }

}  // namespace

int64_t PaddedRows(int64_t rows, bool in_order) {
  // Up to eight rows have a kernel that takes any number of them, unless sums are made in order.
  if ((rows <= kProductRowStep && !in_order) || rows > kMostPadded) return rows;
  return (rows + kProductRowStep - 1) / kProductRowStep * kProductRowStep;
}

int ExpertTileRows(int64_t pairs, int64_t experts, bool groups, bool kept) {
  constexpr int64_t kGroupsFrom = 32, kManyFrom = 32, kMoreFrom = 14;  // rows of an expert, where all have as many
  if (kept && pairs / experts < kernels::cuda::ExpertProduct::kMostCodeRows) return kernels::cuda::kFewTileRows;
  if (groups && pairs / experts >= kGroupsFrom) return kernels::cuda::kGroupedTileRows;
  if (pairs / experts >= kManyFrom) return kernels::cuda::kManyTileRows;
  return pairs / experts >= kMoreFrom ? kernels::cuda::kMoreTileRows : kernels::cuda::kFewTileRows;
}

const float* LaunchRunner::Vector(const WeightName& name) const {
  return name.weight != Weight::kNone ? VectorOf(StepOf(name), name.weight) : nullptr;
}

kernels::cuda::GemmType LaunchRunner::gemm_type() const {
  return model_.type() == WireType::kBF16 ? kernels::cuda::GemmType::kBF16 : kernels::cuda::GemmType::kF16;
}

absl::Status LaunchRunner::Run(std::span<const Launch> launches, const std::vector<WorkerPart>& parts,
                               const void* arriving, CudaBatch& batch) const {
  for (const Launch& launch : launches) {
    const auto* const seam = std::get_if<SeamRecord>(&launch.record);
    DT_RETURN_IF_ERROR(seam != nullptr ? Cross(*seam, parts, arriving, batch)
                                       : std::visit(
                                             [&](const auto& record) -> absl::Status {
                                               using Record = std::decay_t<decltype(record)>;
                                               if constexpr (std::is_same_v<Record, SeamRecord>)
                                                 return absl::OkStatus();
                                               else
                                                 return Start(record, batch);
                                             },
                                             launch.record));
  }
  return absl::OkStatus();
}

absl::Status LaunchRunner::Cross(const SeamRecord& record, const std::vector<WorkerPart>& parts, const void* arriving,
                                 CudaBatch& batch) const {
  switch (record.call) {
    case SeamCall::kBeforeHeads: return batch.crossing->BeforeHeads(batch);
    case SeamCall::kLeave: return batch.crossing->Leave(record.op, batch);
    case SeamCall::kArrive: break;
  }
  DT_ASSIGN_OR_RETURN(batch.arrived, batch.crossing->Arrive(record.op, parts, arriving, batch));
  return absl::OkStatus();
}

absl::Status LaunchRunner::ChooseProducts(std::span<const Launch> launches, CudaBatch& batch) const {
  for (const Launch& launch : launches) {
    const auto* record = std::get_if<ProductRecord>(&launch.record);
    if (const auto* const gated = std::get_if<GatedProductRecord>(&launch.record)) record = &gated->product;
    if (record == nullptr) continue;
    kernels::cuda::GemmCall call = CallOf(*record, batch);
    call.only_choose = 1;
    if (call.x == nullptr || call.y == nullptr) continue;  // of a crossing that has not begun: at its first step
    DT_RETURN_IF_ERROR(product_.Run(batch.stream(), *WeightsOf(StepOf(record->w), record->w.weight), call));
  }
  return absl::OkStatus();
}

kernels::cuda::GemmCall LaunchRunner::CallOf(const ProductRecord& record, CudaBatch& batch) const {
  kernels::cuda::GemmCall call{};
  call.x = batch.At(record.x);
  call.y = batch.MutableAt(record.y);
  call.bias = BiasOf(StepOf(record.w), record.w.weight);
  call.m = PaddedRows(batch.rows, product_.in_order());
  call.n = record.n;
  call.k = call.x_stride = record.k;
  call.y_stride = record.y_step;
  call.type = gemm_type();
  call.y_is_f32 = record.result != ProductResult::kWire;
  call.accumulate = record.result == ProductResult::kAdded;
  if (record.parts > 1) {
    call.parts = record.parts;
    call.part_step = call.m * call.n;
  }
  return call;
}

absl::Status LaunchRunner::Start(const ProductRecord& record, CudaBatch& batch) const {
  return product_.Run(batch.stream(), *WeightsOf(StepOf(record.w), record.w.weight), CallOf(record, batch));
}

absl::Status LaunchRunner::Start(const NormRecord& record, CudaBatch& batch) const {
  kernels::cuda::RmsNormLaunch norm;
  norm.x = batch.MutableAt(record.x);
  if (record.parts > 0) {
    norm.residual = batch.MutableAt({.tensor = Tensor::kParts});
    norm.residual_step = record.size;
    norm.parts = record.parts;
    norm.part_step = PaddedRows(batch.rows, product_.in_order()) * record.size;
  }
  norm.weight = Vector(record.w);
  norm.out = batch.MutableAt(record.out);
  norm.x_step = record.x_step;
  norm.out_step = record.out_step;
  norm.x_type = record.x_type;
  norm.out_type = record.out_type;
  norm.eps = record.eps;
  norm.rows = Rows(batch);
  norm.size = static_cast<int32_t>(record.size);
  return kernels::cuda::RmsNorm(batch.stream(), norm);
}

absl::Status LaunchRunner::Start(const CombineRecord& record, CudaBatch& batch) const {
  kernels::cuda::CombineLaunch sum;
  sum.a = batch.At(record.a);
  sum.b = batch.At(record.b);
  sum.out = batch.MutableAt(record.out);
  sum.a_type = record.a_type;
  sum.out_type = record.out_type;
  sum.a_factor = record.a_factor;
  sum.b_factor = record.b_factor;
  sum.count = batch.rows * record.width;
  return kernels::cuda::Combine(batch.stream(), sum);
}

absl::Status LaunchRunner::Start(const CopyRecord& record, CudaBatch& batch) const {
  return batch.stream().Copy(batch.MutableAt(record.to), batch.At(record.from), batch.rows * record.row_bytes);
}

absl::Status LaunchRunner::Start(const ClearRecord& record, CudaBatch& batch) const {
  return batch.stream().Fill(batch.MutableAt(record.at), 0, batch.rows * record.row_bytes);
}

absl::Status LaunchRunner::Start(const GatedActivationRecord& record, CudaBatch& batch) const {
  kernels::cuda::ActivationLaunch activation;
  const std::byte* const gate = batch.At(record.gate_up);
  activation.gate = gate;
  activation.up = gate + record.size * kElement;
  activation.out = batch.MutableAt(record.out);
  activation.gate_step = activation.up_step = 2 * record.size;
  activation.out_step = record.size;
  activation.type = record.type;
  activation.gelu = record.gelu;
  activation.rows = Rows(batch);
  activation.size = static_cast<int32_t>(record.size);
  return kernels::cuda::GatedActivation(batch.stream(), activation);
}

absl::Status LaunchRunner::Start(const MlpActivationRecord& record, CudaBatch& batch) const {
  kernels::cuda::MlpActivationLaunch activation;
  activation.gate_up = batch.At(record.gate_up);
  activation.out = batch.MutableAt(record.out);
  activation.type = record.type;
  activation.kind = record.kind;
  activation.rows = static_cast<int32_t>(batch.rows * record.times);
  activation.size = static_cast<int32_t>(record.size);
  return kernels::cuda::MlpActivation(batch.stream(), activation);
}

absl::Status LaunchRunner::Start(const GatedProductRecord& record, CudaBatch& batch) const {
  const auto& [product, activation] = record;
  const kernels::cuda::GatedProductCall call{.x = batch.At(product.x),
                                             .w = WeightsOf(StepOf(product.w), product.w.weight)->data(),
                                             .y = batch.MutableAt(activation.out),
                                             .m = PaddedRows(batch.rows, product_.in_order()),
                                             .n = activation.size,
                                             .k = product.k,
                                             .x_stride = product.k,
                                             .w_stride = product.k,
                                             .y_stride = activation.size,
                                             .type = gemm_type(),
                                             .gelu = activation.gelu,
                                             .rounds_halves = product_.in_order() ? 1 : 0};
  DT_ASSIGN_OR_RETURN(const bool done, kernels::cuda::GatedProduct(batch.stream(), call));
  if (done) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Start(product, batch));
  return Start(activation, batch);
}

absl::Status LaunchRunner::Start(const HeadsRecord& record, CudaBatch& batch) const {
  kernels::cuda::KvAppendLaunch out;
  out.qkv = batch.At(record.qkv);
  out.qkv_step = record.qkv_step;
  out.type = record.type;
  out.q_out = batch.MutableAt(record.q_out);
  out.q_out_step = record.q_step;
  out.k_out = batch.MutableAt(record.k_out);
  out.k_out_step = record.k_step;
  out.v_out = batch.MutableAt(record.v_out);
  out.v_out_step = record.v_step;
  out.layout = {record.key_dim, record.value_dim, kernels::cuda::KvType::kBF16};
  out.q_norm = Vector(record.q_norm);
  out.k_norm = Vector(record.k_norm);
  out.norm_eps = record.eps;
  if (record.rope >= 0) {
    const CudaBatch::RopeAngles& angles = batch.angles[static_cast<size_t>(record.rope)];
    out.cos = reinterpret_cast<const float*>(angles.cos->data());
    out.sin = reinterpret_cast<const float*>(angles.sin->data());
    out.rotary = 2 * angles.pairs;
  }
  out.rows = Rows(batch);
  out.q_heads = record.q_heads;
  out.kv_heads = record.kv_heads;
  batch.crossing->LeaveFrom(record.op, batch, out);
  return kernels::cuda::KvAppend(batch.stream(), out);
}

}  // namespace dovetail::compute
