#include <string>

#include "base/check.h"
#include "model/tokenizer/utf8.h"
#include "server/openai/lark.h"
#include "tests/fuzz/byte_engine.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
// What is taken for a grammar is one to the compiler, too, unless it is too large for it; as a text and in JSON.
void FuzzLark(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (model::ValidUtf8Prefix(text) != size) return;  // as JSON has it
  const auto check = [](const absl::StatusOr<std::string>& written) {
    if (!written.ok()) return;
    const auto compiled = ByteEngine().Compile(grammar::SourceOf(grammar::Kind::kEbnf, *written));
    DT_CHECK(compiled.ok() || absl::IsResourceExhausted(compiled.status()), std::string(compiled.status().message()),
             *written);
  };
  check(server::EnforceableLark(text, "grammar", server::gbnf::Spelling::kText));
  check(server::EnforceableLark(text, "grammar", server::gbnf::Spelling::kJson));
  check(server::EnforceableLarkRegex(text, "grammar", server::gbnf::Spelling::kJson));
}

}  // namespace dovetail::fuzz
