#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace dovetail::compute {

// Sets what a grammar's mask does not let follow to -infinity. Bit i % 32 of word i / 32 is token i; `mask` has a word
// for each 32 of the `logits` or a part of them. Most words of a mask are all ones or all zeroes, so that a row costs
// about as much as writing it.
// Threads: pure.
inline void MaskRow(std::span<const uint32_t> mask, std::span<float> logits) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (size_t word = 0, begin = 0; begin < logits.size(); ++word, begin += 32) {
    const size_t count = std::min<size_t>(32, logits.size() - begin);
    const uint32_t bits = mask[word];
    if (bits == ~uint32_t{0}) continue;
    float* const at = logits.data() + begin;
    if (bits == 0) {
      std::fill_n(at, count, kNever);
      continue;
    }
    for (size_t i = 0; i < count; ++i) at[i] = (bits >> i & 1) != 0 ? at[i] : kNever;
  }
}

}  // namespace dovetail::compute
