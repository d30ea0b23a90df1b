#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "base/status.h"

// Little-endian, size-pinned encoding of plain structs. Each struct has one function Fields(archive, value) that names
// its fields in order; Encoder and Decoder both run it, so they cannot disagree. Numbers travel as their fixed-width
// bytes, vectors and strings as a u32 count and the elements. The decoder checks each count against its limit and the
// bytes that are left before it allocates.

namespace dovetail::proto {

// Threads: thread-compatible.
class Encoder {
 public:
  static constexpr bool kDecoding = false;
  explicit Encoder(std::vector<std::byte>& out) : out_(out) { out_.clear(); }

  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void Number(const char*, const T& value) {
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    std::memcpy(out_.data() + at, &value, sizeof(T));
  }
  void Bool(const char* name, const bool& value) { Number(name, static_cast<uint8_t>(value)); }
  template <typename Tag, typename Int>
  void Id(const char* name, const StrongId<Tag, Int>& id) {
    Number(name, id.value());
  }
  // Cut at `max`, since the reader refuses longer ones. Such a text only explains.
  void Text(const char* name, const std::string& text, size_t max) {
    const size_t size = std::min(text.size(), max);
    Number(name, static_cast<uint32_t>(size));
    Append(text.data(), size);
  }
  // A vector whose elements are copied as they are: numbers, or trivially copyable structs without padding.
  template <typename Vector>
  void Array(const char* name, const Vector& values, size_t) {
    Number(name, static_cast<uint32_t>(values.size()));
    Append(values.data(), values.size() * sizeof(values[0]));
  }
  template <typename Vector, typename F>
  void Each(const char* name, const Vector& values, size_t, F&& fields) {
    Number(name, static_cast<uint32_t>(values.size()));
    for (const auto& value : values) fields(*this, value);
  }

 private:
  void Append(const void* data, size_t size) {
    if (size == 0) return;
    const size_t at = out_.size();
    out_.resize(at + size);
    std::memcpy(out_.data() + at, data, size);
  }

  std::vector<std::byte>& out_;
};

// Threads: thread-compatible.
class Decoder {
 public:
  static constexpr bool kDecoding = true;
  explicit Decoder(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) void Number(const char* name, T& value) {
    if (!Take(name, &value, sizeof(T))) value = T{};
  }
  void Bool(const char* name, bool& value) {
    uint8_t byte = 0;
    Number(name, byte);
    if (byte > 1) Fail(name, "is neither 0 nor 1");
    value = byte == 1;
  }
  template <typename Tag, typename Int>
  void Id(const char* name, StrongId<Tag, Int>& id) {
    Int value = 0;
    Number(name, value);
    id = StrongId<Tag, Int>(value);
  }
  void Text(const char* name, std::string& text, size_t max) {
    const size_t count = Count(name, max, 1);
    text.resize(count);
    Take(name, text.data(), count);
  }
  template <typename Vector>
  void Array(const char* name, Vector& values, size_t max) {
    using T = typename Vector::value_type;
    static_assert(std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool>);
    values.resize(Count(name, max, sizeof(T)));
    Take(name, values.data(), values.size() * sizeof(T));
  }
  template <typename Vector, typename F>
  void Each(const char* name, Vector& values, size_t max, F&& fields) {
    const size_t count = Count(name, max, 1);
    values.clear();
    for (size_t i = 0; i < count && status_.ok(); ++i) fields(*this, values.emplace_back());
  }

  // For Fields functions: records the first problem. `what` completes the sentence "NAME ...".
  void Fail(const char* name, const std::string& what) {
    if (status_.ok()) status_ = InvalidArgument(name, " ", what);
  }
  void Require(bool good, const char* name, const char* what) {
    if (!good) Fail(name, what);
  }

  // The first problem, or what is left over at the end.
  absl::Status Finish() {
    if (status_.ok() && !bytes_.empty())
      status_ = InvalidArgument("message has ", bytes_.size(), " bytes after its last field");
    return status_;
  }

 private:
  bool Take(const char* name, void* to, size_t size) {
    if (!status_.ok()) return false;
    if (size > bytes_.size()) {
      Fail(name, absl::StrCat("needs ", size, " bytes, ", bytes_.size(), " are left"));
      return false;
    }
    if (size > 0) std::memcpy(to, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
    return true;
  }
  size_t Count(const char* name, size_t max, size_t element_bytes) {
    uint32_t count = 0;
    Number(name, count);
    if (!status_.ok()) return 0;
    if (count > max || count > bytes_.size() / element_bytes) {
      Fail(name, absl::StrCat("counts ", count, " elements; at most ", max, " and ", bytes_.size(), " bytes are left"));
      return 0;
    }
    return count;
  }

  std::span<const std::byte> bytes_;
  absl::Status status_;
};

}  // namespace dovetail::proto
