#pragma once
#include <string>
#include <vector>

#include "grammar/grammar_engine.h"

namespace dovetail::fuzz {

// Compiles grammars for a vocabulary of the 256 bytes. One for all targets.
// Threads: thread-safe.
inline grammar::GrammarEngine& ByteEngine() {
  static grammar::GrammarEngine engine(
      []() -> absl::StatusOr<std::vector<std::string>> {
        std::vector<std::string> tokens;
        for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
        return tokens;
      },
      256);
  return engine;
}

}  // namespace dovetail::fuzz
