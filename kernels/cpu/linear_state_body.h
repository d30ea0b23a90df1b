// One tile of one block of one head (linear_state_kernels.h). Included once per ISA. Every sum runs in a fixed order:
// over key channels ascending for S^T x, over tokens ascending for the open block, so a token's bits do not depend on
// which tile it came in.
#pragma once
#include "kernels/cpu/linear_state_kernels.h"
#include "kernels/cpu/simd.h"

namespace dovetail::kernels::DT_ISA_NS {

constexpr int kLanes = 16;
constexpr int kRows = kLinearTileRows;
constexpr int kDim = kLinearMaxDim;
constexpr int kTokens = kLinearBlockTokens;
#ifdef DT_ISA_AVX512
constexpr int kTileR = 4, kTileC = 4, kPairC = 8, kWide = 8;
#else
constexpr int kTileR = 2, kTileC = 2, kPairC = 2, kWide = 4;
#endif

constexpr int kAhead = 32;  // rows of S

DT_INLINE int Padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }
DT_INLINE float* RowOf(std::byte* const* rows, int i) { return reinterpret_cast<float*>(rows[i]); }
DT_INLINE float Decay(float g) { return Exp(g); }

template <bool kBF16>
DT_INLINE F32x16 LoadState(const std::byte* row, int at) {
  if constexpr (kBF16) return LoadBF16(row + 2 * at);
  return Load(reinterpret_cast<const float*>(row) + at);
}
template <bool kBF16>
DT_INLINE void StoreState(std::byte* row, int at, F32x16 x) {
  if constexpr (kBF16) return StoreBF16(row + 2 * at, x);
  Store(reinterpret_cast<float*>(row) + at, x);
}

// out[r] = S^T x[r] for R rows and C vectors of columns from `at` on.
template <bool kBF16, int R, int C>
DT_INLINE void StateTile(const std::byte* const* state, const float* const* x, int n, int at, float* const* out) {
  F32x16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = Zero();
  for (int i = 0; i < n; ++i) {
    F32x16 s[C];
    if constexpr (R <= 2) {  // decode: S comes from memory, row after row
      const std::byte* ahead = state[i + kAhead < n ? i + kAhead : n - 1] + (kBF16 ? 2 : 4) * at;
      for (int c = 0; c < (kBF16 ? (C + 1) / 2 : C); ++c)
        _mm_prefetch(reinterpret_cast<const char*>(ahead) + 64 * c, _MM_HINT_T0);
    }
    for (int c = 0; c < C; ++c) s[c] = LoadState<kBF16>(state[i], at + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const F32x16 factor = Set1(x[r][i]);
      for (int c = 0; c < C; ++c) sum[r][c] = Fma(factor, s[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) Store(out[r] + at + c * kLanes, sum[r][c]);
}

template <bool kBF16, int R, int C>
DT_INLINE void StateRows(const std::byte* const* state, const float* const* x, int n, int stride, float* const* out) {
  int at = 0;
  for (; at + C * kLanes <= stride; at += C * kLanes) StateTile<kBF16, R, C>(state, x, n, at, out);
  for (; at < stride; at += kLanes) StateTile<kBF16, R, 1>(state, x, n, at, out);
}

template <bool kBF16>
static void StateProduct(const std::byte* const* state, const float* const* x, int rows, int n, int stride,
                         float* const* out) {
  int r = 0;
  for (; r + kTileR <= rows; r += kTileR) StateRows<kBF16, kTileR, kTileC>(state, x + r, n, stride, out + r);
  for (; r + 2 <= rows; r += 2) StateRows<kBF16, 2, kPairC>(state, x + r, n, stride, out + r);
  if (r < rows) StateRows<kBF16, 1, kWide>(state, x + r, n, stride, out + r);
}

// row += sum over j < count of coefficient[j] * values[j], j ascending.
template <int C>
DT_INLINE void AddValues(const float* coefficient, int count, std::byte* const* values, int at, float* row) {
  F32x16 sum[C];
  for (int c = 0; c < C; ++c) sum[c] = Load(row + at + c * kLanes);
  for (int j = 0; j < count; ++j) {
    const F32x16 factor = Set1(coefficient[j]);
    const float* value = RowOf(values, j) + at;
    for (int c = 0; c < C; ++c) sum[c] = Fma(factor, Load(value + c * kLanes), sum[c]);
  }
  for (int c = 0; c < C; ++c) Store(row + at + c * kLanes, sum[c]);
}
static void AddValues(const float* coefficient, int count, std::byte* const* values, int stride, float* row) {
  int at = 0;
  for (; at + kWide * kLanes <= stride; at += kWide * kLanes) AddValues<kWide>(coefficient, count, values, at, row);
  for (; at + 4 * kLanes <= stride; at += 4 * kLanes) AddValues<4>(coefficient, count, values, at, row);
  for (; at < stride; at += kLanes) AddValues<1>(coefficient, count, values, at, row);
}

// dots[j] = <x, k_j> for j < count (rounded up to whole vectors), keys [n] rows of 64 tokens.
template <int C>
DT_INLINE void DotTile(std::byte* const* keys, const float* x, int n, int at, float* dots) {
  F32x16 sum[C];
  for (int c = 0; c < C; ++c) sum[c] = Zero();
  for (int i = 0; i < n; ++i) {
    const F32x16 factor = Set1(x[i]);
    for (int c = 0; c < C; ++c) sum[c] = Fma(factor, Load(RowOf(keys, i) + at + c * kLanes), sum[c]);
  }
  for (int c = 0; c < C; ++c) Store(dots + at + c * kLanes, sum[c]);
}
static void Dots(std::byte* const* keys, const float* x, int n, int count, float* dots) {
  switch ((count + kLanes - 1) / kLanes) {
    case 1: return DotTile<1>(keys, x, n, 0, dots);
    case 2: return DotTile<2>(keys, x, n, 0, dots);
    case 3: return DotTile<3>(keys, x, n, 0, dots);
    default: return DotTile<4>(keys, x, n, 0, dots);
  }
}

// fade[j] = w_{j+1} .. w_t for j <= t, multiplied from t downwards.
static void Fade(const float* decays, int t, float* fade) {
  float product = 1;
  for (int j = t; j >= 0; --j) {
    fade[j] = product;
    product *= decays[j];
  }
}

// With x faded on its way back from token t to token j: dots[j] = <x, keys[j]> for last >= j >= 0. Where `first_fade`,
// x meets w_t before the first key. other_keys may be null.
template <int C>
static void FadingDots(const float* x, std::byte* const* decays, int last, const float* first_fade,
                       std::byte* const* keys, float* dots, std::byte* const* other_keys, float* other_dots, int n) {
  F32x16 faded[C];
  for (int c = 0; c < C; ++c) {
    faded[c] = LoadFirst(x + c * kLanes, n - c * kLanes);
    if (first_fade != nullptr) faded[c] = Mul(faded[c], Load(first_fade + c * kLanes));
  }
  for (int j = last; j >= 0; --j) {
    F32x16 sum = Zero();
    for (int c = 0; c < C; ++c) sum = Fma(faded[c], Load(RowOf(keys, j) + c * kLanes), sum);
    dots[j] = ReduceAdd(sum);
    if (other_keys != nullptr) {
      sum = Zero();
      for (int c = 0; c < C; ++c) sum = Fma(faded[c], Load(RowOf(other_keys, j) + c * kLanes), sum);
      other_dots[j] = ReduceAdd(sum);
    }
    for (int c = 0; c < C; ++c) faded[c] = Mul(faded[c], Load(RowOf(decays, j) + c * kLanes));
  }
}
using FadingDotsFunction = decltype(&FadingDots<1>);
static FadingDotsFunction SelectFadingDots(int vectors) {
  static constexpr FadingDotsFunction kBySize[] = {
      FadingDots<1>,  FadingDots<2>,  FadingDots<3>,  FadingDots<4>,  FadingDots<5>,  FadingDots<6>,
      FadingDots<7>,  FadingDots<8>,  FadingDots<9>,  FadingDots<10>, FadingDots<11>, FadingDots<12>,
      FadingDots<13>, FadingDots<14>, FadingDots<15>, FadingDots<16>};
  return kBySize[vectors - 1];
}

static void CopyPadded(const float* in, int n, int padded, float* out) {
  for (int i = 0; i < padded; i += kLanes) Store(out + i, n > i ? LoadFirst(in + i, n - i) : Zero());
}

static void AppendEntries(const LinearTile& tile) {
  const int keys = Padded(tile.key_dim), values = Padded(tile.value_dim);
  for (int r = 0; r < tile.rows; ++r) {
    const int t = tile.first + r;
    const float* k = tile.k + r * tile.k_step;
    CopyPadded(tile.v + r * tile.v_step, tile.value_dim, values, RowOf(tile.values, t));
    if (!tile.vector_decay) {
      RowOf(tile.decays, 0)[t] = Decay(tile.log_decay[r * tile.decay_step]);
      continue;
    }
    CopyPadded(k, tile.key_dim, keys, RowOf(tile.keys, t));
    float* decays = RowOf(tile.decays, t);
    CopyPadded(tile.log_decay + r * tile.decay_step, tile.key_dim, keys, decays);
    for (int i = 0; i < keys; i += kLanes) Store(decays + i, Exp(Load(decays + i)));
    if (tile.rank_one) CopyPadded(tile.b + r * tile.b_step, tile.key_dim, keys, RowOf(tile.rank_keys, t));
  }
}

// A scalar decay's keys lie a line apart: their lines are on their way while S is read.
static void PrefetchKeys(const LinearTile& tile) {
  if (tile.vector_decay) return;
  for (int i = 0; i < tile.key_dim; ++i)
    _mm_prefetch(reinterpret_cast<const char*>(RowOf(tile.keys, i) + tile.first), _MM_HINT_T0);
}
static void AppendKeys(const LinearTile& tile) {
  if (tile.vector_decay) return;
  for (int i = 0; i < tile.key_dim; ++i)
    for (int r = 0; r < tile.rows; ++r) RowOf(tile.keys, i)[tile.first + r] = tile.k[r * tile.k_step + i];
}

// What a tile computes on the way: rows that meet S, what comes back, and the weights of the tokens of the block.
struct LinearWork {
  alignas(64) float query[kRows][kDim];    // q, faded to the block's beginning where the decay is a vector
  alignas(64) float recall[kRows][kDim];   // what the update reads S with: w k, or c; faded alike
  alignas(64) float output[kRows][kDim];   // S^T query, then o
  alignas(64) float recalled[kRows][kDim]; // S^T recall
  alignas(64) float total[kRows];          // scalar decay since the beginning of the block
};

// Products of the block's decays up to each row of the tile, and the rows that meet S.
static void PrepareRows(const LinearTile& tile, LinearWork& work) {
  const int keys = Padded(tile.key_dim);
  if (!tile.vector_decay) {
    const float* decays = RowOf(tile.decays, 0);
    float product = 1;
    for (int t = 0; t < tile.first; ++t) product *= decays[t];
    for (int r = 0; r < tile.rows; ++r) {
      product *= decays[tile.first + r];
      work.total[r] = product;
      CopyPadded(tile.q + r * tile.q_step, tile.key_dim, keys, work.query[r]);
      if (tile.delta) CopyPadded(tile.k + r * tile.k_step, tile.key_dim, keys, work.recall[r]);
    }
    return;
  }
  for (int i = 0; i < keys; i += kLanes) {
    const int n = tile.key_dim - i;
    F32x16 product = Set1(1.0f);
    for (int t = 0; t < tile.first; ++t) product = Mul(product, Load(RowOf(tile.decays, t) + i));
    for (int r = 0; r < tile.rows; ++r) {
      if (tile.rank_one) Store(work.recall[r] + i, Mul(LoadFirst(tile.c + r * tile.c_step + i, n), product));
      product = Mul(product, Load(RowOf(tile.decays, tile.first + r) + i));
      Store(work.query[r] + i, Mul(LoadFirst(tile.q + r * tile.q_step + i, n), product));
      if (tile.delta) Store(work.recall[r] + i, Mul(LoadFirst(tile.k + r * tile.k_step + i, n), product));
    }
  }
}

static void MeetState(const LinearTile& tile, LinearWork& work) {
  const int stride = Padded(tile.value_dim);
  const float* x[2 * kRows];
  float* out[2 * kRows];
  int rows = 0;
  for (int r = 0; r < tile.rows; ++r) {
    x[rows] = work.query[r];
    out[rows++] = work.output[r];
    if (!tile.delta && !tile.rank_one) continue;
    x[rows] = work.recall[r];
    out[rows++] = work.recalled[r];
  }
  if (tile.state == nullptr) {
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < stride; i += kLanes) Store(out[r] + i, Zero());
    return;
  }
  if (tile.state_bf16) {
    StateProduct<true>(tile.state, x, rows, tile.key_dim, stride, out);
  } else {
    StateProduct<false>(tile.state, x, rows, tile.key_dim, stride, out);
  }
  if (tile.vector_decay) return;
  for (int r = 0; r < tile.rows; ++r)
    for (int i = 0; i < stride; i += kLanes) {
      const F32x16 total = Set1(work.total[r]);
      Store(work.output[r] + i, Mul(Load(work.output[r] + i), total));
      if (tile.delta) Store(work.recalled[r] + i, Mul(Load(work.recalled[r] + i), total));
    }
}

static void Append(const LinearTile& tile) {
  LinearWork work;
  AppendEntries(tile);
  PrefetchKeys(tile);
  PrepareRows(tile, work);
  MeetState(tile, work);
  AppendKeys(tile);
  const int keys = tile.key_dim, stride = Padded(tile.value_dim);
  const FadingDotsFunction fading_dots = SelectFadingDots(Padded(keys) / kLanes);
  alignas(64) float dots[kTokens], rank_dots[kTokens], fade[kTokens];
  for (int r = 0; r < tile.rows; ++r) {
    const int t = tile.first + r;
    const float* q = tile.q + r * tile.q_step;
    const float* k = tile.k + r * tile.k_step;
    if (!tile.vector_decay) Fade(RowOf(tile.decays, 0), t, fade);
    if (tile.delta) {
      if (tile.vector_decay) {
        fading_dots(k, tile.decays, t - 1, RowOf(tile.decays, t), tile.keys, dots, nullptr, nullptr, keys);
      } else {
        Dots(tile.keys, k, keys, t, dots);
        for (int j = 0; j < t; ++j) dots[j] *= fade[j];
      }
      AddValues(dots, t, tile.values, stride, work.recalled[r]);
      const F32x16 beta = Set1(tile.beta[r * tile.beta_step]);
      float* u = RowOf(tile.values, t);
      for (int i = 0; i < stride; i += kLanes) Store(u + i, Mul(beta, Sub(Load(u + i), Load(work.recalled[r] + i))));
    } else if (tile.rank_one) {
      fading_dots(tile.c + r * tile.c_step, tile.decays, t - 1, nullptr, tile.keys, dots, tile.rank_keys, rank_dots,
                  keys);
      AddValues(dots, t, tile.values, stride, work.recalled[r]);
      AddValues(rank_dots, t, tile.rank_values, stride, work.recalled[r]);
      CopyPadded(work.recalled[r], stride, stride, RowOf(tile.rank_values, t));
    }
    if (tile.vector_decay) {
      fading_dots(q, tile.decays, t, nullptr, tile.keys, dots, tile.rank_one ? tile.rank_keys : nullptr, rank_dots,
                  keys);
    } else {
      Dots(tile.keys, q, keys, t + 1, dots);
      for (int j = 0; j <= t; ++j) dots[j] *= fade[j];
    }
    AddValues(dots, t + 1, tile.values, stride, work.output[r]);
    if (tile.rank_one) AddValues(rank_dots, t + 1, tile.rank_values, stride, work.output[r]);
    for (int i = 0; i < tile.value_dim; i += kLanes)
      StoreFirst(tile.o + r * tile.o_step + i, Load(work.output[r] + i), tile.value_dim - i);
  }
}

// Keys faded to the end of the block, [token][channel] or, of scalar decays, [channel][token]; and its whole decay.
struct AdvanceWork {
  alignas(64) float keys[kTokens * kDim];
  alignas(64) float rank_keys[kTokens * kDim];
  alignas(64) float total[kDim];
  int token_step = kDim, channel_step = 1;
};

static void FadeKeys(const LinearTile& tile, AdvanceWork& work) {
  const int keys = Padded(tile.key_dim);
  if (!tile.vector_decay) {
    alignas(64) float fade[kTokens];
    const float* decays = RowOf(tile.decays, 0);
    Fade(decays, kTokens - 1, fade);
    work.token_step = 1;
    work.channel_step = kTokens;
    for (int i = 0; i < tile.key_dim; ++i)
      for (int j = 0; j < kTokens; j += kLanes)
        Store(work.keys + i * kTokens + j, Mul(Load(RowOf(tile.keys, i) + j), Load(fade + j)));
    float product = 1;
    for (int t = 0; t < kTokens; ++t) product *= decays[t];
    for (int i = 0; i < keys; ++i) work.total[i] = product;
    return;
  }
  for (int i = 0; i < keys; i += kLanes) {
    F32x16 fade = Set1(1.0f), product = Set1(1.0f);
    for (int j = kTokens - 1; j >= 0; --j) {
      Store(work.keys + j * kDim + i, Mul(Load(RowOf(tile.keys, j) + i), fade));
      if (tile.rank_one) Store(work.rank_keys + j * kDim + i, Mul(Load(RowOf(tile.rank_keys, j) + i), fade));
      fade = Mul(fade, Load(RowOf(tile.decays, j) + i));
    }
    for (int t = 0; t < kTokens; ++t) product = Mul(product, Load(RowOf(tile.decays, t) + i));
    Store(work.total + i, product);
  }
}

template <bool kBF16, int R, int C>
DT_INLINE void AdvanceTile(const LinearTile& tile, const AdvanceWork& work, int i, int at, std::byte* const* out) {
  F32x16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      sum[r][c] = tile.state != nullptr
                      ? Mul(Set1(work.total[i + r]), LoadState<kBF16>(tile.state[i + r], at + c * kLanes))
                      : Zero();
  const auto add = [&](const float* weights, std::byte* const* values) {
    for (int j = 0; j < kTokens; ++j) {
      F32x16 value[C];
      for (int c = 0; c < C; ++c) value[c] = Load(RowOf(values, j) + at + c * kLanes);
      for (int r = 0; r < R; ++r) {
        const F32x16 weight = Set1(weights[j * work.token_step + (i + r) * work.channel_step]);
        for (int c = 0; c < C; ++c) sum[r][c] = Fma(weight, value[c], sum[r][c]);
      }
    }
  };
  add(work.keys, tile.values);
  if (tile.rank_one) add(work.rank_keys, tile.rank_values);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) StoreState<kBF16>(out[i + r], at + c * kLanes, sum[r][c]);
}

template <bool kBF16, int R>
DT_INLINE void AdvanceRows(const LinearTile& tile, const AdvanceWork& work, int i, std::byte* const* out) {
  const int stride = Padded(tile.value_dim);
  int at = 0;
  for (; at + kTileC * kLanes <= stride; at += kTileC * kLanes) AdvanceTile<kBF16, R, kTileC>(tile, work, i, at, out);
  for (; at < stride; at += kLanes) AdvanceTile<kBF16, R, 1>(tile, work, i, at, out);
}

template <bool kBF16>
static void AdvanceAs(const LinearTile& tile, std::byte* const* out) {
  AdvanceWork work;
  FadeKeys(tile, work);
  int i = 0;
  for (; i + kTileR <= tile.key_dim; i += kTileR) AdvanceRows<kBF16, kTileR>(tile, work, i, out);
  for (; i < tile.key_dim; ++i) AdvanceRows<kBF16, 1>(tile, work, i, out);
}

static void Advance(const LinearTile& tile, std::byte* const* out) {
  tile.state_bf16 ? AdvanceAs<true>(tile, out) : AdvanceAs<false>(tile, out);
}

static void Convolve(const float* const* taps, const float* weights, int64_t weight_step, int width, const float* bias,
                     bool silu, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    F32x16 sum = bias != nullptr ? LoadFirst(bias + i, n - i) : Zero();
    for (int w = 0; w < width; ++w)
      sum = Fma(LoadFirst(weights + w * weight_step + i, n - i), LoadFirst(taps[w] + i, n - i), sum);
    if (silu) sum = Div(sum, Add(Set1(1.0f), Exp(Sub(Zero(), sum))));
    StoreFirst(out + i, sum, n - i);
  }
}

static void L2Norm(const float* x, float eps, float factor, int n, float* out) {
  F32x16 sum = Zero();
  for (int i = 0; i < n; i += kLanes) {
    const F32x16 v = LoadFirst(x + i, n - i);
    sum = Fma(v, v, sum);
  }
  const F32x16 scale = Set1(factor / __builtin_sqrtf(ReduceAdd(sum) + eps));
  for (int i = 0; i < n; i += kLanes) StoreFirst(out + i, Mul(LoadFirst(x + i, n - i), scale), n - i);
}

static void SigmoidMul(const float* gate, const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 one = Set1(1.0f), y = LoadFirst(gate + i, n - i);
    StoreFirst(out + i, Div(LoadFirst(x + i, n - i), Add(one, Exp(Sub(Zero(), y)))), n - i);
  }
}

static constexpr LinearStateKernels kLinearStateKernels = {Append, Advance, Convolve, L2Norm, SigmoidMul};

}  // namespace dovetail::kernels::DT_ISA_NS
