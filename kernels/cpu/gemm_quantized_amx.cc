#include "kernels/cpu/amx.h"
#include "kernels/cpu/gemm_avx512_common.h"

// Quantised weights with AMX: tdpbsud multiplies eight rows of x, their planes below each other, with a group of a tile
// of weights, whose codes lie in memory as the instruction wants them. The integer sums are exact, and what follows is
// the arithmetic of gemm_quantized_avx512.cc, so the outputs have the same bits; a few rows go there.

namespace dovetail::kernels::amx {
namespace {

using avx512::LoadScales;
using avx512::StoreTile;

constexpr int64_t kFewRows = 32;    // fewer are faster with AVX-512
constexpr int64_t kTiles = 4;       // that go through a chunk of columns together
constexpr int kChunkColumns = 256;  // the codes of so many in four tiles, and what meets them of eight rows, stay in L1
constexpr int kTogether = 4;        // groups of a panel, in registers 0 to 3

template <PackedFormat kFormat, int kPlanes>
class QuantizedKernel {
 public:
  QuantizedKernel(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end)
      : x_(x), w_(w), out_(out), row_begin_(row_begin), row_end_(row_end) {
    TileShapes shapes = {};
    SetShape(shapes, 0, kTogether, kPlanes * kPanelRows, kRowBytes);
    SetShape(shapes, 4, 2, kPlanes * kPanelRows, kGroup);
    SetShape(shapes, 6, 2, kGroup / 4, kRowBytes);
    LoadConfig(shapes);
  }
  ~QuantizedKernel() { Release(); }

  // Tiles [begin, end), at most kTiles.
  __attribute__((always_inline)) void Run(int64_t begin, int64_t end) {
    const int64_t groups = w_.cols / kGroup;
    for (first_ = 0; first_ < groups; first_ += kChunkGroups) {
      count_ = groups - first_ < kChunkGroups ? groups - first_ : kChunkGroups;
      const std::byte* codes[kTiles];
      for (int64_t t = 0; t < end - begin; ++t) {
        codes[t] = Codes(w_.data + (begin + t) * w_.tile_bytes, unpacked_[t]);
      }
      for (int64_t row = row_begin_; row < row_end_; row += kPanelRows) {
        for (int64_t t = 0; t < end - begin; ++t) {
          tile_ = w_.data + (begin + t) * w_.tile_bytes;
          codes_ = codes[t];
          AddPanel(row, sums_[t] + (row - row_begin_));
        }
      }
    }
    for (int64_t t = 0; t < end - begin; ++t) {
      for (int64_t row = row_begin_; row < row_end_; ++row)
        StoreTile(_mm512_load_ps(sums_[t][row - row_begin_]), w_, out_, row, begin + t);
    }
  }

 private:
  static constexpr PackedTraits kTraits = kPackedTraits[static_cast<int>(kFormat)];
  static constexpr int kGroup = kTraits.group;
  static constexpr int kChunkGroups = kChunkColumns / kGroup;
  static constexpr int kGroupBytes = kGroup * kTileRows;  // of codes in bytes

  // The codes of the chunk in bytes.
  __attribute__((always_inline)) const std::byte* Codes(const std::byte* tile, std::byte* unpacked) const {
    const std::byte* packed = tile + first_ * kGroupBytes * kTraits.code_bits / 8;
    const int64_t bytes = count_ * kGroupBytes * kTraits.code_bits / 8;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(packed + kTiles * w_.tile_bytes + i, 0, 2);
    if constexpr (kTraits.code_bits == 8) return packed;
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < bytes; i += 64) {
      const __m512i both = _mm512_load_si512(packed + i);
      __m512i low = _mm512_and_si512(both, nibble), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
      if constexpr (kTraits.table) {
        const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(DT_FP4_CODES));
        low = _mm512_shuffle_epi8(table, low);
        high = _mm512_shuffle_epi8(table, high);
      }
      _mm512_store_si512(unpacked + 2 * i, low);
      _mm512_store_si512(unpacked + 2 * i + 64, high);
    }
    return unpacked;
  }

  // Eight rows of x through the chunk. Of those that do not exist, what happens to lie there.
  __attribute__((always_inline)) void AddPanel(int64_t row, float (*at)[kTileRows]) {
    panel_ = x_.QuantizedPanel<kPlanes>(row) + first_ * kGroup / kActivationGroup;
    __m512 sum[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) sum[r] = first_ == 0 ? _mm512_setzero_ps() : _mm512_load_ps(at[r]);
    int64_t group = 0;
    for (; group + kTogether <= count_; group += kTogether) AddGroups<kTogether>(group, sum);
    for (; group < count_; ++group) AddGroups<1>(group, sum);
    for (int r = 0; r < kPanelRows; ++r) _mm512_store_ps(at[r], sum[r]);
  }

  // A product is stored while the next one is computed.
  template <int kCount>
  __attribute__((always_inline)) void AddGroups(int64_t group, __m512 (&sum)[kPanelRows]) {
    Multiply<0>(group);
    if constexpr (kCount == kTogether) {
      Multiply<1>(group + 1);
      Store<0>(products_[0], kRowBytes);
      Multiply<2>(group + 2);
      Store<1>(products_[1], kRowBytes);
      Multiply<3>(group + 3);
      Store<2>(products_[2], kRowBytes);
    }
    Store<kCount - 1>(products_[kCount - 1], kRowBytes);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) Add(group + i, products_[i], sum);
  }

  template <int kAt>
  __attribute__((always_inline)) void Multiply(int64_t group) {
    const ActivationGroup<kPlanes>& in = panel_[group * kGroup / kActivationGroup];
    const int64_t part = kGroup == 16 ? group % 2 : 0;  // of the activation group
    Zero<kAt>();
    Load<4 + kAt % 2>(&in.codes[0][0][part * 16], kActivationGroup);
    Load<6 + kAt % 2>(codes_ + group * kGroupBytes, kRowBytes);
    MultiplyBytes<kAt, 4 + kAt % 2, 6 + kAt % 2>();
  }

  __attribute__((always_inline)) void Add(int64_t group, const int32_t (&products)[2 * kPanelRows][kTileRows],
                                          __m512 (&sum)[kPanelRows]) const {
    const ActivationGroup<kPlanes>& in = panel_[group * kGroup / kActivationGroup];
    const __m512 scale = LoadScales<kTraits.scale_bytes>(tile_ + w_.scales_at, first_ + group);
    __m512 offset = _mm512_setzero_ps();
    if constexpr (kTraits.affine) offset = LoadScales<kTraits.scale_bytes>(tile_ + w_.offsets_at, first_ + group);
    const int32_t* negative_sum = kGroup == 16 ? in.negative_sum16[group % 2] : in.negative_sum;
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) {
      __m512i total = _mm512_load_si512(products[r]);
      if constexpr (kPlanes == 2)
        total = _mm512_add_epi32(_mm512_slli_epi32(total, 8), _mm512_load_si512(products[kPanelRows + r]));
      if constexpr (!kTraits.affine)
        total = _mm512_add_epi32(total, _mm512_slli_epi32(_mm512_set1_epi32(negative_sum[r]), kTraits.zero_shift));
      sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(scale, _mm512_set1_ps(in.scale[r])), sum[r]);
      if constexpr (kTraits.affine) sum[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(in.scaled_sum[r]), sum[r]);
    }
  }

  const GemmRows& x_;
  const PackedView& w_;
  const GemmTarget& out_;
  const int64_t row_begin_, row_end_;
  const std::byte* tile_ = nullptr;
  const std::byte* codes_ = nullptr;                 // of the chunk
  const ActivationGroup<kPlanes>* panel_ = nullptr;  // the chunk of eight rows
  int64_t first_ = 0, count_ = 0;                    // groups of the chunk
  alignas(64) int32_t products_[kTogether][2 * kPanelRows][kTileRows];
  alignas(64) std::byte unpacked_[kTiles][kTraits.code_bits == 8 ? 64 : kChunkColumns * kTileRows];
  alignas(64) float sums_[kTiles][kRowBlock][kTileRows];
};

template <PackedFormat kFormat, int kPlanes>
void GemmQuantized(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
                   int64_t tile_begin, int64_t tile_end) {
  if (row_end - row_begin < kFewRows) {
    static const GemmKernels few = avx512::GemmTable();
    return few.block[kPlanes - 1][static_cast<int>(kFormat)](x, w, out, row_begin, row_end, tile_begin, tile_end);
  }
  QuantizedKernel<kFormat, kPlanes> kernel(x, w, out, row_begin, row_end);
  for (int64_t tile = tile_begin; tile < tile_end; tile += kTiles)
    kernel.Run(tile, tile_end - tile < kTiles ? tile_end : tile + kTiles);
}

template <int kPlanes>
struct Planes {
  template <PackedFormat kFormat>
  struct Of {
    static constexpr GemmBlockFn kBlock = GemmQuantized<kFormat, kPlanes>;
  };
};

}  // namespace

GemmKernels GemmTable() {
  GemmKernels table = avx512::GemmTable();
  SetQuantized<Planes<1>::Of>(table.block[static_cast<int>(ActivationBits::k8)]);
  SetQuantized<Planes<2>::Of>(table.block[static_cast<int>(ActivationBits::k16)]);
  table.block[static_cast<int>(ActivationBits::k16)][static_cast<int>(PackedFormat::kBF16)] = GemmSplitBF16;
  table.split_rows = SplitRows;
  return table;
}

}  // namespace dovetail::kernels::amx
