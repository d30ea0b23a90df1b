#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

// Element and block types of stored weights, numbered as in GGUF (ggml-org/ggml, include/ggml.h).
// Threads: pure.

namespace dovetail::model {

// The types that this program can read. Values are GGUF's.
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
  kMXFP4 = 39,
};

inline constexpr GgmlType kAllGgmlTypes[] = {GgmlType::kF32,  GgmlType::kF16,  GgmlType::kQ4_0, GgmlType::kQ4_1,
                                             GgmlType::kQ5_0, GgmlType::kQ5_1, GgmlType::kQ8_0, GgmlType::kQ4_K,
                                             GgmlType::kQ5_K, GgmlType::kQ6_K, GgmlType::kBF16, GgmlType::kMXFP4};

// The type with GGUF's number `id`, or nullopt when this program cannot read it.
std::optional<GgmlType> GgmlTypeFromId(uint32_t id);

// "Q4_K"; for a number that is no readable type its name in ggml ("IQ2_XXS") or "type 77".
std::string GgmlTypeName(uint32_t id);
std::string_view Name(GgmlType type);

// Elements of one block (1 for plain types) and its bytes. A row holds whole blocks.
int64_t BlockElements(GgmlType type);
int64_t BlockBytes(GgmlType type);

// Bytes of a row of `columns` elements; columns is a multiple of BlockElements(type).
inline int64_t RowBytes(GgmlType type, int64_t columns) { return columns / BlockElements(type) * BlockBytes(type); }

// Whether a block holds more than one element.
inline bool IsQuantized(GgmlType type) { return BlockElements(type) > 1; }

}  // namespace dovetail::model
