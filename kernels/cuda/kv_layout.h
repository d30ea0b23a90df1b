#pragma once
#include <cstddef>
#include <cstdint>

namespace dovetail::kernels::cuda {

// Element types of a KvBlock on a GPU.
enum class KvType : int32_t { kBF16 = 0, kF16 = 1, kE4M3 = 2 };

// The memory of one KvBlock on a GPU: 64 tokens x one KV head x one attention op, K then V, contiguous, so that one
// bulk copy brings a whole block into shared memory. Both halves lie in the order in which the tensor cores' B
// operand reads them, as runs of 16 bytes ("chunks") along the dimension that is summed over:
//   K [64 tokens][key_dim], rows padded with zeros to whole chunks;      V^T [value_dim][64 tokens]
// Where a row is a multiple of 128 bytes, odd rows swap chunks i and i ^ 4, so that the eight threads of a quarter
// warp, which read four chunks of two neighbouring rows, touch every bank of shared memory once. A block begins on a
// 16-byte boundary. Pure; host and device code. Immutable, a value.
struct CudaKvLayout {
  static constexpr int kTokens = 64;
  static constexpr int kChunk = 16;

  int32_t key_dim = 0;    // multiple of 8, 8..256
  int32_t value_dim = 0;  // multiple of 8, 8..256
  KvType type = KvType::kBF16;

  constexpr int element_bytes() const { return type == KvType::kE4M3 ? 1 : 2; }
  constexpr int key_row_bytes() const { return (key_dim * element_bytes() + kChunk - 1) / kChunk * kChunk; }
  constexpr int value_row_bytes() const { return kTokens * element_bytes(); }
  constexpr int key_bytes() const { return kTokens * key_row_bytes(); }
  constexpr int value_bytes() const { return value_dim * value_row_bytes(); }
  constexpr int bytes() const { return key_bytes() + value_bytes(); }

  constexpr int key_swizzle(int token) const { return key_row_bytes() % 128 == 0 ? (token & 1) << 2 : 0; }
  constexpr int value_swizzle(int dim) const { return value_row_bytes() % 128 == 0 ? (dim & 1) << 2 : 0; }

  // Byte offset of element `dim` of the key or value of `token` (0..63) in the block.
  constexpr int key_offset(int token, int dim) const {
    const int byte = dim * element_bytes();
    return token * key_row_bytes() + ((byte / kChunk) ^ key_swizzle(token)) * kChunk + byte % kChunk;
  }
  constexpr int value_offset(int token, int dim) const {
    const int byte = token * element_bytes();
    return key_bytes() + dim * value_row_bytes() + ((byte / kChunk) ^ value_swizzle(dim)) * kChunk + byte % kChunk;
  }
};

}  // namespace dovetail::kernels::cuda
