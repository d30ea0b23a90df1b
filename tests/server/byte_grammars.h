#pragma once
#include <memory>
#include <string>
#include <vector>

#include "grammar/grammar_engine.h"

namespace dovetail::server::test {

inline constexpr TokenId kByteEnd = 256;  // of the tokens below

// Grammars over tokens that are the 256 bytes and an end. Made once; thread-safe.
inline const std::shared_ptr<grammar::GrammarEngine>& ByteGrammars() {
  static const auto engine = std::make_shared<grammar::GrammarEngine>(
      []() -> absl::StatusOr<std::vector<std::string>> {
        std::vector<std::string> tokens;
        for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
        tokens.emplace_back();
        return tokens;
      },
      257);
  return engine;
}

}  // namespace dovetail::server::test
