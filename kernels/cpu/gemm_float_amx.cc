#include "kernels/cpu/amx.h"
#include "kernels/cpu/gemm_avx512_common.h"

// bf16 weights with AMX. An f32 of x is three bf16 numbers, whose products with a weight are exact and are summed in
// f32: 96 products of a block of 32 columns take the place of 32 multiplications in f32, at sixteen times their rate.
// tdpbf16ps sums the even and the odd columns of a block in a chain each, from 0, and adds both to the output: that is
// the order of every product here, whatever the number of rows. It takes denormals for 0.

namespace dovetail::kernels::amx {
namespace {

using avx512::StoreTile;

constexpr int kPieceElements = kSplitRows * kSplitColumns;
constexpr int kBlockElements = kSplitPieces * kPieceElements;  // of a panel of x
constexpr int kBlockBytes = kSplitColumns * kTileRows * 2;     // of a tile of weights
constexpr int64_t kChunkBlocks = 24;  // of columns: the pieces of 256 rows take 1.2 MB, which stay in L2
constexpr int kBlocksAhead = 3;       // of weights on their way to L1
constexpr int64_t kMostTiles = 8;     // that go through a chunk before the next

// Up to two panels of x and two tiles of weights: registers 0 to 3 are the outputs [panel][tile], 4 and 5 a piece of
// each panel, 6 and 7 the weights.
template <int kPanels, int kTiles>
struct Block {
  const uint16_t* x[2];
  const std::byte* w[2];
  float (*sums[2][2])[kTileRows];  // where the outputs are between chunks

  __attribute__((always_inline)) void Clear() const {
    Zero<0>();
    if constexpr (kTiles == 2) Zero<1>();
    if constexpr (kPanels == 2) Zero<2>();
    if constexpr (kPanels == 2 && kTiles == 2) Zero<3>();
  }

  __attribute__((always_inline)) void Add() const {
    Load<6>(w[0], kRowBytes);
    if constexpr (kTiles == 2) Load<7>(w[1], kRowBytes);
#pragma GCC unroll 3
    for (int piece = 0; piece < kSplitPieces; ++piece) {
      Load<4>(x[0] + piece * kPieceElements, kRowBytes);
      MultiplyBF16<0, 4, 6>();
      if constexpr (kTiles == 2) MultiplyBF16<1, 4, 7>();
      if constexpr (kPanels == 2) {
        Load<5>(x[1] + piece * kPieceElements, kRowBytes);
        MultiplyBF16<2, 5, 6>();
        if constexpr (kTiles == 2) MultiplyBF16<3, 5, 7>();
      }
    }
  }

  __attribute__((always_inline)) void Fetch() const {
    Load<0>(sums[0][0], kRowBytes);
    if constexpr (kTiles == 2) Load<1>(sums[0][1], kRowBytes);
    if constexpr (kPanels == 2) Load<2>(sums[1][0], kRowBytes);
    if constexpr (kPanels == 2 && kTiles == 2) Load<3>(sums[1][1], kRowBytes);
  }
  __attribute__((always_inline)) void Store() const {
    amx::Store<0>(sums[0][0], kRowBytes);
    if constexpr (kTiles == 2) amx::Store<1>(sums[0][1], kRowBytes);
    if constexpr (kPanels == 2) amx::Store<2>(sums[1][0], kRowBytes);
    if constexpr (kPanels == 2 && kTiles == 2) amx::Store<3>(sums[1][1], kRowBytes);
  }
};

// Rows [row_begin, row_end).
class SplitKernel {
 public:
  SplitKernel(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end)
      : x_(x), w_(w), out_(out), row_begin_(row_begin), row_end_(row_end) {
    const int64_t rows = row_end - row_begin;
    TileShapes shapes = {};
    SetShape(shapes, 0, 6, static_cast<int>(rows < kSplitRows ? rows : kSplitRows), kRowBytes);
    SetShape(shapes, 6, 2, kSplitColumns / 2, kRowBytes);
    LoadConfig(shapes);
  }
  ~SplitKernel() { Release(); }

  // Tiles [begin, end), at most kMostTiles.
  void Run(int64_t begin, int64_t end) {
    for (first_ = 0; first_ < x_.split_blocks; first_ += kChunkBlocks) {
      last_ = first_ + kChunkBlocks < x_.split_blocks ? first_ + kChunkBlocks : x_.split_blocks;
      int64_t tile = begin;
      for (; tile + 2 <= end; tile += 2) ForPanels<2>(tile, tile - begin);
      if (tile < end) ForPanels<1>(tile, tile - begin);
    }
  }

 private:
  template <int kTiles>
  __attribute__((always_inline)) void ForPanels(int64_t tile, int64_t slot) {
    int64_t row = row_begin_;
    for (; row + kSplitRows < row_end_; row += 2 * kSplitRows) AddChunk<2, kTiles>(row, tile, slot);
    if (row < row_end_) AddChunk<1, kTiles>(row, tile, slot);
  }

  // `slot`: where the sums of the first of the tiles are.
  template <int kPanels, int kTiles>
  __attribute__((always_inline)) void AddChunk(int64_t row, int64_t tile, int64_t slot) {
    Block<kPanels, kTiles> block;
    for (int p = 0; p < kPanels; ++p) {
      block.x[p] = x_.SplitPanel(row + p * kSplitRows) + first_ * kBlockElements;
      for (int t = 0; t < kTiles; ++t) block.sums[p][t] = sums_[slot + t][(row - row_begin_) / kSplitRows + p];
    }
    for (int t = 0; t < kTiles; ++t) block.w[t] = w_.data + (tile + t) * w_.tile_bytes + first_ * kBlockBytes;
    if (first_ == 0)
      block.Clear();
    else
      block.Fetch();
    const int64_t whole = w_.cols / kSplitColumns < last_ ? w_.cols / kSplitColumns : last_;
    PrefetchAhead ahead(block.w[0] + kTiles * w_.tile_bytes, row == row_begin_ ? kTiles * w_.tile_bytes : 0,
                        x_.split_blocks);
    for (int64_t i = first_; i < whole; ++i) {
      ahead.Step();
      if (row == row_begin_) FetchSoon(block);
      block.Add();
      for (int p = 0; p < kPanels; ++p) block.x[p] += kBlockElements;
      for (int t = 0; t < kTiles; ++t) block.w[t] += kBlockBytes;
    }
    if (whole < last_) AddLast(block);
    block.Store();
    if (last_ < x_.split_blocks) return;
    for (int p = 0; p < kPanels; ++p) {
      const int64_t first = row + p * kSplitRows;
      for (int64_t r = 0; r < kSplitRows && first + r < row_end_; ++r)
        for (int t = 0; t < kTiles; ++t) StoreTile(_mm512_load_ps(block.sums[p][t][r]), w_, out_, first + r, tile + t);
    }
  }

  // A register takes sixteen lines at once: few rows would wait for each time, though the lines are in L2.
  template <int kPanels, int kTiles>
  __attribute__((always_inline)) void FetchSoon(const Block<kPanels, kTiles>& block) const {
    for (int t = 0; t < kTiles; ++t)
      for (int line = 0; line < kBlockBytes; line += 64)
        __builtin_prefetch(block.w[t] + kBlocksAhead * kBlockBytes + line, 0, 3);
  }

  // Behind the last columns of a tile lies the next tile, which may have infinities.
  template <int kPanels, int kTiles>
  __attribute__((always_inline)) void AddLast(Block<kPanels, kTiles>& block) const {
    alignas(64) std::byte padded[2][kBlockBytes];
    const int64_t bytes = (w_.cols % kSplitColumns + 1) / 2 * kRowBytes;
    for (int t = 0; t < kTiles; ++t) {
      __builtin_memset(padded[t], 0, kBlockBytes);
      __builtin_memcpy(padded[t], block.w[t], static_cast<size_t>(bytes));
      block.w[t] = padded[t];
    }
    block.Add();
  }

  const GemmRows& x_;
  const PackedView& w_;
  const GemmTarget& out_;
  const int64_t row_begin_, row_end_;
  int64_t first_ = 0, last_ = 0;  // blocks of columns of the chunk
  alignas(64) float sums_[kMostTiles][kRowBlock / kSplitRows][kSplitRows][kTileRows];
};

// x as a sum of three bf16 numbers. One that is not finite is the first of them alone.
DT_INLINE void Split(__m512 x, __m512i (&pieces)[kSplitPieces]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __mmask16 finite = _mm512_cmplt_epu32_mask(
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(0x7f800000));
  // A NaN keeps a bit of its mantissa.
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  __m512i first = _mm512_and_si512(_mm512_castps_si512(x), upper);
  first = _mm512_mask_or_epi32(first, nan, first, _mm512_set1_epi32(0x400000));
  const __m512 rest = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(first));
  const __m512i second = _mm512_and_si512(_mm512_castps_si512(rest), upper);
  pieces[0] = first;
  pieces[1] = second;
  pieces[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(second)));
}

DT_INLINE __m256i UpperHalves(__m512i x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)); }

}  // namespace

void GemmSplitBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
                   int64_t tile_begin, int64_t tile_end) {
  SplitKernel kernel(x, w, out, row_begin, row_end);
  for (int64_t tile = tile_begin; tile < tile_end; tile += kMostTiles)
    kernel.Run(tile, tile_end - tile < kMostTiles ? tile_end : tile + kMostTiles);
}

void SplitRows(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  constexpr int kVector = 16;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* in = x.f32 + row * x.f32_stride;
    uint16_t* out = x.SplitPanel(row) + row % kSplitRows * kSplitColumns;
    for (int64_t block = 0; block < x.split_blocks; ++block, out += kBlockElements) {
      for (int half = 0; half < kSplitColumns; half += kVector) {
        const int64_t at = block * kSplitColumns + half, left = cols - at;
        const __mmask16 mask = left >= kVector ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
        __m512i pieces[kSplitPieces];
        Split(_mm512_maskz_loadu_ps(mask, in + at), pieces);
        for (int piece = 0; piece < kSplitPieces; ++piece)
          _mm256_store_si256(reinterpret_cast<__m256i*>(out + piece * kPieceElements + half),
                             UpperHalves(pieces[piece]));
      }
    }
  }
}

}  // namespace dovetail::kernels::amx
