#include "kernels/cpu/gemm_avx512_common.h"

namespace dovetail::kernels::avx512 {
namespace {

DT_INLINE __m512i Broadcast4(const int8_t* x) {
  int bits;
  __builtin_memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
}

// vpdpbusd: unsigned weight codes, signed activation codes; one step is 4 columns of 16 out
// features. The integer sum of a group is exact, with two planes too (32 * 255 * 32512 < 2^29 even
// after the zero point has been taken off), so only the order
// over groups matters: ascending, one fused multiply-add for the codes and, where the format is
// affine, one for the offset.
template <PackedFormat kFormat, int kPlanes>
struct QuantizedKernel {
  static constexpr PackedTraits kTraits = kPackedTraits[static_cast<int>(kFormat)];
  static constexpr int kBits = kTraits.code_bits;
  static constexpr int kGroup = kTraits.group;
  static constexpr int kZeroShift = kTraits.zero_shift;
  static constexpr int kGroupBytes = kGroup * kTileRows * kBits / 8;
  static constexpr int kTilesTogether = 1;

  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows, int kTiles>
  void Run(int64_t row, int64_t tile, bool first) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    const ActivationGroup<kPlanes>* panel = x.QuantizedPanel<kPlanes>(row);
    __m512 sum[kRows][kTiles];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    const int64_t groups = w.cols / kGroup;
    PrefetchAhead ahead(weights + 2 * kTiles * w.tile_bytes, first ? kTiles * w.tile_bytes : 0, groups);
    for (int64_t g = 0; g < groups; ++g) {
      ahead.Step();
      __m512i product[kPlanes][kRows][kTiles];  // of the codes with each plane
      const ActivationGroup<kPlanes>& in = panel[g * kGroup / kActivationGroup];
      const int part = kGroup == 16 ? static_cast<int>(g % 2) : 0;  // of the activation group
      StartGroup<kRows, kTiles>(kGroup == 16 ? in.negative_sum16[part] : in.negative_sum, product);
      AddGroup<kRows, kTiles>(&in.codes[0][0][part * 16], weights + g * kGroupBytes, product);
      ScaleGroup<kRows, kTiles>(in, g, weights, product, sum);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) StoreTile(sum[r][t], w, out, row + r, tile + t);
    }
  }

 private:
  // The zero point costs nothing inside the group: sum (code - zero) c = sum code c - zero sum c.
  template <int kRows, int kTiles>
  __attribute__((always_inline)) void StartGroup(const int32_t* negative_sum,
                                                 __m512i (&product)[kPlanes][kRows][kTiles]) const {
    for (int r = 0; r < kRows; ++r) {
      __m512i start = _mm512_setzero_si512();
      if constexpr (!kTraits.affine) start = _mm512_slli_epi32(_mm512_set1_epi32(negative_sum[r]), kZeroShift);
      for (int t = 0; t < kTiles; ++t) {
        product[kPlanes - 1][r][t] = start;
        if constexpr (kPlanes == 2) product[0][r][t] = _mm512_setzero_si512();
      }
    }
  }

  template <int kRows, int kTiles>
  __attribute__((always_inline)) void AddGroup(const int8_t* in, const std::byte* codes,
                                               __m512i (&product)[kPlanes][kRows][kTiles]) const {
#pragma GCC unroll 8  // a loop would keep the sums of sixteen rows and planes in memory
    for (int i = 0; i < kGroupBytes / 64; ++i) {
      __m512i bytes[kTiles];
      for (int t = 0; t < kTiles; ++t) bytes[t] = _mm512_load_si512(codes + t * w.tile_bytes + i * 64);
      if constexpr (kBits == 8) {
        AddStep<kRows, kTiles>(in + 4 * i, bytes, product);
      } else {
        __m512i low[kTiles], high[kTiles];
        const __m512i nibble = _mm512_set1_epi8(15);
        for (int t = 0; t < kTiles; ++t) {
          low[t] = _mm512_and_si512(bytes[t], nibble);
          high[t] = _mm512_and_si512(_mm512_srli_epi16(bytes[t], 4), nibble);
          if constexpr (kTraits.table) {
            const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(DT_FP4_CODES));
            low[t] = _mm512_shuffle_epi8(table, low[t]);
            high[t] = _mm512_shuffle_epi8(table, high[t]);
          }
        }
        AddStep<kRows, kTiles>(in + 8 * i, low, product);
        AddStep<kRows, kTiles>(in + 8 * i + 4, high, product);
      }
    }
  }

  template <int kRows, int kTiles>
  __attribute__((always_inline)) void AddStep(const int8_t* in, const __m512i* codes,
                                              __m512i (&product)[kPlanes][kRows][kTiles]) const {
    for (int p = 0; p < kPlanes; ++p) {
      for (int r = 0; r < kRows; ++r) {
        const __m512i v = Broadcast4(in + (p * kPanelRows + r) * kActivationGroup);
        for (int t = 0; t < kTiles; ++t) product[p][r][t] = _mm512_dpbusd_epi32(product[p][r][t], codes[t], v);
      }
    }
  }

  template <int kRows, int kTiles>
  __attribute__((always_inline)) void ScaleGroup(const ActivationGroup<kPlanes>& in, int64_t g,
                                                 const std::byte* weights,
                                                 const __m512i (&product)[kPlanes][kRows][kTiles],
                                                 __m512 (&sum)[kRows][kTiles]) const {
    for (int t = 0; t < kTiles; ++t) {
      const std::byte* tile = weights + t * w.tile_bytes;
      const __m512 scale = LoadScales<kTraits.scale_bytes>(tile + w.scales_at, g);
      __m512 offset = _mm512_setzero_ps();
      if constexpr (kTraits.affine) offset = LoadScales<kTraits.scale_bytes>(tile + w.offsets_at, g);
      for (int r = 0; r < kRows; ++r) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(in.scale[r]));
        __m512i total = product[0][r][t];
        if constexpr (kPlanes == 2) total = _mm512_add_epi32(_mm512_slli_epi32(total, 8), product[1][r][t]);
        sum[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), both, sum[r][t]);
        if constexpr (kTraits.affine) sum[r][t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(in.scaled_sum[r]), sum[r][t]);
      }
    }
  }
};

template <PackedFormat kFormat, int kPlanes>
void GemmQuantized(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
                   int64_t tile_begin, int64_t tile_end) {
  ForBlocks(QuantizedKernel<kFormat, kPlanes>{x, w, out}, row_begin, row_end, tile_begin, tile_end);
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
  table.round_rows_to_bf16 = RoundRowsToBF16;
  return table;
}

}  // namespace dovetail::kernels::avx512
