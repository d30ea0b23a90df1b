// Lowering of experts. Pairs (row, choice) are put in the order of their experts on the device; tiles of rows of one
// expert are multiplied by thread blocks that look up which. Nothing comes back to the host.
#include "compute_worker/cuda/lowering.h"
#include "kernels/cuda/experts/expert_ops.h"

namespace dovetail::compute {
namespace {

kernels::cuda::RouteScore ScoreOf(model::ExpertConfig::Score score) {
  switch (score) {
    case model::ExpertConfig::Score::kSoftmax: return kernels::cuda::RouteScore::kSoftmax;
    case model::ExpertConfig::Score::kSigmoid: return kernels::cuda::RouteScore::kSigmoid;
    case model::ExpertConfig::Score::kSoftmaxOfChosen: return kernels::cuda::RouteScore::kSoftmaxOfChosen;
  }
  return kernels::cuda::RouteScore::kSoftmax;
}

}  // namespace

absl::Status Lowering::Add(const model::ExpertMlp& step) {
  // The router reads x before it may begin anew, and unrounded: experts that are close would change places.
  AddRoute(step);
  AddInput(step.norm, step.restart);
  ExpertSumRecord sum{
      .y = At(Tensor::kPairOut), .slot = At(Tensor::kSlot), .weight = At(Tensor::kRouteWeight), .chosen = step.chosen};
  if (step.latent_down.has_value()) {
    const int64_t latent = ShapeOf(Weight::kExpertsLatentDown).rows;
    AddProduct(Weight::kExpertsLatentDown, At(Tensor::kH), At(Tensor::kExpertsLatent), ProductResult::kWire);
    AddPairs(step, Tensor::kExpertsLatent, latent);
    Emit(ClearRecord{.at = At(Tensor::kExpertsLatentSum), .row_bytes = latent * static_cast<int64_t>(sizeof(float))});
    sum.out = At(Tensor::kExpertsLatentSum);
    sum.size = latent;
    Emit(sum);
    Emit(CombineRecord{.a = At(Tensor::kExpertsLatentSum),
                       .out = At(Tensor::kExpertsLatent),
                       .out_type = input_.type,
                       .width = latent});
    AddScaled(Weight::kExpertsLatentUp, At(Tensor::kExpertsLatent), std::nullopt, step.scale, Tensor::kExpertsAside);
  } else {
    AddPairs(step, Tensor::kH, hidden());
    sum.out = At(Tensor::kX);
    sum.size = hidden();
    sum.scale = step.scale;
    Emit(sum);
  }
  if (step.shared.has_value()) AddShared(step);
  return absl::OkStatus();
}

void Lowering::AddRoute(const model::ExpertMlp& step) {
  const auto experts = static_cast<int32_t>(step.experts.size());
  Emit(RouteRecord{.x = At(Tensor::kX),
                   .expert = At(Tensor::kChosen),
                   .weight = At(Tensor::kRouteWeight),
                   .norm = Name(Weight::kNorm),
                   .router = Name(Weight::kRouter),
                   .bias = NameIf(!step.router.bias.empty(), Weight::kRouterBias),
                   .selection_bias = NameIf(!step.selection_bias.empty(), Weight::kSelectionBias),
                   .eps = step.norm.eps,
                   .scale = step.route_scale,
                   .score = ScoreOf(step.score),
                   .renormalise = step.renormalise,
                   .hidden = static_cast<int32_t>(hidden()),
                   .experts = experts,
                   .chosen = step.chosen,
                   .groups = step.groups,
                   .chosen_groups = step.chosen_groups});
  Emit(PlaceExpertsRecord{.expert = At(Tensor::kChosen),
                          .slot = At(Tensor::kSlot),
                          .member = At(Tensor::kMember),
                          .tiles = At(Tensor::kTiles),
                          .experts = experts,
                          .chosen = step.chosen,
                          .may_group = MayGroup(experts),
                          .kept = KeepsExperts()});
}

// Both products of a step have the same tiles.
int32_t Lowering::MayGroup(int64_t experts) const {
  for (const Weight weight : {Weight::kExpertGateUp, Weight::kExpertDown}) {
    const WeightShape shape = ShapeOf(weight);
    if (!kernels::cuda::FitsGroupedTiles(shape.rows / experts, shape.cols)) return 0;
  }
  return 1;
}

int32_t Lowering::KeepsExperts() const {
  return ShapeOf(Weight::kExpertGateUp).kept || ShapeOf(Weight::kExpertDown).kept ? 1 : 0;
}

// kPairOut by slot.
void Lowering::AddPairs(const model::ExpertMlp& step, Tensor in, int64_t width) {
  const auto experts = static_cast<int32_t>(step.experts.size());
  const WeightShape down = ShapeOf(Weight::kExpertDown);
  Emit(ExpertProductRecord{.x = At(in),
                           .member = At(Tensor::kMember),
                           .y = At(Tensor::kPairGateUp),
                           .tiles = At(Tensor::kTiles),
                           .w = Name(Weight::kExpertGateUp),
                           .n = ShapeOf(Weight::kExpertGateUp).rows / experts,
                           .k = width,
                           .may_group = MayGroup(experts),
                           .kept = KeepsExperts(),
                           .experts = experts,
                           .chosen = step.chosen,
                           .type = input_.type});
  AddActivation(step.activation, Tensor::kPairGateUp, Tensor::kPairAct, down.cols, step.chosen);
  Emit(ExpertProductRecord{.x = At(Tensor::kPairAct),
                           .y = At(Tensor::kPairOut),
                           .tiles = At(Tensor::kTiles),
                           .w = Name(Weight::kExpertDown),
                           .n = down.rows / experts,
                           .k = down.cols,
                           .may_group = MayGroup(experts),
                           .kept = KeepsExperts(),
                           .experts = experts,
                           .chosen = step.chosen,
                           .type = input_.type,
                           .y_is_f32 = 1});
}

void Lowering::AddShared(const model::ExpertMlp& step) {
  AddProduct(Weight::kSharedGateUp, At(Tensor::kH), At(Tensor::kPairGateUp), ProductResult::kWire);
  AddActivation(step.activation, Tensor::kPairGateUp, Tensor::kPairAct, ShapeOf(Weight::kSharedDown).cols, /*times=*/1);
  if (!step.shared_gate.has_value())
    return AddScaled(Weight::kSharedDown, At(Tensor::kPairAct), std::nullopt, step.scale, Tensor::kExpertsAside);
  AddProduct(Weight::kSharedDown, At(Tensor::kPairAct), At(Tensor::kExpertsAside), ProductResult::kF32);
  Emit(GatedAddRecord{.h = At(Tensor::kH),
                      .y = At(Tensor::kExpertsAside),
                      .x = At(Tensor::kX),
                      .w = Name(Weight::kSharedGate),
                      .size = hidden(),
                      .type = input_.type,
                      .scale = step.scale});
}

}  // namespace dovetail::compute
