#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "model/formats/ggml_types.h"

// The bytes of one GGUF file as checked views. Format: ggml-org/ggml, docs/gguf.md. Everything is validated here, once,
// against the bytes that are really there; nothing is copied, so hostile counts cost no memory.
// Threads: pure.

namespace dovetail::model {

enum class GgufValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

std::string_view Name(GgufValueType type);

// A metadata value. `bytes` views the file: a scalar's little-endian bytes, a string's characters, or an array's
// `count` elements (each string element is a u64 length and its bytes; the parser has checked them all).
struct GgufValue {
  GgufValueType type = GgufValueType::kU8;
  GgufValueType element = GgufValueType::kU8;  // of an array
  uint64_t count = 0;                          // of an array
  std::span<const std::byte> bytes;
};

struct GgufTensor {
  std::string_view name;
  std::vector<int64_t> dims;  // innermost first: dims[0] is the length of a row. One to four, each at least 1
  GgmlType type = GgmlType::kF32;
  int64_t elements = 0;
  std::span<const std::byte> bytes;
  int part = 0;  // index into GgufFile's parts
};

// What one file holds, in file order. Views into the bytes that were parsed.
struct GgufContents {
  uint32_t version = 0;
  uint32_t alignment = 32;
  std::vector<std::pair<std::string_view, GgufValue>> metadata;  // keys are unique and not empty
  std::vector<GgufTensor> tensors;                               // names are unique
};

// Limits of this reader, stricter than the format's.
inline constexpr uint64_t kGgufMaxKeys = 65536;
inline constexpr uint64_t kGgufMaxTensors = 65536;
inline constexpr uint64_t kGgufMaxStringBytes = uint64_t{1} << 20;
inline constexpr uint64_t kGgufMaxArrayElements = uint64_t{1} << 30;
inline constexpr uint64_t kGgufMaxAlignment = uint64_t{1} << 20;

// Reads `bytes`, called `name` in error texts. The result views `bytes` and must not outlive it.
// Errors: kDataLoss when the file ends too early; kUnimplemented for versions and tensor types that this program does
// not read; kInvalidArgument for everything else the format forbids.
absl::StatusOr<GgufContents> ParseGguf(const std::string& name, std::span<const std::byte> bytes);

}  // namespace dovetail::model
