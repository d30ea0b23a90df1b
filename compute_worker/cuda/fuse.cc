#include "compute_worker/cuda/fuse.h"

#include <variant>

namespace dovetail::compute {
namespace {

constexpr int64_t kRunElements = 8;  // of 16 bytes

template <typename Record>
Record* RecordAt(LaunchList& list, size_t at) {
  return at < list.size() ? std::get_if<Record>(&list[at].record) : nullptr;
}

void Erase(LaunchList& list, size_t at) { list.erase(list.begin() + static_cast<std::ptrdiff_t>(at)); }

// A product and the sum of it into x: the product adds.
bool SumIntoX(LaunchList& list, size_t at, const FuseFor&) {
  auto* const product = RecordAt<ProductRecord>(list, at);
  const auto* const sum = RecordAt<CombineRecord>(list, at + 1);
  if (product == nullptr || sum == nullptr) return false;
  const bool is_sum = sum->a == sum->out && sum->b == product->y && sum->a_type == WireType::kF32 &&
                      sum->out_type == WireType::kF32 && sum->a_factor == 1.0f && sum->b_factor == 1.0f;
  const bool is_whole = product->n == sum->width && product->y_step == product->n && product->parts == 1;
  if (!is_sum || !is_whole || product->result != ProductResult::kF32 || sum->out.tensor != Tensor::kX) return false;
  product->y = sum->out;
  product->result = ProductResult::kAdded;
  Erase(list, at + 1);
  return true;
}

// A product that adds to x, and the norm that reads x next: the product leaves parts, and the norm sums them. Those of
// experts add by themselves: for them it was not measured.
bool SumInNorm(LaunchList& list, size_t at, const FuseFor& shape) {
  auto* const product = RecordAt<ProductRecord>(list, at);
  auto* const norm = RecordAt<NormRecord>(list, at + 1);
  if (product == nullptr || norm == nullptr || shape.parts == 1) return false;
  const bool adds = product->result == ProductResult::kAdded && product->parts == 1 &&
                    product->y == Place{.tensor = Tensor::kX} && product->n == norm->size;
  const bool divides = product->kept == 0 && product->biased == 0 && product->k % (shape.parts * kRunElements) == 0;
  const bool reads_x = norm->x == product->y && norm->x_type == WireType::kF32 && norm->x_step == norm->size;
  const bool is_dense = product->w.weight == Weight::kFirst || product->w.weight == Weight::kSecond;
  if (!adds || !divides || !reads_x || !is_dense || norm->parts > 0) return false;
  product->y = {.tensor = Tensor::kParts};
  product->result = ProductResult::kF32;
  product->parts = norm->parts = shape.parts;
  return true;
}

// The products of a gated MLP's halves, and its activation.
bool GateProduct(LaunchList& list, size_t at, const FuseFor&) {
  const auto* const product = RecordAt<ProductRecord>(list, at);
  const auto* const activation = RecordAt<GatedActivationRecord>(list, at + 1);
  if (product == nullptr || activation == nullptr) return false;
  const bool is_gate_up = activation->gate_up == product->y && product->n == 2 * activation->size &&
                          product->y_step == product->n && product->result == ProductResult::kWire;
  if (!is_gate_up || product->kept != 0 || product->biased != 0) return false;
  list[at].record = GatedProductRecord{*product, *activation};
  Erase(list, at + 1);
  return true;
}

// The products of all gated experts' halves, and their activation.
bool GateExperts(LaunchList& list, size_t at, const FuseFor&) {
  const auto* const product = RecordAt<ExpertProductRecord>(list, at);
  const auto* const activation = RecordAt<MlpActivationRecord>(list, at + 1);
  if (product == nullptr || activation == nullptr) return false;
  const bool is_gate_up = activation->gate_up == product->y && product->n == 2 * activation->size &&
                          activation->times == product->chosen && product->y_is_f32 == 0;
  const bool is_known =
      activation->kind == kernels::cuda::MlpKind::kSilu || activation->kind == kernels::cuda::MlpKind::kGeluTanh;
  if (!is_gate_up || !is_known || (product->may_group == 0 && product->kept == 0)) return false;
  list[at].record = GatedExpertsRecord{*product, *activation, {}};
  Erase(list, at + 1);
  return true;
}

// A router, and the norm of the row that it has normed: it leaves that.
bool NormInRoute(LaunchList& list, size_t at, const FuseFor&) {
  auto* const route = RecordAt<RouteRecord>(list, at);
  const auto* const place = RecordAt<PlaceExpertsRecord>(list, at + 1);
  const auto* const norm = RecordAt<NormRecord>(list, at + 2);
  if (route == nullptr || place == nullptr || norm == nullptr || route->h.tensor != Tensor::kNone) return false;
  const bool is_same = norm->x == route->x && norm->w == route->norm && norm->eps == route->eps &&
                       norm->size == route->hidden && norm->x_type == WireType::kF32 && norm->parts == 0;
  const bool is_whole = norm->x_step == norm->size && norm->out_step == norm->size;
  if (!is_same || !is_whole || norm->out_type == WireType::kF32) return false;
  route->h = norm->out;
  route->type = norm->out_type;
  Erase(list, at + 2);
  return true;
}

// Places of pairs, gated experts, their second products and the sum: few rows do without places, unless weights are in
// few bits, or sums are made in one order: those of pairs have another than those of tiles.
bool PairExperts(LaunchList& list, size_t at, const FuseFor& shape) {
  auto* const place = RecordAt<PlaceExpertsRecord>(list, at);
  auto* const gated = RecordAt<GatedExpertsRecord>(list, at + 1);
  const auto* const product = RecordAt<ExpertProductRecord>(list, at + 2);
  const auto* const sum = RecordAt<ExpertSumRecord>(list, at + 3);
  if (place == nullptr || gated == nullptr || product == nullptr || sum == nullptr) return false;
  const bool is_gated = gated->product.tiles == place->tiles && gated->product.member == place->member;
  const bool is_second = product->tiles == place->tiles && product->x == gated->activation.out &&
                         product->member.tensor == Tensor::kNone && product->y_is_f32 != 0;
  const bool is_sum = sum->y == product->y && sum->slot == place->slot && sum->size == product->n;
  if (!is_gated || !is_second || !is_sum) return false;
  const bool may_pair = place->kept == 0 && !shape.in_order;
  const Place expert = may_pair ? place->expert : Place{};
  place->may_pair = may_pair ? 1 : 0;
  gated->expert = expert;
  list[at + 2].record = SummedExpertsRecord{*product, *sum, expert};
  Erase(list, at + 3);
  return true;
}

constexpr FusionRule kRules[] = {
    {"a product adds to x", SumIntoX},
    {"the next norm sums a product's parts", SumInNorm},
    {"a gated MLP's first half is one kernel", GateProduct},
    {"the first half of gated experts is one kernel", GateExperts},
    {"a router leaves the row that it has normed", NormInRoute},
    {"few rows' experts are multiplied pair by pair", PairExperts},
};

}  // namespace

std::span<const FusionRule> FusionRules() { return kRules; }

LaunchList Fuse(LaunchList list, const FuseFor& shape, std::span<const FusionRule> rules) {
  for (const FusionRule& rule : rules)
    for (size_t at = 0; at < list.size(); ++at) rule.apply(list, at, shape);
  return list;
}

LaunchList Fuse(LaunchList list, const FuseFor& shape) { return Fuse(std::move(list), shape, kRules); }

}  // namespace dovetail::compute
