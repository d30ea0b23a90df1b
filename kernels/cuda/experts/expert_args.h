#pragma once
#include <cstdint>

#include "kernels/cuda/products/quant_args.h"
#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Parameters of the kernels of experts: device pointers, plain structs. Matrices are row by row; steps are in elements.
// Threads: plain values.

enum class RouteScore : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxOfChosen = 2 };

// Which experts serve a row, and with what weight (moe.h), from h = norm(x) in f32.
struct RouteLaunch {
  const float* x = nullptr;       // [rows][hidden]
  const float* norm = nullptr;    // [hidden]
  const float* router = nullptr;  // [experts][hidden]
  const float* bias = nullptr;    // [experts] or null
  const float* selection_bias = nullptr;
  int32_t* expert = nullptr;  // [rows][chosen]
  float* weight = nullptr;    // [rows][chosen]
  void* h = nullptr;          // [rows][hidden], h rounded to `type`; null: nothing else reads it
  WireType type = WireType::kBF16;
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

// Rows of a tile: up to 64 by every GPU, 256 by those of compute capability 9.0 (grouped_product.cu).
inline constexpr int kFewTileRows = 16, kMoreTileRows = 32, kManyTileRows = 64, kGroupedTileRows = 256;

// What becomes of the halves of a product, w being the gate's rows and then as many others: act(gate) * other.
enum class ExpertActivation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

// y[slot] = x[row of slot] w[expert of slot]^T + bias[expert].
struct ExpertGemmLaunch {
  const void* x = nullptr;  // 16 bits; by row where `member` is given, else by slot
  const int32_t* member = nullptr;
  const void* w = nullptr;      // [experts][n][k]
  const float* bias = nullptr;  // [experts][n] or null
  void* y = nullptr;            // [pairs][n], with an activation [pairs][n / 2]
  WireType type = WireType::kBF16;
  int32_t y_is_f32 = 0;
  const ExpertTile* tiles = nullptr;
  int32_t most_tiles = 0, tile_rows = 0;
  int32_t n = 0, k = 0;  // k: a multiple of 8; in tiles of kGroupedTileRows both, with an activation n of 16
  // How many's weights lie at w, from `first_expert` on; tiles of other experts are passed over. 0: all; not in tiles
  // of kGroupedTileRows.
  int32_t experts = 0, first_expert = 0;
  ExpertActivation activation = ExpertActivation::kNone;  // not with y in f32, nor, in those tiles, with a bias
  // The launch before this one in the stream is a product of the same tiles: they are read before it has ended. In
  // tiles of kGroupedTileRows without effect.
  int32_t follows_product = 0;
  int32_t w_is_new = 0;  // a kernel that may still run writes w: it is not read before that has ended

  constexpr bool Takes(const ExpertTile& tile) const {
    return tile.rows > 0 &&
           (experts == 0 || static_cast<uint32_t>(tile.expert - first_expert) < static_cast<uint32_t>(experts));
  }
};

// The same of few rows, in tiles of kFewTileRows, with weights in 4 or 8 bits: those of the experts that tiles name are
// read, once for each tile. `w`, `w_is_new`, `experts` and `first_expert` are not read.
struct ExpertCodesLaunch {
  ExpertGemmLaunch product;
  QuantMatrix codes;       // [experts * n][k]; n a multiple of 16; halves_of: 0, or n, which an activation needs
  int32_t most_rows = 16;  // that any tile has
};

// out[row] += scale sum over s of weight[row][s] y[slot[row][s]], s ascending.
struct ExpertSumLaunch {
  const float* y = nullptr;  // [..][size]
  const int32_t* slot = nullptr;
  const float* weight = nullptr;
  float* out = nullptr;  // [rows][size]
  float scale = 1;
  int32_t rows = 0, chosen = 0, size = 0;
};

// Experts of rows so few that pairs hardly share one: pair by pair, without places and tiles.
// y[pair] = act(gate) * other, the halves of x[row of pair] w[expert of pair]^T + bias[expert of pair].
struct PairGateLaunch {
  const void* x = nullptr;          // [rows][k], 16 bits
  const int32_t* expert = nullptr;  // [pairs]
  const void* w = nullptr;          // [experts][2 size][k]
  const float* bias = nullptr;      // [experts][2 size] or null
  void* y = nullptr;                // [pairs][size]
  WireType type = WireType::kBF16;
  ExpertActivation activation = ExpertActivation::kSilu;
  int32_t pairs = 0, chosen = 0, size = 0, k = 0;  // k: a multiple of 8
};

// out[row] += scale sum over s of weight[row][s] (x[row][s] w[expert[row][s]]^T + bias[expert[row][s]]).
struct PairSumLaunch {
  const void* x = nullptr;          // [rows][chosen][k], 16 bits
  const int32_t* expert = nullptr;  // [rows][chosen]
  const float* weight = nullptr;    // [rows][chosen]
  const void* w = nullptr;          // [experts][n][k]
  const float* bias = nullptr;      // [experts][n] or null
  float* out = nullptr;             // [rows][n]
  WireType type = WireType::kBF16;
  float scale = 1;
  int32_t rows = 0, chosen = 0, n = 0, k = 0;  // k: a multiple of 8
};

// x[row] += scale sigmoid(<h[row], w>) y[row].
struct GatedAddLaunch {
  const void* h = nullptr;   // [rows][h_size]
  const float* w = nullptr;  // [h_size]
  const float* y = nullptr;  // [rows][size]
  float* x = nullptr;
  WireType type = WireType::kBF16;  // of h
  float scale = 1;
  int32_t rows = 0, h_size = 0, size = 0;
};

}  // namespace dovetail::kernels::cuda
