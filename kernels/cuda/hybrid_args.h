#pragma once
#include <cstdint>

#include "kernels/cuda/attention_args.h"

namespace dovetail::kernels::cuda {

// Parameters of the small kernels around linear states, and of experts: device pointers, plain structs. Matrices are
// row by row; steps are in elements.

// q, k and v of one product go to tensors of their own: silu of each, or v times another product, or as they are.
struct StateInputsLaunch {
  const void* qkv = nullptr;       // [rows][q_width + k_width + v_width]
  const void* v_factor = nullptr;  // [rows][v_width] or null
  void *q = nullptr, *k = nullptr, *v = nullptr;  // dense
  WireType type = WireType::kBF16;
  int32_t silu = 0;
  int32_t rows = 0;
  int64_t q_width = 0, k_width = 0, v_width = 0;
};

// What a token brings to its state, [rows][heads][stride] f32 (state_gates.h): logarithms of decays from step sizes,
// log = factor clamp(softplus(scale x + bias), low, high), at 0 .. width; behind them the rate: the step size itself,
// or rate_scale sigmoid(rate).
struct StateGatesLaunch {
  const float* x = nullptr;       // [rows][heads * width]
  const float* bias = nullptr;    // [heads * width]
  const float* factor = nullptr;  // [heads * width]
  const float* rate = nullptr;    // [rows][heads] or null
  float* out = nullptr;
  float scale = 1, low = 0, high = 3e38f, rate_scale = 1;
  int32_t step_is_rate = 0;
  int32_t rows = 0, heads = 0, width = 1, stride = 0;
};

enum class GateKind : int32_t { kSigmoid = 0, kSilu = 1, kPlain = 2, kNone = 3 };

// out = norm(x) * act(scale gate), or norm(x * act(scale gate)); the norm over vectors of `size`, or none.
struct OutputGateLaunch {
  const void* x = nullptr;         // [rows][width]
  const void* gate = nullptr;      // [rows][width] or null
  const float* weight = nullptr;   // or null: no norm
  void* out = nullptr;             // may be x
  WireType type = WireType::kBF16;
  GateKind kind = GateKind::kNone;
  float scale = 1, eps = 0;
  int32_t gate_first = 0;
  int32_t weight_each = 0;         // the weight is as wide as a row; else `size`, for every vector
  int32_t rows = 0, width = 0, size = 0;
};

// Keys from a latent: head h of row r is [own of it | the shared ones].
struct JoinKeysLaunch {
  const void* own = nullptr;       // [rows][heads][own_dim]
  const void* shared = nullptr;    // [rows], shared_dim of them
  void* out = nullptr;             // [rows] of [heads][own_dim + shared_dim]
  WireType type = WireType::kBF16;
  int64_t shared_step = 0, out_step = 0;
  int32_t rows = 0, heads = 0, own_dim = 0, shared_dim = 0;
};

enum class MlpKind : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kRelu2 = 3 };

// out = act(gate) * up; kRelu2: relu(up)^2 (activation.h).
struct MlpActivationLaunch {
  const void* gate_up = nullptr;   // [rows][2 size]: gate, then up; kRelu2: [rows][size]
  void* out = nullptr;             // [rows][size]
  WireType type = WireType::kBF16;
  MlpKind kind = MlpKind::kSilu;
  int32_t rows = 0, size = 0;
};

enum class RouteScore : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxOfChosen = 2 };

// Which experts serve a row, and with what weight (moe.h), from h = norm(x) in f32.
struct RouteLaunch {
  const float* x = nullptr;            // [rows][hidden]
  const float* norm = nullptr;         // [hidden]
  const float* router = nullptr;       // [experts][hidden]
  const float* bias = nullptr;         // [experts] or null
  const float* selection_bias = nullptr;
  int32_t* expert = nullptr;           // [rows][chosen]
  float* weight = nullptr;             // [rows][chosen]
  float eps = 0, scale = 1;
  RouteScore score = RouteScore::kSoftmax;
  int32_t renormalise = 1;
  int32_t rows = 0, hidden = 0, experts = 0, chosen = 0;
  int32_t groups = 1, chosen_groups = 1;  // as in RouteArgs
};

// Rows of one expert that one thread block multiplies.
struct ExpertTile {
  int32_t expert = 0, first = 0, rows = 0;  // slots [first, first + rows)
};

// Pairs (row, choice) in the order of their experts: a pair's place is its slot.
struct PlaceLaunch {
  const int32_t* expert = nullptr;  // [pairs]
  int32_t* slot = nullptr;          // [pairs]
  int32_t* member = nullptr;        // [pairs], by slot: the pair's row
  ExpertTile* tiles = nullptr;      // [most_tiles]; those behind the last have no rows
  int32_t pairs = 0, chosen = 0, experts = 0, tile_rows = 0, most_tiles = 0;
};

// y[slot] = x[row of slot] w[expert of slot]^T + bias[expert].
struct ExpertGemmLaunch {
  const void* x = nullptr;          // 16 bits; by row where `member` is given, else by slot
  const int32_t* member = nullptr;
  const void* w = nullptr;          // [experts][n][k]
  const float* bias = nullptr;      // [experts][n] or null
  void* y = nullptr;                // [pairs][n]
  WireType type = WireType::kBF16;
  int32_t y_is_f32 = 0;
  const ExpertTile* tiles = nullptr;
  int32_t most_tiles = 0, tile_rows = 0;  // 16 or 64
  int32_t n = 0, k = 0;             // k: a multiple of 8
};

// out[row] += scale sum over s of weight[row][s] y[slot[row][s]], s ascending.
struct ExpertSumLaunch {
  const float* y = nullptr;         // [..][size]
  const int32_t* slot = nullptr;
  const float* weight = nullptr;
  float* out = nullptr;             // [rows][size]
  float scale = 1;
  int32_t rows = 0, chosen = 0, size = 0;
};

// x[row] += scale sigmoid(<h[row], w>) y[row].
struct GatedAddLaunch {
  const void* h = nullptr;          // [rows][h_size]
  const float* w = nullptr;         // [h_size]
  const float* y = nullptr;         // [rows][size]
  float* x = nullptr;
  WireType type = WireType::kBF16;  // of h
  float scale = 1;
  int32_t rows = 0, h_size = 0, size = 0;
};

}  // namespace dovetail::kernels::cuda
