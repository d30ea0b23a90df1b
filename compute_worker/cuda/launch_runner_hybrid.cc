// How the records of linear states and of experts are launched.
#include "compute_worker/cuda/launch_runner.h"
#include "compute_worker/cuda/weight_names.h"
#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/state/layer_ops.h"

namespace dovetail::compute {
namespace {

int32_t Rows(const CudaBatch& batch) { return static_cast<int32_t>(batch.rows); }

template <typename T>
T* Of(const Place& place, const CudaBatch& batch) {
  return reinterpret_cast<T*>(batch.MutableAt(place));
}

// Of those that experts' kernels have (fuse.cc).
kernels::cuda::ExpertActivation ActivationOf(kernels::cuda::MlpKind kind) {
  return kind == kernels::cuda::MlpKind::kSilu ? kernels::cuda::ExpertActivation::kSilu
                                               : kernels::cuda::ExpertActivation::kGeluTanh;
}

}  // namespace

absl::Status LaunchRunner::Start(const StateInputsRecord& record, CudaBatch& batch) const {
  kernels::cuda::StateInputsLaunch inputs;
  inputs.qkv = batch.At(record.qkv);
  inputs.v_factor = batch.At(record.v_factor);
  inputs.q = batch.MutableAt(record.q);
  inputs.k = batch.MutableAt(record.k);
  inputs.v = batch.MutableAt(record.v);
  inputs.type = record.type;
  inputs.silu = record.silu;
  inputs.rows = Rows(batch);
  inputs.q_width = record.q_width;
  inputs.k_width = record.k_width;
  inputs.v_width = record.v_width;
  return kernels::cuda::StateInputs(batch.stream(), inputs);
}

absl::Status LaunchRunner::Start(const StateGatesRecord& record, CudaBatch& batch) const {
  kernels::cuda::StateGatesLaunch gates;
  gates.x = Of<float>(record.x, batch);
  gates.bias = Vector(record.bias);
  gates.factor = Vector(record.factor);
  gates.rate = Of<float>(record.rate, batch);
  gates.out = Of<float>(record.out, batch);
  gates.scale = record.scale;
  gates.low = record.low;
  gates.high = record.high;
  gates.rate_scale = record.rate_scale;
  gates.step_is_rate = record.step_is_rate;
  gates.rows = Rows(batch);
  gates.heads = record.heads;
  gates.width = record.width;
  gates.stride = record.stride;
  return kernels::cuda::StateGates(batch.stream(), gates);
}

absl::Status LaunchRunner::Start(const OutputGateRecord& record, CudaBatch& batch) const {
  kernels::cuda::OutputGateLaunch gate;
  gate.x = batch.At(record.x);
  gate.gate = batch.At(record.gate);
  gate.weight = Vector(record.w);
  gate.out = batch.MutableAt(record.out);
  gate.type = record.type;
  gate.kind = record.kind;
  gate.scale = record.scale;
  gate.eps = record.eps;
  gate.gate_first = record.gate_first;
  gate.weight_each = record.weight_each;
  gate.rows = Rows(batch);
  gate.width = record.width;
  gate.size = record.size;
  return kernels::cuda::OutputGate(batch.stream(), gate);
}

absl::Status LaunchRunner::Start(const JoinKeysRecord& record, CudaBatch& batch) const {
  kernels::cuda::JoinKeysLaunch join;
  join.own = batch.At(record.own);
  join.shared = batch.At(record.shared);
  join.out = batch.MutableAt(record.out);
  join.type = record.type;
  join.shared_step = record.shared_step;
  join.out_step = record.out_step;
  join.rows = Rows(batch);
  join.heads = record.heads;
  join.own_dim = record.own_dim;
  join.shared_dim = record.shared_dim;
  return kernels::cuda::JoinKeys(batch.stream(), join);
}

absl::Status LaunchRunner::Start(const RouteRecord& record, CudaBatch& batch) const {
  kernels::cuda::RouteLaunch route;
  route.x = Of<float>(record.x, batch);
  route.norm = Vector(record.norm);
  route.router = Vector(record.router);
  route.bias = Vector(record.bias);
  route.selection_bias = Vector(record.selection_bias);
  route.expert = Of<int32_t>(record.expert, batch);
  route.weight = Of<float>(record.weight, batch);
  route.eps = record.eps;
  route.scale = record.scale;
  route.score = record.score;
  route.renormalise = record.renormalise;
  route.rows = Rows(batch);
  route.hidden = record.hidden;
  route.experts = record.experts;
  route.chosen = record.chosen;
  route.groups = record.groups;
  route.chosen_groups = record.chosen_groups;
  route.h = record.h.tensor != Tensor::kNone ? batch.MutableAt(record.h) : nullptr;
  route.type = record.type;
  return kernels::cuda::RouteExperts(batch.stream(), route);
}

absl::Status LaunchRunner::Start(const PlaceExpertsRecord& record, CudaBatch& batch) const {
  if (record.may_pair != 0 && kernels::cuda::MultipliesPairs(batch.rows, record.chosen, record.experts))
    return absl::OkStatus();
  kernels::cuda::PlaceLaunch place;
  place.expert = Of<int32_t>(record.expert, batch);
  place.slot = Of<int32_t>(record.slot, batch);
  place.member = Of<int32_t>(record.member, batch);
  place.tiles = Of<kernels::cuda::ExpertTile>(record.tiles, batch);
  place.pairs = static_cast<int32_t>(batch.rows * record.chosen);
  place.chosen = record.chosen;
  place.experts = record.experts;
  place.tile_rows = ExpertTileRows(place.pairs, place.experts, groups_ && record.may_group != 0, record.kept != 0);
  place.most_tiles = kernels::cuda::MostExpertTiles(place.pairs, place.experts, place.tile_rows);
  return kernels::cuda::PlaceExperts(batch.stream(), place);
}

kernels::cuda::ExpertGemmLaunch LaunchRunner::LaunchOf(const ExpertProductRecord& record, CudaBatch& batch) const {
  const CudaStep& step = StepOf(record.w);
  const int64_t pairs = batch.rows * record.chosen;
  kernels::cuda::ExpertGemmLaunch product;
  product.x = batch.At(record.x);
  product.member = Of<int32_t>(record.member, batch);
  product.bias = static_cast<const float*>(BiasOf(step, record.w.weight));
  product.y = batch.MutableAt(record.y);
  product.type = record.type;
  product.y_is_f32 = record.y_is_f32;
  product.tiles = Of<kernels::cuda::ExpertTile>(record.tiles, batch);
  product.tile_rows = ExpertTileRows(pairs, record.experts, groups_ && record.may_group != 0, record.kept != 0);
  product.most_tiles = kernels::cuda::MostExpertTiles(pairs, record.experts, product.tile_rows);
  product.n = static_cast<int32_t>(record.n);
  product.k = static_cast<int32_t>(record.k);
  product.experts = record.experts;
  return product;
}

absl::Status LaunchRunner::Multiply(const ExpertProductRecord& record, const kernels::cuda::ExpertGemmLaunch& product,
                                    CudaBatch& batch) const {
  return experts_.Run(batch.stream(), *WeightsOf(StepOf(record.w), record.w.weight), product, batch.rows);
}

absl::Status LaunchRunner::Start(const ExpertProductRecord& record, CudaBatch& batch) const {
  return Multiply(record, LaunchOf(record, batch), batch);
}

bool LaunchRunner::ByPair(const ExpertProductRecord& record, const Place& expert, const CudaBatch& batch) {
  return expert.tensor != Tensor::kNone && kernels::cuda::MultipliesPairs(batch.rows, record.chosen, record.experts);
}

absl::Status LaunchRunner::StartPairs(const GatedExpertsRecord& record, CudaBatch& batch) const {
  const CudaStep& step = StepOf(record.product.w);
  kernels::cuda::PairGateLaunch pairs;
  pairs.x = batch.At(record.product.x);
  pairs.expert = Of<int32_t>(record.expert, batch);
  pairs.w = WeightsOf(step, record.product.w.weight)->data();
  pairs.bias = static_cast<const float*>(BiasOf(step, record.product.w.weight));
  pairs.y = batch.MutableAt(record.activation.out);
  pairs.type = record.product.type;
  pairs.activation = ActivationOf(record.activation.kind);
  pairs.pairs = static_cast<int32_t>(batch.rows * record.product.chosen);
  pairs.chosen = record.product.chosen;
  pairs.size = static_cast<int32_t>(record.activation.size);
  pairs.k = static_cast<int32_t>(record.product.k);
  return kernels::cuda::GatePairs(batch.stream(), pairs);
}

absl::Status LaunchRunner::Start(const GatedExpertsRecord& record, CudaBatch& batch) const {
  if (ByPair(record.product, record.expert, batch)) return StartPairs(record, batch);
  kernels::cuda::ExpertGemmLaunch product = LaunchOf(record.product, batch);
  // Large tiles have no kernel for both with a bias. In order, small ones do without it, too: it rounds once less.
  const bool takes_bias = product.tile_rows != kernels::cuda::kGroupedTileRows && !product_.in_order();
  if (takes_bias || product.bias == nullptr) {
    product.y = batch.MutableAt(record.activation.out);
    product.activation = ActivationOf(record.activation.kind);
    return Multiply(record.product, product, batch);
  }
  DT_RETURN_IF_ERROR(Start(record.product, batch));
  return Start(record.activation, batch);
}

absl::Status LaunchRunner::Start(const SummedExpertsRecord& record, CudaBatch& batch) const {
  if (!ByPair(record.product, record.expert, batch)) {
    kernels::cuda::ExpertGemmLaunch product = LaunchOf(record.product, batch);
    product.follows_product = 1;
    DT_RETURN_IF_ERROR(Multiply(record.product, product, batch));
    return Start(record.sum, batch);
  }
  const CudaStep& step = StepOf(record.product.w);
  kernels::cuda::PairSumLaunch pairs;
  pairs.x = batch.At(record.product.x);
  pairs.expert = Of<int32_t>(record.expert, batch);
  pairs.weight = Of<float>(record.sum.weight, batch);
  pairs.w = WeightsOf(step, record.product.w.weight)->data();
  pairs.bias = static_cast<const float*>(BiasOf(step, record.product.w.weight));
  pairs.out = Of<float>(record.sum.out, batch);
  pairs.type = record.product.type;
  pairs.scale = record.sum.scale;
  pairs.rows = Rows(batch);
  pairs.chosen = record.product.chosen;
  pairs.n = static_cast<int32_t>(record.product.n);
  pairs.k = static_cast<int32_t>(record.product.k);
  return kernels::cuda::SumPairs(batch.stream(), pairs);
}

absl::Status LaunchRunner::Start(const ExpertSumRecord& record, CudaBatch& batch) const {
  kernels::cuda::ExpertSumLaunch sum;
  sum.y = Of<float>(record.y, batch);
  sum.slot = Of<int32_t>(record.slot, batch);
  sum.weight = Of<float>(record.weight, batch);
  sum.out = Of<float>(record.out, batch);
  sum.scale = record.scale;
  sum.rows = Rows(batch);
  sum.chosen = record.chosen;
  sum.size = static_cast<int32_t>(record.size);
  return kernels::cuda::SumExperts(batch.stream(), sum);
}

absl::Status LaunchRunner::Start(const GatedAddRecord& record, CudaBatch& batch) const {
  kernels::cuda::GatedAddLaunch add;
  add.h = batch.At(record.h);
  add.w = Vector(record.w);
  add.y = Of<float>(record.y, batch);
  add.x = Of<float>(record.x, batch);
  add.type = record.type;
  add.scale = record.scale;
  add.rows = Rows(batch);
  add.h_size = add.size = static_cast<int32_t>(record.size);
  return kernels::cuda::GatedAdd(batch.stream(), add);
}

}  // namespace dovetail::compute
