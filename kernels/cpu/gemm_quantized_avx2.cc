#include <cstring>

#include "kernels/cpu/gemm_avx2_common.h"

namespace dovetail::kernels::avx2 {
namespace {

DT_INLINE __m256i Broadcast4(const int8_t* x) {
  int bits;
  memcpy(&bits, x, 4);
  return _mm256_set1_epi32(bits);
}

// Sums are added one after the other. The compiler may else first make all products of a group, for which it has too
// few registers, and keeps them on the stack.
DT_INLINE void InOrder(__m256i& sum) { asm("" : "+x"(sum)); }

constexpr int kPlaneStride = kPanelRows * kActivationGroup;  // bytes from a code to its second byte

// Sum of code * activation over one group, for eight out features, exact. vpmaddubsw adds two u8 x
// s8 products in 16 bits with saturation: four-bit codes cannot reach it (2 * 15 * 128 = 3840, and
// eight steps of that still fit), eight-bit codes would, and are widened instead.
template <int kBits, int kPlanes>
struct GroupSum;

template <int kPlanes>
struct GroupSum<4, kPlanes> {
  __m256i sum[kPlanes] = {};  // 16 bits, two halves of a step

  __attribute__((always_inline)) void Add(__m256i codes, const int8_t* x) {
    for (int p = 0; p < kPlanes; ++p) {
      sum[p] = _mm256_add_epi16(sum[p], _mm256_maddubs_epi16(codes, Broadcast4(x + p * kPlaneStride)));
      InOrder(sum[p]);
    }
  }
  __attribute__((always_inline)) __m256i Total() const {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i first = _mm256_madd_epi16(sum[0], one);
    if constexpr (kPlanes == 1) return first;
    return _mm256_add_epi32(_mm256_slli_epi32(first, 8), _mm256_madd_epi16(sum[kPlanes - 1], one));
  }
};

// Activations have 16 bits there: of two planes they are joined already (GemmRows::joined), of one they are widened.
template <int kPlanes>
struct GroupSum<8, kPlanes> {
  __m256i sum = _mm256_setzero_si256();  // 32 bits

  __attribute__((always_inline)) void Add(__m256i codes, const int8_t* x) {
    __m256i even = Broadcast4(x), odd;
    if constexpr (kPlanes == 2) {
      odd = Broadcast4(x + kPlaneStride);
    } else {
      odd = _mm256_srai_epi16(even, 8);
      even = _mm256_srai_epi16(_mm256_slli_epi16(even, 8), 8);
    }
    even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), even);
    odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odd);
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
    InOrder(sum);
  }
  __attribute__((always_inline)) __m256i Total() const { return sum; }
};

template <int kBytes>
DT_INLINE __m256 LoadScales(const std::byte* at, int64_t index) {
  if constexpr (kBytes == 1) {
    const __m256i exponent = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + index)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  if constexpr (kBytes == 2) return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(at + index * 2)));
  return _mm256_load_ps(reinterpret_cast<const float*>(at) + index);
}

template <PackedFormat kFormat, int kPlanes>
struct QuantizedKernel {
  static constexpr PackedTraits kTraits = kPackedTraits[static_cast<int>(kFormat)];
  static constexpr int kBits = kTraits.code_bits;
  static constexpr int kGroup = kTraits.group;
  static constexpr int kSteps = kGroup / 4;
  static constexpr int kZeroShift = kTraits.zero_shift;
  static constexpr int kSumBits = kTraits.table ? 8 : kBits;  // eight steps of 2 * 28 * 128 overflow 16 bits

  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows>
  void Run(int64_t row, int64_t tile, bool first) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    PrefetchAhead ahead(weights + 2 * w.tile_bytes, kRows == 1 || first ? w.tile_bytes : 0, 2 * (w.cols / kGroup));
    __m256 sum[2][kRows];
    Half<kRows>(row, weights, 0, ahead, sum[0]);
    Half<kRows>(row, weights, 1, ahead, sum[1]);
    for (int r = 0; r < kRows; ++r) StoreTile(sum[0][r], sum[1][r], out, row + r, tile, LanesOf(w, tile));
  }

 private:
  __attribute__((always_inline)) const ActivationGroup<kPlanes>* PanelOf(int64_t row) const {
    if constexpr (kPlanes == 2 && kSumBits == 8) {
      return x.JoinedPanel(row);
    } else {
      return x.QuantizedPanel<kPlanes>(row);
    }
  }

  // Out features 8 half .. 8 half + 7 of a tile.
  template <int kRows>
  __attribute__((always_inline)) void Half(int64_t row, const std::byte* tile, int half, PrefetchAhead& ahead,
                                           __m256 (&sum)[kRows]) const {
    const ActivationGroup<kPlanes>* panel = PanelOf(row);
    const int lane = static_cast<int>(row % kPanelRows);
    const int64_t groups = w.cols / kGroup;
    for (int r = 0; r < kRows; ++r) sum[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
      ahead.Step();
      const ActivationGroup<kPlanes>& in = panel[g * kGroup / kActivationGroup];
      const int part = kGroup == 16 ? static_cast<int>(g % 2) : 0;  // of the activation group
      GroupSum<kSumBits, kPlanes> product[kRows];
      AddCodes<kRows>(&in.codes[0][lane][part * 16], tile + g * kGroup * kTileRows * kBits / 8 + half * 32, product);
      const __m256 scale = LoadScales<kTraits.scale_bytes>(tile + w.scales_at, g * kTileRows + half * 8);
      __m256 offset = _mm256_setzero_ps();
      if constexpr (kTraits.affine)
        offset = LoadScales<kTraits.scale_bytes>(tile + w.offsets_at, g * kTileRows + half * 8);
      const int32_t* negative_sum = kGroup == 16 ? in.negative_sum16[part] : in.negative_sum;
      for (int r = 0; r < kRows; ++r) {
        __m256i total = product[r].Total();
        if constexpr (!kTraits.affine)
          total = _mm256_add_epi32(total, _mm256_slli_epi32(_mm256_set1_epi32(negative_sum[lane + r]), kZeroShift));
        sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(scale, _mm256_set1_ps(in.scale[lane + r])),
                                 sum[r]);
        if constexpr (kTraits.affine) sum[r] = _mm256_fmadd_ps(offset, _mm256_set1_ps(in.scaled_sum[lane + r]), sum[r]);
      }
    }
  }

  template <int kRows>
  __attribute__((always_inline)) void AddCodes(const int8_t* in, const std::byte* codes,
                                               GroupSum<kSumBits, kPlanes>* product) const {
    constexpr int stride = kActivationGroup;
    constexpr int kLoads = kBits == 8 ? kSteps : kSteps / 2;
    for (int i = 0; i < kLoads; ++i) {
      const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i * 64));
      if constexpr (kBits == 8) {
        for (int r = 0; r < kRows; ++r) product[r].Add(bytes, in + r * stride + 4 * i);
      } else {
        const __m256i nibble = _mm256_set1_epi8(15);
        __m256i low = _mm256_and_si256(bytes, nibble), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
        if constexpr (kTraits.table) {
          const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(DT_FP4_CODES));
          low = _mm256_shuffle_epi8(table, low);
          high = _mm256_shuffle_epi8(table, high);
        }
        for (int r = 0; r < kRows; ++r) {
          product[r].Add(low, in + r * stride + 8 * i);
          product[r].Add(high, in + r * stride + 8 * i + 4);
        }
      }
    }
  }
};

template <PackedFormat kFormat, int kPlanes>
void GemmQuantized(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
                   int64_t tile_begin, int64_t tile_end) {
  ForTiles(QuantizedKernel<kFormat, kPlanes>{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

template <int kPlanes>
struct Planes {
  template <PackedFormat kFormat>
  struct Of {
    static constexpr GemmBlockFn kBlock = GemmQuantized<kFormat, kPlanes>;
  };
};

template <int kPlanes>
DT_INLINE void FillTable(GemmBlockFn (&block)[kPackedFormats]) {
  using enum PackedFormat;
  block[static_cast<int>(kF32)] = GemmF32;
  block[static_cast<int>(kBF16)] = kPlanes == 1 ? GemmRoundedBF16 : GemmBF16;
  SetQuantized<Planes<kPlanes>::template Of>(block);
}

}  // namespace

GemmKernels GemmTable() {
  GemmKernels table;
  FillTable<1>(table.block[static_cast<int>(ActivationBits::k8)]);
  FillTable<2>(table.block[static_cast<int>(ActivationBits::k16)]);
  table.quantize_rows[static_cast<int>(ActivationBits::k8)] = QuantizeRows;
  table.quantize_rows[static_cast<int>(ActivationBits::k16)] = QuantizeRowsPrecisely;
  table.join_rows = QuantizeRowsJoined;
  table.round_rows_to_bf16 = RoundRowsToBF16;
  return table;
}

}  // namespace dovetail::kernels::avx2
