#pragma once
#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/rows/activation_args.h"
#include "kernels/cuda/state/layer_args.h"
#include "kernels/cuda/wire_type.h"

namespace dovetail::compute {

// What a dense step launches on a GPU, as data: one record a kernel, with everything that its launch depends on but the
// number of rows and where the memory lies. Memory and weights have names. Records are made once, at load (lower.h),
// rewritten by rules (fuse.h) and launched again in every step (launch_runner.h).
//
// Records are plain structs without padding, so their bytes are their value, and a recorded graph's key
// (launch_list.h).
// Shapes: matrices are row by row.
// Units: sizes, widths and steps count elements; `at`, `row` and `row_bytes` bytes.
// Threads: values, thread-safe.

// A float that is equal where its bits are.
struct Real {
  uint32_t bits = 0;
  constexpr Real() = default;
  constexpr Real(float value) : bits(std::bit_cast<uint32_t>(value)) {}  // NOLINT: is one
  constexpr operator float() const { return std::bit_cast<float>(bits); }
};

// Memory of a step by name. Rows are those of the step unless said otherwise.
enum class Tensor : int32_t {
  kNone,
  // The micro-batch's.
  kX,         // the residual stream, [rows, hidden] f32
  kParts,     // what the next norm adds to it, [parts, padded rows, hidden] f32
  kQuery,     // [rows, query heads * key_dim]
  kKeyValue,  // k [rows, KV heads * key_dim], then v likewise, then a state's gates in f32
  kInput,     // of hybrids: h of the layer, kept for gates and for a second op of the layer
  // Its lane's: written and read by the same piece.
  kH,        // [rows, hidden]
  kQkv,      // rows of [q | k | v]
  kGateUp,   // [rows, 2 * intermediate]; read once
  kAct,      // [rows, intermediate]
  kAside,    // [rows, hidden] f32, a product before it is normed or scaled; a sum into x reads it last
  kArrived,  // o of an op, where the seam says that it lies
  // Of hybrids and experts, by their names there (cuda_hybrid.h).
  kHeads,
  kFactor,
  kLow,
  kGates,
  kRates,
  kGate,
  kGated,
  kLatent,
  kLatentOwn,
  kChosen,
  kRouteWeight,
  kSlot,
  kMember,
  kTiles,
  kPairGateUp,
  kPairAct,
  kPairOut,
  kExpertsLatent,
  kExpertsLatentSum,
  kExpertsAside,  // as kAside
  kCount
};
inline constexpr size_t kTensors = static_cast<size_t>(Tensor::kCount);

// Byte at + rows * row of a tensor, rounded up to a multiple of `align`.
struct Place {
  Tensor tensor = Tensor::kNone;
  int32_t align = 1;
  int64_t at = 0, row = 0;
  bool operator==(const Place&) const = default;
};
constexpr int64_t ByteOf(const Place& place, int64_t rows) {
  return (place.at + rows * place.row + place.align - 1) / place.align * place.align;
}

// A step's weights by name, as CudaStep and CudaHybridWeights have them (cuda_model.h, cuda_hybrid_model.h).
enum class Weight : int32_t {
  kNone,
  // Products'.
  kFirst,
  kSecond,
  kDecayLow,
  kDecay,
  kRate,
  kVFactor,
  kLatentDown,
  kLatentK,
  kLatentV,
  kGateLow,
  kGate,
  kExpertGateUp,
  kExpertDown,
  kExpertsLatentDown,
  kExpertsLatentUp,
  kSharedGateUp,
  kSharedDown,
  // Vectors and matrices in f32.
  kNorm,
  kPostNorm,
  kQNorm,
  kKNorm,
  kDecayBias,
  kDecayFactor,
  kLatentNorm,
  kGateNorm,
  kRouter,
  kRouterBias,
  kSelectionBias,
  kSharedGate,
};
struct WeightName {
  Weight weight = Weight::kNone;
  int32_t step = -1;  // of the model
  bool operator==(const WeightName&) const = default;
};

using kernels::cuda::WireType;

enum class ProductResult : int32_t { kWire, kF32, kAdded };  // in 16 bits, in f32, added to what is there in f32

// y = x w^T + bias, in `parts` parts along k that are still to be summed, for padded rows.
struct ProductRecord {
  Place x, y;
  WeightName w;
  int64_t n = 0, k = 0, y_step = 0;
  ProductResult result = ProductResult::kWire;
  int32_t parts = 1;
  int32_t kept = 0, biased = 0;  // the weights are in 4 or 8 bits; they have a bias
};

// out = norm(x) over `size`. With parts: x += those of kParts first.
struct NormRecord {
  Place x, out;
  WeightName w;
  int64_t x_step = 0, out_step = 0, size = 0;
  WireType x_type = WireType::kF32, out_type = WireType::kBF16;
  Real eps;
  int32_t parts = 0;
};

// out = a_factor a + b_factor b for `width` elements a row; b is f32, or none.
struct CombineRecord {
  Place a, b, out;
  WireType a_type = WireType::kF32, out_type = WireType::kF32;
  Real a_factor = 1.0f, b_factor = 1.0f;
  int64_t width = 0;
};

struct CopyRecord {
  Place from, to;
  int64_t row_bytes = 0;
};

struct ClearRecord {
  Place at;
  int64_t row_bytes = 0;
};

// out = act(gate) * up of rows of [gate | up].
struct GatedActivationRecord {
  Place gate_up, out;
  int64_t size = 0;
  WireType type = WireType::kBF16;
  int32_t gelu = 0;
};

// The same of other activations (MlpKind), for `times` rows a row.
struct MlpActivationRecord {
  Place gate_up, out;
  int64_t size = 0, times = 1;
  WireType type = WireType::kBF16;
  kernels::cuda::MlpKind kind = kernels::cuda::MlpKind::kSilu;
};

// Both products of a gated MLP and its activation in one kernel; where that is not for so many rows or for the GPU, one
// after the other.
struct GatedProductRecord {
  ProductRecord product;
  GatedActivationRecord activation;
};

// q, k and v of a softmax op, normed by head and rotated, to where they leave from, or to where the seam says.
struct HeadsRecord {
  Place qkv, q_out, k_out, v_out;
  WeightName q_norm, k_norm;
  int64_t qkv_step = 0, q_step = 0, k_step = 0, v_step = 0;
  Real eps;
  WireType type = WireType::kBF16;
  int32_t op = 0, rope = -1;  // of the config; -1: none
  int32_t q_heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
};

// Not a kernel of ours: what the way across the seam does there (cuda_crossing.h).
enum class SeamCall : int32_t { kBeforeHeads, kLeave, kArrive };
struct SeamRecord {
  SeamCall call = SeamCall::kBeforeHeads;
  int32_t op = 0;
};

// Arguments as in layer_args.h.
struct StateInputsRecord {
  Place qkv, v_factor, q, k, v;
  int64_t q_width = 0, k_width = 0, v_width = 0;
  WireType type = WireType::kBF16;
  int32_t silu = 0;
};
struct StateGatesRecord {
  Place x, rate, out;
  WeightName bias, factor;
  Real scale = 1.0f, low, high, rate_scale = 1.0f;
  int32_t step_is_rate = 0, heads = 0, width = 1, stride = 0;
};
struct OutputGateRecord {
  Place x, gate, out;
  WeightName w;
  WireType type = WireType::kBF16;
  kernels::cuda::GateKind kind = kernels::cuda::GateKind::kNone;
  Real scale = 1.0f, eps;
  int32_t gate_first = 0, weight_each = 0, width = 0, size = 0;
};

// As in append_args.h.
struct JoinKeysRecord {
  Place own, shared, out;
  int64_t shared_step = 0, out_step = 0;
  WireType type = WireType::kBF16;
  int32_t heads = 0, own_dim = 0, shared_dim = 0;
};

// As in expert_args.h; how many rows a tile has follows from the rows of the step.
struct RouteRecord {
  Place x, expert, weight, h;  // h: where the normed row goes, in `type`; none: nowhere
  WeightName norm, router, bias, selection_bias;
  Real eps, scale = 1.0f;
  kernels::cuda::RouteScore score = kernels::cuda::RouteScore::kSoftmax;
  int32_t renormalise = 1;
  int32_t hidden = 0, experts = 0, chosen = 0, groups = 1, chosen_groups = 1;
  WireType type = WireType::kBF16;
};
// Nothing where the products that follow are by pair.
struct PlaceExpertsRecord {
  Place expert, slot, member, tiles;
  int32_t experts = 0, chosen = 0;
  int32_t may_group = 0;  // kGroupedTileRows fit the products (expert_ops.h)
  int32_t may_pair = 0;   // those of few rows are by pair
  int64_t kept = 0;       // weights of one of them are in 4 or 8 bits
};
struct ExpertProductRecord {
  Place x, member, y, tiles;
  WeightName w;  // with its bias
  int64_t n = 0, k = 0;
  int32_t may_group = 0, kept = 0;  // as the places have them
  int32_t experts = 0, chosen = 0;
  WireType type = WireType::kBF16;
  int32_t y_is_f32 = 0;
};
struct ExpertSumRecord {
  Place y, slot, weight, out;
  int64_t size = 0;
  Real scale = 1.0f;
  int32_t chosen = 0;
};
// The products of all gated experts' halves, and their activation: one kernel, but for tiles of kGroupedTileRows with a
// bias.
struct GatedExpertsRecord {
  ExpertProductRecord product;
  MlpActivationRecord activation;
  Place expert;  // of pairs; none: never by pair
};
// The second products, which follow the first ones, and their sum: one kernel by pair.
struct SummedExpertsRecord {
  ExpertProductRecord product;
  ExpertSumRecord sum;
  Place expert;  // as the first ones have it
};
struct GatedAddRecord {
  Place h, y, x;
  WeightName w;
  int64_t size = 0;
  WireType type = WireType::kBF16;
  Real scale = 1.0f;
};

using LaunchRecord =
    std::variant<ProductRecord, NormRecord, CombineRecord, CopyRecord, ClearRecord, GatedActivationRecord,
                 MlpActivationRecord, GatedProductRecord, HeadsRecord, SeamRecord, StateInputsRecord, StateGatesRecord,
                 OutputGateRecord, JoinKeysRecord, RouteRecord, PlaceExpertsRecord, ExpertProductRecord,
                 GatedExpertsRecord, ExpertSumRecord, SummedExpertsRecord, GatedAddRecord>;

}  // namespace dovetail::compute
