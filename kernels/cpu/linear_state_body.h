// One tile of one block of one head (linear_state_kernels.h). Included once per ISA. Every sum runs in a fixed order:
// over key channels ascending for S^T x, over tokens ascending for the open block, so a token's bits do not depend on
// which tile it came in.
// Threads: reentrant.
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

// Fetches the rows of a stream, or nothing.
// Threads: thread-compatible; a value.
class Ahead {
 public:
  explicit Ahead(LinearStream* stream) : stream_(stream) {}
  __attribute__((always_inline)) void Fetch() {
    if (stream_ != nullptr && stream_->part < stream_->count) FetchRow();
  }
  __attribute__((always_inline)) void Fetch(int rows) {
    for (int i = 0; i < rows; ++i) Fetch();
  }

 private:
  __attribute__((always_inline)) void FetchRow() {
    const LinearFetch& part = stream_->parts[stream_->part];
    const auto* at = reinterpret_cast<const char*>(part.rows[stream_->row]);
    for (int line = 0; line < part.bytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
    if (++stream_->row < part.count) return;
    stream_->row = 0;
    ++stream_->part;
  }

  LinearStream* stream_;
};

// out[r] = S^T x[r] for R rows and C vectors of columns from `at` on.
template <bool kBF16, int R, int C>
DT_INLINE void StateTile(const std::byte* const* state, const float* const* x, int n, int at, bool first_columns,
                         Ahead& ahead, float* const* out) {
  F32x16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = Zero();
  for (int i = 0; i < n; ++i) {
    F32x16 s[C];
    if constexpr (R <= 2)
      if (first_columns) ahead.Fetch();
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
  for (; at + C * kLanes <= stride; at += C * kLanes) StateTile<kBF16, R, C>(state, x, n, at, at == 0, ahead, out);
  for (; at < stride; at += kLanes) StateTile<kBF16, R, 1>(state, x, n, at, at == 0, ahead, out);
}

template <bool kBF16>
static void StateProduct(const LinearTile& tile, const float* const* x, int rows, int stride, Ahead& ahead,
                         float* const* out) {
  const std::byte* const* state = tile.state;
  const int n = tile.key_dim;
  int r = 0;
  for (; r + kTileR <= rows; r += kTileR) StateRows<kBF16, kTileR, kTileC>(state, x + r, n, stride, ahead, out + r);
  for (; r + 2 <= rows; r += 2) StateRows<kBF16, 2, kPairC>(state, x + r, n, stride, ahead, out + r);
  if (r < rows) StateRows<kBF16, 1, kWide>(state, x + r, n, stride, ahead, out + r);
}

// row += sum over j < count of coefficient[j] * values[j], j ascending.
template <int C>
DT_INLINE void AddValues(const float* coefficient, int count, std::byte* const* values, int at, Ahead& ahead,
                         float* row) {
  F32x16 sum[C];
  for (int c = 0; c < C; ++c) sum[c] = Load(row + at + c * kLanes);
  for (int j = 0; j < count; ++j) {
    const F32x16 factor = Set1(coefficient[j]);
    ahead.Fetch();
    const float* value = RowOf(values, j) + at;
    for (int c = 0; c < C; ++c) sum[c] = Fma(factor, Load(value + c * kLanes), sum[c]);
  }
  for (int c = 0; c < C; ++c) Store(row + at + c * kLanes, sum[c]);
}
static void AddValues(const float* coefficient, int count, std::byte* const* values, int stride, Ahead ahead,
                      float* row) {
  int at = 0;
  Ahead none(nullptr);
  for (; at + kWide * kLanes <= stride; at += kWide * kLanes) {
    AddValues<kWide>(coefficient, count, values, at, ahead, row);
    ahead = none;
  }
  for (; at + 4 * kLanes <= stride; at += 4 * kLanes) {
    AddValues<4>(coefficient, count, values, at, ahead, row);
    ahead = none;
  }
  for (; at < stride; at += kLanes) AddValues<1>(coefficient, count, values, at, none, row);
}

// Two rows at once, each as above: values are read once.
template <int C>
DT_INLINE void AddBothValues(const float* a, const float* b, int count, std::byte* const* values, int at, Ahead& ahead,
                             float* a_row, float* b_row) {
  F32x16 a_sum[C], b_sum[C];
  for (int c = 0; c < C; ++c) {
    a_sum[c] = Load(a_row + at + c * kLanes);
    b_sum[c] = Load(b_row + at + c * kLanes);
  }
  for (int j = 0; j < count; ++j) {
    const F32x16 a_factor = Set1(a[j]), b_factor = Set1(b[j]);
    ahead.Fetch();
    const float* row = RowOf(values, j) + at;
    for (int c = 0; c < C; ++c) {
      const F32x16 value = Load(row + c * kLanes);
      a_sum[c] = Fma(a_factor, value, a_sum[c]);
      b_sum[c] = Fma(b_factor, value, b_sum[c]);
    }
  }
  for (int c = 0; c < C; ++c) {
    Store(a_row + at + c * kLanes, a_sum[c]);
    Store(b_row + at + c * kLanes, b_sum[c]);
  }
}
static void AddBothValues(const float* a, const float* b, int count, std::byte* const* values, int stride, Ahead ahead,
                          float* a_row, float* b_row) {
  Ahead none(nullptr);
  for (int at = 0; at < stride;) {
    Ahead& now = at == 0 ? ahead : none;
    if (at + kPairC * kLanes <= stride) {
      AddBothValues<kPairC>(a, b, count, values, at, now, a_row, b_row);
      at += kPairC * kLanes;
    } else {
      AddBothValues<1>(a, b, count, values, at, now, a_row, b_row);
      at += kLanes;
    }
  }
}

// dots[j] = <x, k_j> for j < count; x is padded as the keys are.
template <int C>
static void Dots(std::byte* const* keys, const float* x, int count, Ahead ahead, float* dots) {
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
    ahead.Fetch(4);
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

// The same of two rows at once: keys are read once. Null where there are too few registers for it.
template <int C>
static void BothDots(std::byte* const* keys, const float* a, const float* b, int count, Ahead ahead, float* a_dots,
                     float* b_dots) {
  F32x16 a_value[C], b_value[C];
  for (int c = 0; c < C; ++c) {
    a_value[c] = Load(a + c * kLanes);
    b_value[c] = Load(b + c * kLanes);
  }
  const auto products = [&](int j, F32x16& a_sum, F32x16& b_sum) {
    ahead.Fetch();
    const float* key = RowOf(keys, j);
    F32x16 part = Load(key);
    a_sum = Mul(a_value[0], part);
    b_sum = Mul(b_value[0], part);
    for (int c = 1; c < C; ++c) {
      part = Load(key + c * kLanes);
      a_sum = Fma(a_value[c], part, a_sum);
      b_sum = Fma(b_value[c], part, b_sum);
    }
  };
  F32x16 a_first, b_first, a_second, b_second;
  int j = 0;
  for (; j + 2 <= count; j += 2) {
    products(j, a_first, b_first);
    products(j + 1, a_second, b_second);
    alignas(16) float sums[4];
    ReduceAdd4(a_first, a_second, b_first, b_second, sums);
    a_dots[j] = sums[0], a_dots[j + 1] = sums[1];
    b_dots[j] = sums[2], b_dots[j + 1] = sums[3];
  }
  if (j == count) return;
  products(j, a_first, b_first);
  a_dots[j] = ReduceAdd(a_first);
  b_dots[j] = ReduceAdd(b_first);
}
using BothDotsFunction = decltype(&BothDots<1>);
static BothDotsFunction SelectBothDots(int vectors) {
#ifdef DT_ISA_AVX512
  static constexpr BothDotsFunction kBySize[] = {BothDots<1>, BothDots<2>,  BothDots<3>,  BothDots<4>,
                                                 BothDots<5>, BothDots<6>,  BothDots<7>,  BothDots<8>,
                                                 BothDots<9>, BothDots<10>, BothDots<11>, BothDots<12>};
  return vectors <= 12 ? kBySize[vectors - 1] : nullptr;
#else
  return nullptr;
#endif
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
                           Ahead ahead, float* k_dots, float* q_dots, int n) {
  F32x16 faded_k[C], faded_q[C];
  F32x16 sum = Zero();
  for (int c = 0; c < C; ++c) {
    faded_k[c] = LoadFirst(k + c * kLanes, n - c * kLanes);
    faded_q[c] = LoadFirst(q + c * kLanes, n - c * kLanes);
    sum = Fma(faded_q[c], Load(RowOf(keys, t) + c * kLanes), sum);
  }
  q_dots[t] = ReduceAdd(sum);
  for (int j = t - 1; j >= 0; --j) {
    ahead.Fetch();
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
  static constexpr FadingDotsFunction kBySize[] = {FadingDots<1>,  FadingDots<2>,  FadingDots<3>,  FadingDots<4>,
                                                   FadingDots<5>,  FadingDots<6>,  FadingDots<7>,  FadingDots<8>,
                                                   FadingDots<9>,  FadingDots<10>, FadingDots<11>, FadingDots<12>,
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
  alignas(64) float query[kRows][kDim];     // q, faded to the block's beginning where the decay is a vector
  alignas(64) float recall[kRows][kDim];    // what the update reads S with: w k, or c; faded alike
  alignas(64) float output[kRows][kDim];    // S^T query, then o
  alignas(64) float recalled[kRows][kDim];  // S^T recall
  alignas(64) float total[kRows];           // scalar decay since the beginning of the block
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

static void MeetState(const LinearTile& tile, Ahead& ahead, LinearWork& work) {
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
    StateProduct<true>(tile, x, rows, stride, ahead, out);
  } else {
    StateProduct<false>(tile, x, rows, stride, ahead, out);
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
  Ahead ahead(tile.stream), none(nullptr);
  AppendEntries(tile);
  ahead.Fetch(LinearStream::kBetween);
  PrepareRows(tile, work);
  ahead.Fetch(LinearStream::kBetween);
  MeetState(tile, ahead, work);
  const int keys = tile.key_dim, stride = Padded(tile.value_dim);
  const FadingDotsFunction fading_dots = SelectFadingDots(Padded(keys) / kLanes);
  const DotsFunction plain_dots = SelectDots(Padded(keys) / kLanes);
  const BothFadingDotsFunction both_dots = SelectBothFadingDots(Padded(keys) / kLanes);
  const BothDotsFunction both_plain_dots = SelectBothDots(Padded(keys) / kLanes);
  alignas(64) float dots[kTokens], query_dots[kTokens], rank_dots[kTokens], fade[kTokens];
  for (int r = 0; r < tile.rows; ++r) {
    const int t = tile.first + r;
    const float* q = tile.q + r * tile.q_step;
    const float* k = tile.k + r * tile.k_step;
    if (!tile.vector_decay) Fade(RowOf(tile.decays, 0), t, fade);
    if (tile.delta) {
      if (tile.vector_decay) {
        both_dots(k, q, tile.decays, t, tile.keys, ahead, dots, query_dots, keys);
      } else {
        if (both_plain_dots != nullptr) {
          both_plain_dots(tile.keys, work.recall[r], work.query[r], t, ahead, dots, query_dots);
        } else {
          plain_dots(tile.keys, work.recall[r], t, ahead, dots);
          plain_dots(tile.keys, work.query[r], t, none, query_dots);
        }
        plain_dots(tile.keys + t, work.query[r], 1, none, query_dots + t);
        for (int j = 0; j < t; ++j) dots[j] *= fade[j];
        for (int j = 0; j <= t; ++j) query_dots[j] *= fade[j];
      }
      AddBothValues(dots, query_dots, t, tile.values, stride, ahead, work.recalled[r], work.output[r]);
      const F32x16 beta = Set1(tile.beta[r * tile.beta_step]);
      float* u = RowOf(tile.values, t);
      for (int i = 0; i < stride; i += kLanes) Store(u + i, Mul(beta, Sub(Load(u + i), Load(work.recalled[r] + i))));
      AddValues(query_dots + t, 1, tile.values + t, stride, none, work.output[r]);
    } else if (tile.rank_one) {
      fading_dots(tile.c + r * tile.c_step, tile.decays, t - 1, tile.keys, dots, tile.rank_keys, rank_dots, keys);
      AddValues(dots, t, tile.values, stride, none, work.recalled[r]);
      AddValues(rank_dots, t, tile.rank_values, stride, none, work.recalled[r]);
      CopyPadded(work.recalled[r], stride, stride, RowOf(tile.rank_values, t));
    }
    if (!tile.delta) {
      if (!tile.vector_decay) {
        plain_dots(tile.keys, work.query[r], t + 1, ahead, query_dots);
        for (int j = 0; j <= t; ++j) query_dots[j] *= fade[j];
      } else {
        fading_dots(q, tile.decays, t, tile.keys, query_dots, tile.rank_one ? tile.rank_keys : nullptr, rank_dots,
                    keys);
      }
      AddValues(query_dots, t + 1, tile.values, stride, ahead, work.output[r]);
      if (tile.rank_one) AddValues(rank_dots, t + 1, tile.rank_values, stride, none, work.output[r]);
    }
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
