// Tile registers of AMX: eight, each of up to 16 rows of 64 bytes.
// Includes nothing with inline functions (gemm_kernels.h).
// Threads: reentrant; the registers are the thread's own.
#pragma once
#include <cstdint>

namespace dovetail::kernels::amx {
namespace {

#define DT_TILE_INLINE static inline __attribute__((always_inline))

inline constexpr int kRowBytes = 64;  // of a register

// What ldtilecfg reads.
struct alignas(64) TileShapes {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Registers [first, first + count) have this shape from LoadConfig to Release.
DT_TILE_INLINE void SetShape(TileShapes& shapes, int first, int count, int rows, int row_bytes) {
  shapes.palette = 1;
  for (int i = first; i < first + count; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(rows);
    shapes.row_bytes[i] = static_cast<uint16_t>(row_bytes);
  }
}

// The instructions by their names, for registers that a template chooses: the compiler's own take literals alone, and
// do not say which memory they read and write.
DT_TILE_INLINE void LoadConfig(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
DT_TILE_INLINE void Release() { asm volatile("tilerelease"); }

template <int kTile>
DT_TILE_INLINE void Zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
DT_TILE_INLINE void Load(const void* from, int64_t row_stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(kTile) : "memory");
}
template <int kTile>
DT_TILE_INLINE void Store(void* to, int64_t row_stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_stride), "i"(kTile) : "memory");
}
// sum += a b, of signed bytes and unsigned bytes.
template <int kSum, int kA, int kB>
DT_TILE_INLINE void MultiplyBytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
// sum += a b, of bf16 in f32.
template <int kSum, int kA, int kB>
DT_TILE_INLINE void MultiplyBF16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace dovetail::kernels::amx
