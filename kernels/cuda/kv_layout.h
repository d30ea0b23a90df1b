#pragma once
#include <cstddef>
#include <cstdint>

namespace dovetail::kernels::cuda {

// Element types of a KvBlock on a GPU.
enum class KvType : int32_t { kBF16 = 0, kF16 = 1, kE4M3 = 2 };

// The memory of one KvBlock on a GPU: 64 tokens x one KV head x one attention op, K then V, contiguous, so that one
// bulk copy brings a whole block into shared memory. Both halves consist of runs of 16 bytes ("chunks") along the
// dimension that is summed over, as the tensor cores' B operand reads them:
//   K [64 tokens][key_dim], rows padded with zeros to whole chunks
//   V [64 tokens / those of a chunk][value_dim][tokens of a chunk], so that a token is stored into few lines of memory
//   and what a block does not hold yet lies at the end
// The eight threads of a quarter warp touch every bank of shared memory once: where a row of K is a multiple of 128
// bytes, odd rows swap chunks i and i ^ 4, of which the threads read four each of two neighbouring rows; of V they read
// two neighbouring dimensions of four chunks, which chunk c keeps at the places i ^ 2c. A block begins on a 16-byte
// boundary. Pure; host and device code. Immutable, a value.
struct CudaKvLayout {
  static constexpr int kTokens = 64;
  static constexpr int kChunk = 16;

  int32_t key_dim = 0;    // multiple of 8, 8..256
  int32_t value_dim = 0;  // multiple of 8, 8..256
  KvType type = KvType::kBF16;

  constexpr int element_bytes() const { return type == KvType::kE4M3 ? 1 : 2; }
  constexpr int key_row_bytes() const { return (key_dim * element_bytes() + kChunk - 1) / kChunk * kChunk; }
  constexpr int chunk_tokens() const { return kChunk / element_bytes(); }  // of V
  constexpr int key_bytes() const { return kTokens * key_row_bytes(); }
  constexpr int value_bytes() const { return value_dim * kTokens * element_bytes(); }
  constexpr int bytes() const { return key_bytes() + value_bytes(); }

  constexpr int key_swizzle(int token) const { return key_row_bytes() % 128 == 0 ? (token & 1) << 2 : 0; }
  static constexpr int value_swizzle(int chunk) { return (chunk & 3) << 1; }
  // Of V, those that hold its first tokens.
  constexpr int value_bytes_of(int tokens) const {
    return (tokens + chunk_tokens() - 1) / chunk_tokens() * value_dim * kChunk;
  }

  // Byte offset of element `dim` of the key or value of `token` (0..63) in the block.
  constexpr int key_offset(int token, int dim) const {
    const int byte = dim * element_bytes();
    return token * key_row_bytes() + ((byte / kChunk) ^ key_swizzle(token)) * kChunk + byte % kChunk;
  }
  constexpr int value_offset(int token, int dim) const {
    const int chunk = token / chunk_tokens();
    return key_bytes() + (chunk * value_dim + (dim ^ value_swizzle(chunk))) * kChunk +
           token % chunk_tokens() * element_bytes();
  }
};

}  // namespace dovetail::kernels::cuda
