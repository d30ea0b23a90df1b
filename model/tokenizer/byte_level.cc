#include "model/tokenizer/byte_level.h"

#include <array>
#include <cstdint>

#include "model/tokenizer/utf8.h"

namespace dovetail::model {
namespace {

constexpr size_t kAlphabetEnd = 0x144;  // one past the largest stand-in

struct Alphabet {
  std::array<char32_t, 256> of_byte{};
  std::array<int16_t, kAlphabetEnd> byte_of{};
};

constexpr bool StandsForItself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

constexpr Alphabet MakeAlphabet() {
  Alphabet alphabet;
  for (int16_t& byte : alphabet.byte_of) byte = -1;
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const char32_t c = StandsForItself(byte) ? static_cast<char32_t>(byte) : next++;
    alphabet.of_byte[byte] = c;
    alphabet.byte_of[c] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = MakeAlphabet();
static_assert(kAlphabet.of_byte[' '] == 0x120 && kAlphabet.byte_of[kAlphabetEnd - 1] == 0xAD);

}  // namespace

std::optional<std::string> BytesOfSpelling(std::string_view spelling) {
  std::string bytes;
  bytes.reserve(spelling.size());
  while (!spelling.empty()) {
    const Utf8Step step = NextUtf8(spelling);
    if (step.kind != Utf8Kind::kValid || step.code_point >= kAlphabetEnd) return std::nullopt;
    const int16_t byte = kAlphabet.byte_of[step.code_point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    spelling.remove_prefix(step.length);
  }
  return bytes;
}

std::string SpellingOfBytes(std::string_view bytes) {
  std::string spelling;
  for (const char byte : bytes) AppendUtf8(kAlphabet.of_byte[static_cast<uint8_t>(byte)], spelling);
  return spelling;
}

}  // namespace dovetail::model
