#include <algorithm>
#include <variant>

#include "compute_worker/cuda/cuda_hybrid.h"
#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/rows/row_ops.h"

// Experts on a GPU. Pairs (row, choice) are put in the order of their experts on the device; tiles of rows of one
// expert are multiplied by thread blocks that look up which. Nothing comes back to the host.

namespace dovetail::compute {

using kernels::cuda::ExpertTile;

namespace {

constexpr int64_t kElement = 2;
constexpr int kFewRows = 16, kManyRows = 64;  // of a tile

// Tiles of 64 rows where experts have about as many.
int TileRows(int64_t pairs, int64_t experts) { return pairs / experts >= 24 ? kManyRows : kFewRows; }

float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) {
  return buffer != nullptr ? reinterpret_cast<float*>(buffer->data()) : nullptr;
}
int32_t* Ints(const std::unique_ptr<kernels::Buffer>& buffer) { return reinterpret_cast<int32_t*>(buffer->data()); }

kernels::cuda::RouteScore ScoreOf(model::ExpertConfig::Score score) {
  switch (score) {
    case model::ExpertConfig::Score::kSoftmax: return kernels::cuda::RouteScore::kSoftmax;
    case model::ExpertConfig::Score::kSigmoid: return kernels::cuda::RouteScore::kSigmoid;
    case model::ExpertConfig::Score::kSoftmaxOfChosen: return kernels::cuda::RouteScore::kSoftmaxOfChosen;
  }
  return kernels::cuda::RouteScore::kSoftmax;
}

}  // namespace

absl::Status CudaHybrid::AllocateExperts() {
  const int64_t pairs = shape_.rows * widths_.chosen, rows = shape_.rows;
  if (widths_.experts == 0) return absl::OkStatus();
  const int64_t tiles = std::min(pairs, widths_.experts + pairs / kFewRows);
  DT_ASSIGN_OR_RETURN(chosen_, device_.Allocate(pairs * sizeof(int32_t)));
  DT_ASSIGN_OR_RETURN(route_weight_, device_.Allocate(pairs * sizeof(float)));
  DT_ASSIGN_OR_RETURN(slot_, device_.Allocate(pairs * sizeof(int32_t)));
  DT_ASSIGN_OR_RETURN(member_, device_.Allocate(pairs * sizeof(int32_t)));
  DT_ASSIGN_OR_RETURN(tiles_, device_.Allocate(tiles * sizeof(ExpertTile)));
  const int64_t gate_up = std::max(pairs * widths_.expert_gate_up, rows * widths_.shared_gate_up);
  const int64_t act = std::max(pairs * widths_.expert_act, rows * widths_.shared_gate_up);
  DT_ASSIGN_OR_RETURN(pair_gate_up_, device_.Allocate(gate_up * kElement));
  DT_ASSIGN_OR_RETURN(pair_act_, device_.Allocate(act * kElement));
  DT_ASSIGN_OR_RETURN(pair_out_, device_.Allocate(pairs * widths_.expert_out * sizeof(float)));
  DT_ASSIGN_OR_RETURN(experts_latent_, device_.Allocate(rows * widths_.experts_latent * kElement));
  DT_ASSIGN_OR_RETURN(experts_latent_sum_, device_.Allocate(rows * widths_.experts_latent * sizeof(float)));
  DT_ASSIGN_OR_RETURN(aside_, device_.Allocate(rows * hidden() * sizeof(float)));
  return absl::OkStatus();
}

absl::Status CudaHybrid::Route(size_t index, const float* x, const float* norm, int64_t rows) {
  const auto& step = std::get<model::ExpertMlp>(model_.steps[index]);
  const CudaHybridWeights& weights = *weights_[index];
  kernels::cuda::RouteLaunch route;
  route.x = x;
  route.norm = norm;
  route.router = Floats(weights.router);
  route.bias = Floats(weights.router_bias);
  route.selection_bias = Floats(weights.selection_bias);
  route.expert = Ints(chosen_);
  route.weight = Floats(route_weight_);
  route.eps = step.norm.eps;
  route.scale = step.route_scale;
  route.score = ScoreOf(step.score);
  route.renormalise = step.renormalise;
  route.rows = static_cast<int32_t>(rows);
  route.hidden = static_cast<int32_t>(hidden());
  route.experts = static_cast<int32_t>(step.experts.size());
  route.chosen = step.chosen;
  route.groups = step.groups;
  route.chosen_groups = step.chosen_groups;
  DT_RETURN_IF_ERROR(kernels::cuda::RouteExperts(stream_, route));
  kernels::cuda::PlaceLaunch place;
  place.expert = Ints(chosen_);
  place.slot = Ints(slot_);
  place.member = Ints(member_);
  place.tiles = reinterpret_cast<ExpertTile*>(tiles_->data());
  place.pairs = static_cast<int32_t>(rows * step.chosen);
  place.chosen = step.chosen;
  place.experts = route.experts;
  place.tile_rows = TileRows(place.pairs, place.experts);
  place.most_tiles = kernels::cuda::MostExpertTiles(place.pairs, place.experts, place.tile_rows);
  return kernels::cuda::PlaceExperts(stream_, place);
}

// pair_out_ by slot.
absl::Status CudaHybrid::RunPairs(const model::ExpertMlp& step, const CudaHybridWeights& weights, const void* in,
                                  int64_t width, int64_t rows) {
  const auto experts = static_cast<int64_t>(step.experts.size());
  const int64_t pairs = rows * step.chosen, inner = weights.expert_down.cols();
  kernels::cuda::ExpertGemmLaunch product;
  product.type = shape_.type;
  product.tiles = reinterpret_cast<const ExpertTile*>(tiles_->data());
  product.tile_rows = TileRows(pairs, experts);
  product.most_tiles = kernels::cuda::MostExpertTiles(pairs, static_cast<int>(experts), product.tile_rows);
  product.x = in;
  product.member = Ints(member_);
  product.w = weights.expert_gate_up.data();
  product.bias = Floats(weights.expert_gate_up_bias);
  product.y = pair_gate_up_->data();
  product.n = static_cast<int32_t>(weights.expert_gate_up.rows() / experts);
  product.k = static_cast<int32_t>(width);
  DT_RETURN_IF_ERROR(kernels::cuda::MultiplyExperts(stream_, product));
  DT_RETURN_IF_ERROR(Activate(step.activation, pair_gate_up_->data(), pair_act_->data(), pairs, inner));
  product.x = pair_act_->data();
  product.member = nullptr;
  product.w = weights.expert_down.data();
  product.bias = Floats(weights.expert_down_bias);
  product.y = pair_out_->data();
  product.y_is_f32 = 1;
  product.n = static_cast<int32_t>(weights.expert_down.rows() / experts);
  product.k = static_cast<int32_t>(inner);
  return kernels::cuda::MultiplyExperts(stream_, product);
}

absl::Status CudaHybrid::AddProduct(const CudaProjection& w, const void* in, int64_t rows, float scale, float* out) {
  if (scale == 1) return Multiply(w, in, rows, Result::kAdded, out);
  DT_RETURN_IF_ERROR(Multiply(w, in, rows, Result::kF32, aside_->data()));
  kernels::cuda::CombineLaunch sum;
  sum.a = sum.out = out;
  sum.b = aside_->data();
  sum.b_factor = scale;
  sum.count = rows * hidden();
  return kernels::cuda::Combine(stream_, sum);
}

absl::Status CudaHybrid::AddShared(const model::ExpertMlp& step, const CudaHybridWeights& weights, const void* h,
                                   float* x, int64_t rows) {
  const int64_t inner = weights.shared_down.weights.cols();
  DT_RETURN_IF_ERROR(Multiply(weights.shared_gate_up, h, rows, Result::kWire, pair_gate_up_->data()));
  DT_RETURN_IF_ERROR(Activate(step.activation, pair_gate_up_->data(), pair_act_->data(), rows, inner));
  if (!step.shared_gate.has_value()) return AddProduct(weights.shared_down, pair_act_->data(), rows, step.scale, x);
  DT_RETURN_IF_ERROR(Multiply(weights.shared_down, pair_act_->data(), rows, Result::kF32, aside_->data()));
  kernels::cuda::GatedAddLaunch add;
  add.h = h;
  add.w = Floats(weights.shared_gate);
  add.y = Floats(aside_);
  add.x = x;
  add.type = shape_.type;
  add.scale = step.scale;
  add.rows = static_cast<int32_t>(rows);
  add.h_size = add.size = static_cast<int32_t>(hidden());
  return kernels::cuda::GatedAdd(stream_, add);
}

absl::Status CudaHybrid::RunExperts(size_t index, const void* h, float* x, int64_t rows) {
  const auto& step = std::get<model::ExpertMlp>(model_.steps[index]);
  const CudaHybridWeights& weights = *weights_[index];
  kernels::cuda::ExpertSumLaunch sum;
  sum.y = Floats(pair_out_);
  sum.slot = Ints(slot_);
  sum.weight = Floats(route_weight_);
  sum.rows = static_cast<int32_t>(rows);
  sum.chosen = step.chosen;
  if (step.latent_down.has_value()) {
    const int64_t latent = weights.experts_latent_down.weights.rows();
    DT_RETURN_IF_ERROR(Multiply(weights.experts_latent_down, h, rows, Result::kWire, experts_latent_->data()));
    DT_RETURN_IF_ERROR(RunPairs(step, weights, experts_latent_->data(), latent, rows));
    DT_RETURN_IF_ERROR(stream_.Fill(experts_latent_sum_->data(), 0, rows * latent * sizeof(float)));
    sum.out = Floats(experts_latent_sum_);
    sum.size = static_cast<int32_t>(latent);
    DT_RETURN_IF_ERROR(kernels::cuda::SumExperts(stream_, sum));
    kernels::cuda::CombineLaunch round;
    round.a = experts_latent_sum_->data();
    round.out = experts_latent_->data();
    round.out_type = shape_.type;
    round.count = rows * latent;
    DT_RETURN_IF_ERROR(kernels::cuda::Combine(stream_, round));
    DT_RETURN_IF_ERROR(AddProduct(weights.experts_latent_up, experts_latent_->data(), rows, step.scale, x));
  } else {
    DT_RETURN_IF_ERROR(RunPairs(step, weights, h, hidden(), rows));
    sum.out = x;
    sum.size = static_cast<int32_t>(hidden());
    sum.scale = step.scale;
    DT_RETURN_IF_ERROR(kernels::cuda::SumExperts(stream_, sum));
  }
  return step.shared.has_value() ? AddShared(step, weights, h, x, rows) : absl::OkStatus();
}

}  // namespace dovetail::compute
