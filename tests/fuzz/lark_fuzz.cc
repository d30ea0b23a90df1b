#include <string>

#include "base/check.h"
#include "grammar/grammar_engine.h"
#include "model/tokenizer/utf8.h"
#include "server/openai/lark.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

// A vocabulary of bytes.
grammar::GrammarEngine& Engine() {
  static grammar::GrammarEngine engine(
      []() -> absl::StatusOr<std::vector<std::string>> {
        std::vector<std::string> tokens;
        for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
        return tokens;
      },
      256);
  return engine;
}

}  // namespace

// What is taken for a grammar is one to the compiler, too, unless it is too large for it; as a text and in JSON.
void FuzzLark(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (model::ValidUtf8Prefix(text) != size) return;  // as JSON has it
  const auto check = [](const absl::StatusOr<std::string>& written) {
    if (!written.ok()) return;
    const auto compiled = Engine().Compile(grammar::SourceOf(grammar::Kind::kEbnf, *written));
    DT_CHECK(compiled.ok() || absl::IsResourceExhausted(compiled.status()), std::string(compiled.status().message()),
             *written);
  };
  check(server::EnforceableLark(text, "grammar", server::gbnf::Spelling::kText));
  check(server::EnforceableLark(text, "grammar", server::gbnf::Spelling::kJson));
  check(server::EnforceableLarkRegex(text, "grammar", server::gbnf::Spelling::kJson));
}

}  // namespace dovetail::fuzz
