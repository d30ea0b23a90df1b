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

// Of decode: S comes from memory, row after row, and what the tile lists as needed next comes with its last rows. Each
// row of S fetches the one kLinearAhead rows on.
class Ahead {
 public:
  Ahead(const LinearTile& tile, int n)
      : next_(tile.next), count_(tile.next_count), per_row_((count_ + kLinearAhead - 1) / kLinearAhead) {
    if (n < kLinearAhead) per_row_ = (count_ + n - 1) / n;
  }
  __attribute__((always_inline)) void Fetch(const std::byte* const* state, int i, int n, int offset, int bytes,
                                            bool last_columns) {
    if (i + kLinearAhead < n) return FetchRow(state[i + kLinearAhead] + offset, bytes);
    if (!last_columns) return;
    for (const int until = count_ < done_ + per_row_ ? count_ : done_ + per_row_; done_ < until; ++done_)
      FetchRow(next_[done_].at, next_[done_].bytes);
  }

 private:
  DT_INLINE void FetchRow(const std::byte* at, int bytes) {
    for (int line = 0; line < bytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(at) + line, _MM_HINT_T1);
  }

  const LinearFetch* next_;
  int count_, per_row_, done_ = 0;
};

// out[r] = S^T x[r] for R rows and C vectors of columns from `at` on.
template <bool kBF16, int R, int C>
DT_INLINE void StateTile(const std::byte* const* state, const float* const* x, int n, int at, bool last_columns,
                         Ahead& ahead, float* const* out) {
  F32x16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = Zero();
  for (int i = 0; i < n; ++i) {
    F32x16 s[C];
    if constexpr (R <= 2) ahead.Fetch(state, i, n, (kBF16 ? 2 : 4) * at, (kBF16 ? 32 : 64) * C, last_columns);
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
DT_INLINE void StateRows(const std::byte* const* state, const float* const* x, int n, int stride, Ahead& ahead,
                         float* const* out) {
  int at = 0;
  for (; at + C * kLanes <= stride; at += C * kLanes)
    StateTile<kBF16, R, C>(state, x, n, at, at + C * kLanes == stride, ahead, out);
  for (; at < stride; at += kLanes)
    StateTile<kBF16, R, 1>(state, x, n, at, at + kLanes == stride, ahead, out);
}

template <bool kBF16>
static void StateProduct(const LinearTile& tile, const float* const* x, int rows, int stride, float* const* out) {
  const std::byte* const* state = tile.state;
  const int n = tile.key_dim;
  Ahead ahead(tile, n);
  int r = 0;
  for (; r + kTileR <= rows; r += kTileR) StateRows<kBF16, kTileR, kTileC>(state, x + r, n, stride, ahead, out + r);
  for (; r + 2 <= rows; r += 2) StateRows<kBF16, 2, kPairC>(state, x + r, n, stride, ahead, out + r);
  if (r < rows) StateRows<kBF16, 1, kWide>(state, x + r, n, stride, ahead, out + r);
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

// dots[j] = <x, k_j> for j < count; x is padded as the keys are.
template <int C>
static void Dots(std::byte* const* keys, const float* x, int count, float* dots) {
  F32x16 value[C];
  for (int c = 0; c < C; ++c) value[c] = Load(x + c * kLanes);
  const auto product = [&](int j) {
    const float* key = RowOf(keys, j);
    F32x16 sum = Mul(value[0], Load(key));
    for (int c = 1; c < C; ++c) sum = Fma(value[c], Load(key + c * kLanes), sum);
    return sum;
  };
  int j = 0;
  for (; j + 4 <= count; j += 4) {
    const F32x16 a = product(j), b = product(j + 1), c = product(j + 2), d = product(j + 3);
    ReduceAdd4(a, b, c, d, dots + j);
  }
  for (; j < count; ++j) dots[j] = ReduceAdd(product(j));
}
using DotsFunction = decltype(&Dots<1>);
static DotsFunction SelectDots(int vectors) {
  static constexpr DotsFunction kBySize[] = {Dots<1>,  Dots<2>,  Dots<3>,  Dots<4>,  Dots<5>,  Dots<6>,
                                             Dots<7>,  Dots<8>,  Dots<9>,  Dots<10>, Dots<11>, Dots<12>,
                                             Dots<13>, Dots<14>, Dots<15>, Dots<16>};
  return kBySize[vectors - 1];
}

// fade[j] = w_{j+1} .. w_t for j <= t, multiplied from t downwards.
static void Fade(const float* decays, int t, float* fade) {
  float product = 1;
  for (int j = t; j >= 0; --j) {
    fade[j] = product;
    product *= decays[j];
  }
}

// With x faded on its way back from token `last` to token j: dots[j] = <x, keys[j]> for last >= j >= 0. other_keys may
// be null.
template <int C>
static void FadingDots(const float* x, std::byte* const* decays, int last, std::byte* const* keys, float* dots,
                       std::byte* const* other_keys, float* other_dots, int n) {
  F32x16 faded[C];
  for (int c = 0; c < C; ++c) faded[c] = LoadFirst(x + c * kLanes, n - c * kLanes);
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

// Of a delta rule, both at once: those of q from token t on, and those of k, faded by w_t first, from the one before.
template <int C>
static void BothFadingDots(const float* k, const float* q, std::byte* const* decays, int t, std::byte* const* keys,
                           float* k_dots, float* q_dots, int n) {
  F32x16 faded_k[C], faded_q[C];
  F32x16 sum = Zero();
  for (int c = 0; c < C; ++c) {
    faded_k[c] = LoadFirst(k + c * kLanes, n - c * kLanes);
    faded_q[c] = LoadFirst(q + c * kLanes, n - c * kLanes);
    sum = Fma(faded_q[c], Load(RowOf(keys, t) + c * kLanes), sum);
  }
  q_dots[t] = ReduceAdd(sum);
  for (int j = t - 1; j >= 0; --j) {
    F32x16 sum_k = Zero(), sum_q = Zero();
    for (int c = 0; c < C; ++c) {
      const F32x16 decay = Load(RowOf(decays, j + 1) + c * kLanes), key = Load(RowOf(keys, j) + c * kLanes);
      faded_k[c] = Mul(faded_k[c], decay);
      faded_q[c] = Mul(faded_q[c], decay);
      sum_k = Fma(faded_k[c], key, sum_k);
      sum_q = Fma(faded_q[c], key, sum_q);
    }
    k_dots[j] = ReduceAdd(sum_k);
    q_dots[j] = ReduceAdd(sum_q);
  }
}
using BothFadingDotsFunction = decltype(&BothFadingDots<1>);
static BothFadingDotsFunction SelectBothFadingDots(int vectors) {
  static constexpr BothFadingDotsFunction kBySize[] = {
      BothFadingDots<1>,  BothFadingDots<2>,  BothFadingDots<3>,  BothFadingDots<4>,
      BothFadingDots<5>,  BothFadingDots<6>,  BothFadingDots<7>,  BothFadingDots<8>,
      BothFadingDots<9>,  BothFadingDots<10>, BothFadingDots<11>, BothFadingDots<12>,
      BothFadingDots<13>, BothFadingDots<14>, BothFadingDots<15>, BothFadingDots<16>};
  return kBySize[vectors - 1];
}
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
    CopyPadded(k, tile.key_dim, keys, RowOf(tile.keys, t));
    if (!tile.vector_decay) {
      RowOf(tile.decays, 0)[t] = Decay(tile.log_decay[r * tile.decay_step]);
      continue;
    }
    float* decays = RowOf(tile.decays, t);
    CopyPadded(tile.log_decay + r * tile.decay_step, tile.key_dim, keys, decays);
    for (int i = 0; i < keys; i += kLanes) Store(decays + i, Exp(Load(decays + i)));
    if (tile.rank_one) CopyPadded(tile.b + r * tile.b_step, tile.key_dim, keys, RowOf(tile.rank_keys, t));
  }
}

// What a tile computes on the way: rows that meet S, what comes back, and the weights of the tokens of the block.
struct LinearWork {
  alignas(64) float query[kRows][kDim];    // q, faded to the block's beginning where the decay is a vector
  alignas(64) float recall[kRows][kDim];   // what the update reads S with: w k, or c; faded alike
  alignas(64) float output[kRows][kDim];   // S^T query, then o
  alignas(64) float recalled[kRows][kDim]; // S^T recall
  alignas(64) float total[kRows];          // scalar decay since the beginning of the block
};

template <int C>
DT_INLINE void DecayBefore(const LinearTile& tile, int at, float* before) {
  F32x16 product[C];
  for (int c = 0; c < C; ++c) product[c] = Set1(1.0f);
  for (int t = 0; t < tile.first; ++t)
    for (int c = 0; c < C; ++c) product[c] = Mul(product[c], Load(RowOf(tile.decays, t) + at + c * kLanes));
  for (int c = 0; c < C; ++c) Store(before + at + c * kLanes, product[c]);
}

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
  alignas(64) float before[kDim];  // the block's decay up to the tile
  int begun = 0;
  for (; begun + 8 * kLanes <= keys; begun += 8 * kLanes) DecayBefore<8>(tile, begun, before);
  for (; begun < keys; begun += kLanes) DecayBefore<1>(tile, begun, before);
  for (int i = 0; i < keys; i += kLanes) {
    const int n = tile.key_dim - i;
    F32x16 product = Load(before + i);
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
    StateProduct<true>(tile, x, rows, stride, out);
  } else {
    StateProduct<false>(tile, x, rows, stride, out);
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
  PrepareRows(tile, work);
  MeetState(tile, work);
  const int keys = tile.key_dim, stride = Padded(tile.value_dim);
  const FadingDotsFunction fading_dots = SelectFadingDots(Padded(keys) / kLanes);
  const DotsFunction plain_dots = SelectDots(Padded(keys) / kLanes);
  const BothFadingDotsFunction both_dots = SelectBothFadingDots(Padded(keys) / kLanes);
  alignas(64) float dots[kTokens], query_dots[kTokens], rank_dots[kTokens], fade[kTokens];
  for (int r = 0; r < tile.rows; ++r) {
    const int t = tile.first + r;
    const float* q = tile.q + r * tile.q_step;
    const float* k = tile.k + r * tile.k_step;
    if (!tile.vector_decay) Fade(RowOf(tile.decays, 0), t, fade);
    if (tile.delta) {
      if (tile.vector_decay) {
        both_dots(k, q, tile.decays, t, tile.keys, dots, query_dots, keys);
      } else {
        plain_dots(tile.keys, work.recall[r], t, dots);
        for (int j = 0; j < t; ++j) dots[j] *= fade[j];
      }
      AddValues(dots, t, tile.values, stride, work.recalled[r]);
      const F32x16 beta = Set1(tile.beta[r * tile.beta_step]);
      float* u = RowOf(tile.values, t);
      for (int i = 0; i < stride; i += kLanes) Store(u + i, Mul(beta, Sub(Load(u + i), Load(work.recalled[r] + i))));
    } else if (tile.rank_one) {
      fading_dots(tile.c + r * tile.c_step, tile.decays, t - 1, tile.keys, dots, tile.rank_keys, rank_dots, keys);
      AddValues(dots, t, tile.values, stride, work.recalled[r]);
      AddValues(rank_dots, t, tile.rank_values, stride, work.recalled[r]);
      CopyPadded(work.recalled[r], stride, stride, RowOf(tile.rank_values, t));
    }
    if (!tile.vector_decay) {
      plain_dots(tile.keys, work.query[r], t + 1, query_dots);
      for (int j = 0; j <= t; ++j) query_dots[j] *= fade[j];
    } else if (!tile.delta) {
      fading_dots(q, tile.decays, t, tile.keys, query_dots, tile.rank_one ? tile.rank_keys : nullptr, rank_dots, keys);
    }
    AddValues(query_dots, t + 1, tile.values, stride, work.output[r]);
    if (tile.rank_one) AddValues(rank_dots, t + 1, tile.rank_values, stride, work.output[r]);
    for (int i = 0; i < tile.value_dim; i += kLanes)
      StoreFirst(tile.o + r * tile.o_step + i, Load(work.output[r] + i), tile.value_dim - i);
  }
}

// Keys faded to the end of the block, [token][channel], and its whole decay. Tokens lie an odd number of lines apart.
constexpr int kKeyStep = kDim + kLanes;
struct AdvanceWork {
  alignas(64) float keys[kTokens * kKeyStep];
  alignas(64) float rank_keys[kTokens * kKeyStep];
  alignas(64) float total[kDim];
};

static void FadeKeys(const LinearTile& tile, AdvanceWork& work) {
  const int keys = Padded(tile.key_dim);
  if (!tile.vector_decay) {
    alignas(64) float fade[kTokens];
    const float* decays = RowOf(tile.decays, 0);
    Fade(decays, kTokens - 1, fade);
    for (int j = 0; j < kTokens; ++j)
      for (int i = 0; i < keys; i += kLanes)
        Store(work.keys + j * kKeyStep + i, Mul(Load(RowOf(tile.keys, j) + i), Set1(fade[j])));
    float product = 1;
    for (int t = 0; t < kTokens; ++t) product *= decays[t];
    for (int i = 0; i < keys; ++i) work.total[i] = product;
    return;
  }
  for (int i = 0; i < keys; i += kLanes) {
    F32x16 fade = Set1(1.0f), product = Set1(1.0f);
    for (int j = kTokens - 1; j >= 0; --j) {
      Store(work.keys + j * kKeyStep + i, Mul(Load(RowOf(tile.keys, j) + i), fade));
      if (tile.rank_one) Store(work.rank_keys + j * kKeyStep + i, Mul(Load(RowOf(tile.rank_keys, j) + i), fade));
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
        const F32x16 weight = Set1(weights[j * kKeyStep + i + r]);
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
