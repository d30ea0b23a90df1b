#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace dovetail::kernels::cuda {

// A plain struct without padding: its bytes are its value, so they tell it from every other. What floats it has are
// kept as their bits.
// Threads: thread-safe.
template <typename T>
concept PlainRecord = std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T> &&
    (sizeof(T) % sizeof(uint64_t) == 0);

// Appends the record's bytes.
template <PlainRecord T>
void AppendWords(const T& record, std::vector<uint64_t>& words) {
  const size_t at = words.size();
  words.resize(at + sizeof(T) / sizeof(uint64_t));
  std::memcpy(words.data() + at, &record, sizeof(T));
}

}  // namespace dovetail::kernels::cuda
