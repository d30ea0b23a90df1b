#include "base/exact_sums.h"

#include <algorithm>
#include <bit>

namespace dovetail {
namespace {

__extension__ using Wide = __int128;
__extension__ using UnsignedWide = unsigned __int128;

constexpr int kFractionBits = 64;
constexpr uint32_t kTooLarge = 127 + 40;  // the exponent, as it is stored, of the first value out of range

uint32_t ExponentOf(float value) { return std::bit_cast<uint32_t>(value) >> 23 & 0xff; }

// In units of 2^-kFractionBits.
Wide Fixed(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int exponent = static_cast<int>(bits >> 23 & 0xff);
  const uint32_t fraction = bits & 0x7fffff;
  const Wide mantissa = exponent == 0 ? fraction : fraction | 0x800000;
  const int shift = std::max(exponent, 1) - 127 - 23 + kFractionBits;
  const Wide size = shift >= 0 ? mantissa << shift : shift > -24 ? mantissa >> -shift : 0;
  return bits >> 31 != 0 ? -size : size;
}

Wide Load(const uint64_t* words) { return static_cast<Wide>(UnsignedWide{words[1]} << 64 | words[0]); }

void Store(Wide value, uint64_t* words) {
  const auto bits = static_cast<UnsignedWide>(value);
  words[0] = static_cast<uint64_t>(bits);
  words[1] = static_cast<uint64_t>(bits >> 64);
}

// Without the overflow that is undefined for signed numbers: words may come from elsewhere.
Wide Sum(Wide a, Wide b) { return static_cast<Wide>(static_cast<UnsignedWide>(a) + static_cast<UnsignedWide>(b)); }

}  // namespace

bool ExactSums::Add(std::span<const float> row) {
  if (std::any_of(row.begin(), row.end(), [](float value) { return ExponentOf(value) >= kTooLarge; })) return false;
  if (words_.empty()) words_.resize(row.size() * kWords);
  if (words_.size() != row.size() * kWords) return false;
  for (size_t i = 0; i < row.size(); ++i) {
    uint64_t* const words = words_.data() + i * kWords;
    Store(Sum(Load(words), Fixed(row[i])), words);
  }
  return true;
}

bool ExactSums::AddWords(std::span<const uint64_t> words) {
  if (words.empty() || words.size() % kWords != 0) return false;
  if (words_.empty()) words_.resize(words.size());
  if (words_.size() != words.size()) return false;
  for (size_t i = 0; i < words.size(); i += kWords)
    Store(Sum(Load(words_.data() + i), Load(words.data() + i)), words_.data() + i);
  return true;
}

std::vector<float> ExactSums::Mean(int64_t rows) const {
  std::vector<float> mean(words_.size() / kWords);
  for (size_t i = 0; i < mean.size(); ++i) {
    const double sum = static_cast<double>(Load(words_.data() + i * kWords)) * 0x1p-64;
    mean[i] = static_cast<float>(sum / static_cast<double>(rows));
  }
  return mean;
}

}  // namespace dovetail
