#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "base/dtype.h"
#include "kernels/cuda/attention/prefill_args.h"
#include "tests/emulated_gpu/stream_work.h"

// In place of prefill.cu, whose products are wgmma: its tiles by plain loops, each into a piece of its own; the real
// kernel joins pieces (prefill_join.cu) and writes the results. Only where DOVETAIL_EMULATED_PREFILL is set, so that
// other tests still run the kernel for few rows.

namespace dovetail::kernels::cuda {
namespace {

// OCP 8-bit floating point: 1 sign, 4 exponent (bias 7), 3 mantissa bits.
float FromE4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -x : x;
}

float Load(KvType type, const void* base, int64_t at) {
  if (type == KvType::kE4M3) return FromE4M3(static_cast<const uint8_t*>(base)[at]);
  const uint16_t bits = static_cast<const uint16_t*>(base)[at];
  return type == KvType::kBF16 ? ToFloat(BF16{bits}) : ToFloat(F16{bits});
}

float Rounded(bool bf16, float x) { return bf16 ? ToFloat(ToBF16(x)) : ToFloat(ToF16(x)); }

// What is known of the rows of a tile while its blocks are attended.
class Tile {
 public:
  // Writes to o [rows][value_dim] and ml [rows][2].
  Tile(const PrefillLaunch& p, const PrefillTile& tile, float* o, float* ml)
      : p_(p), tile_(tile), item_(p.items[tile.item]), dim_(p.layout.key_dim), o_(o), ml_(ml) {
    rows_ = std::min(kPrefillRows, item_.q_rows * p.group - tile.row0);
    const KvType wire = p.q_type == WireType::kBF16 ? KvType::kBF16 : KvType::kF16;
    for (int row = 0; row < rows_; ++row) {
      const int at = tile.row0 + row;
      const int64_t q =
          item_.q_offset + at / p.group * item_.q_row_step + int64_t{tile.head * p.group + at % p.group} * dim_;
      for (int d = 0; d < dim_; ++d) q_.push_back(Load(wire, p.q, q + d));
      ml_[2 * row] = -std::numeric_limits<float>::infinity();
      ml_[2 * row + 1] = 0;
    }
    std::fill_n(o_, rows_ * dim_, 0.0f);
    keys_.resize(CudaKvLayout::kTokens * dim_);
    values_.resize(CudaKvLayout::kTokens * dim_);
  }

  void Attend() {
    for (int block = 0; block < tile_.segments; ++block) {
      const std::byte* const at = tile_.last_block[block - tile_.segments + 1] + p_.kv_offset;
      const int there = block + 1 == tile_.segments ? tile_.last_tokens : CudaKvLayout::kTokens;
      std::fill(keys_.begin(), keys_.end(), 0.0f);
      for (int t = 0; t < there; ++t) {
        for (int d = 0; d < dim_; ++d) {
          keys_[d * CudaKvLayout::kTokens + t] = Load(p_.layout.type, at + p_.layout.key_offset(t, d), 0);
          values_[t * dim_ + d] = Load(p_.layout.type, at + p_.layout.value_offset(t, d), 0);
        }
      }
      for (int row = 0; row < rows_; ++row) Row(row, (tile_.first_segment + block) * CudaKvLayout::kTokens, there);
    }
  }

 private:
  void Row(int row, int token0, int there) {
    const int position = item_.first_position + (tile_.row0 + row) / p_.group;
    const int begin = std::max(p_.window > 0 ? position - p_.window + 1 - token0 : 0, 0);
    const int end = std::min({position + 1 - token0, item_.token_end - token0, there});
    if (begin >= end) return;
    float scores[CudaKvLayout::kTokens] = {};
    for (int d = 0; d < dim_; ++d) {
      const float q = q_[row * dim_ + d];
      for (int t = 0; t < CudaKvLayout::kTokens; ++t) scores[t] += q * keys_[d * CudaKvLayout::kTokens + t];
    }
    float &m = ml_[2 * row], &l = ml_[2 * row + 1], *const o = o_ + row * dim_;
    const float top = std::max(m, *std::max_element(scores + begin, scores + end) * p_.scale_log2);
    const float factor = std::exp2(m - top);
    m = top;
    l *= factor;
    for (int d = 0; d < dim_; ++d) o[d] *= factor;
    for (int t = begin; t < end; ++t) {
      const float weight = Rounded(p_.layout.type == KvType::kBF16, std::exp2(scores[t] * p_.scale_log2 - top));
      l += weight;
      for (int d = 0; d < dim_; ++d) o[d] += weight * values_[t * dim_ + d];
    }
  }

  const PrefillLaunch& p_;
  const PrefillTile& tile_;
  const DeviceAttentionItem& item_;
  const int dim_;
  int rows_ = 0;
  float* const o_;
  float* const ml_;
  std::vector<float> q_, keys_, values_;  // [rows][dims], [dims][64 tokens], [64 tokens][dims]
};

// Memory for pieces of tiles that have none, behind those of the launch.
struct Pieces {
  std::vector<float> o, ml;
  std::vector<PrefillJoin> joins;
  int32_t count = 0;
};

// The fixed pieces of a tile that a thread block would fold; else the tile.
std::vector<PrefillTile> PiecesOf(const PrefillLaunch& p, const PrefillTile& tile) {
  if (p.fold == nullptr || tile.segments == 0) return {tile};
  std::vector<PrefillTile> pieces;
  const int32_t end = tile.first_segment + tile.segments;
  for (int32_t first = tile.first_segment; first < end;) {
    const int32_t next = std::min((first / kFixedPieceBlocks + 1) * kFixedPieceBlocks, end);
    PrefillTile& piece = pieces.emplace_back(tile);
    piece.first_segment = first;
    piece.segments = next - first;
    piece.last_block = tile.last_block - (end - next);
    if (next < end) piece.last_tokens = CudaKvLayout::kTokens;
    first = next;
  }
  return pieces;
}

void AttendTiles(const PrefillLaunch& p, Pieces& whole) {
  const int64_t o_floats = int64_t{kPrefillRows} * p.layout.value_dim, ml_floats = int64_t{kPrefillRows} * 2;
  for (int32_t i = p.first_tile[0]; i < p.first_tile[p.grid]; ++i) {
    const PrefillTile& tile = p.tiles[i];
    if (tile.piece >= 0) {
      Tile(p, tile, p.piece_o + tile.piece * o_floats, p.piece_ml + tile.piece * ml_floats).Attend();
      continue;
    }
    PrefillJoin& join = whole.joins.emplace_back(PrefillJoin{tile.item, tile.head, tile.row0, whole.count, 0});
    for (const PrefillTile& piece : PiecesOf(p, tile)) {
      const int32_t number = whole.count++;
      whole.o.resize(whole.count * o_floats);
      whole.ml.resize(whole.count * ml_floats);
      Tile(p, piece, whole.o.data() + number * o_floats, whole.ml.data() + number * ml_floats).Attend();
      ++join.pieces;
    }
  }
}

}  // namespace

bool PrefillTakes(const CudaKvLayout* layout, WireType q_type, size_t, const DeviceLimits*) {
  static const bool set = std::getenv("DOVETAIL_EMULATED_PREFILL") != nullptr;
  if (!set || q_type == WireType::kF32 || layout->key_dim != layout->value_dim) return false;
  if (layout->type != KvType::kE4M3 && layout->type != (q_type == WireType::kBF16 ? KvType::kBF16 : KvType::kF16))
    return false;
  return layout->key_dim == 64 || layout->key_dim == 80 || layout->key_dim == 96 || layout->key_dim == 128 ||
         layout->key_dim == 256;
}

int LaunchPrefill(const PrefillLaunch* launch, void* stream) {
  emu::Do(static_cast<cudaStream_t>(stream), [p = *launch] {
    Pieces whole;
    AttendTiles(p, whole);
    PrefillLaunch rest = p;
    rest.joins = whole.joins.data();
    rest.join_count = static_cast<int32_t>(whole.joins.size());
    rest.piece_o = whole.o.data();
    rest.piece_ml = whole.ml.data();
    LaunchPrefillJoin(rest, nullptr);
  });
  return LaunchPrefillJoin(*launch, stream);
}

}  // namespace dovetail::kernels::cuda
