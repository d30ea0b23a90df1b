#pragma once
#include <cstddef>
#include <cstdint>

namespace dovetail::kernels::cuda {

// Element types of a KvBlock on a GPU.
enum class KvType : int32_t { kBF16 = 0, kF16 = 1, kE4M3 = 2 };

// The memory of one KvBlock on a GPU: 64 tokens x one KV head x one attention op, K then V, contiguous, so that one
// bulk copy brings a whole block into shared memory. Both halves consist of runs of 16 bytes ("chunks"):
//   K [64 tokens][key_dim], rows padded with zeros to whole chunks
//   V of 16 bits: [64 tokens][value_dim], which ldmatrix transposes; of 8 bits, which it cannot:
//     [64 tokens / 16][value_dim][16 tokens], so that a chunk runs along the dimension that is summed over
// A token's K, and its V of 16 bits, are contiguous, and what a block does not hold yet lies at the end of either.
//
// What eight threads read at once touches every bank of shared memory once. Of 16 bits, row t of K and V keeps chunk i
// at the place i ^ (t & 7) where a row is a multiple of 128 bytes, and with as many bits less as it is a multiple of a
// smaller power of two: columns of 128, 64 or 32 bytes of such rows, one below the other, are what wgmma reads
// (prefill_kernel.cuh). Of K in 8 bits, where a row is a multiple of 128 bytes, odd rows swap chunks i and i ^ 4, of
// which the threads read four each of two neighbouring rows; of V in 8 bits they read two neighbouring dimensions of
// four chunks, which chunk c keeps at the places i ^ 2c. A block begins on a 16-byte boundary.
// Threads: thread-compatible; a value. Its functions are pure, for host and device code.
struct CudaKvLayout {
  static constexpr int kTokens = 64;
  static constexpr int kChunk = 16;
  // Memory that is there before the first block of an arena: tensor maps begin up to 64 rows before a block.
  static constexpr int kArenaLead = kTokens * 512;

  int32_t key_dim = 0;    // multiple of 8, 8..256
  int32_t value_dim = 0;  // multiple of 8, 8..256
  KvType type = KvType::kBF16;

  constexpr int element_bytes() const { return type == KvType::kE4M3 ? 1 : 2; }
  constexpr int key_row_bytes() const { return (key_dim * element_bytes() + kChunk - 1) / kChunk * kChunk; }
  constexpr int value_row_bytes() const { return value_dim * element_bytes(); }
  constexpr bool values_by_row() const { return type != KvType::kE4M3; }
  constexpr int key_bytes() const { return kTokens * key_row_bytes(); }
  constexpr int value_bytes() const { return value_dim * kTokens * element_bytes(); }
  constexpr int bytes() const { return key_bytes() + value_bytes(); }

  constexpr int key_swizzle(int token) const {
    if (element_bytes() == 2) return row_swizzle(token, key_row_bytes());
    return key_row_bytes() % 128 == 0 ? (token & 1) << 2 : 0;
  }
  // Of rows of 16 bits.
  static constexpr int row_swizzle(int token, int row_bytes) {
    const int chunks = row_bytes / kChunk;
    const int bits = chunks % 8 == 0 ? 3 : chunks % 4 == 0 ? 2 : chunks % 2 == 0 ? 1 : 0;
    return (token & 7) >> (3 - bits);
  }
  // Of V in chunks of 16 tokens.
  static constexpr int chunk_swizzle(int chunk) { return (chunk & 3) << 1; }
  // Of V, those that hold its first tokens.
  constexpr int value_bytes_of(int tokens) const {
    return values_by_row() ? tokens * value_row_bytes() : (tokens + kChunk - 1) / kChunk * value_dim * kChunk;
  }

  // Byte offset of element `dim` of the key or value of `token` (0..63) in the block.
  constexpr int key_offset(int token, int dim) const {
    const int byte = dim * element_bytes();
    return token * key_row_bytes() + ((byte / kChunk) ^ key_swizzle(token)) * kChunk + byte % kChunk;
  }
  constexpr int value_offset(int token, int dim) const {
    if (values_by_row()) {
      const int byte = dim * element_bytes();
      return key_bytes() + token * value_row_bytes() +
             ((byte / kChunk) ^ row_swizzle(token, value_row_bytes())) * kChunk + byte % kChunk;
    }
    const int chunk = token / kChunk;
    return key_bytes() + (chunk * value_dim + (dim ^ chunk_swizzle(chunk))) * kChunk + token % kChunk;
  }
};

}  // namespace dovetail::kernels::cuda
