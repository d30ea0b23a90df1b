#include <string>

#include "base/check.h"
#include "model/tokenizer/utf8.h"
#include "server/openai/gbnf.h"
#include "tests/fuzz/byte_engine.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
// What is taken for a grammar is one to the compiler, too, unless it is too large for it.
void FuzzGbnf(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (model::ValidUtf8Prefix(text) != size) return;  // as JSON has it
  const auto written = server::EnforceableGbnf(text, "grammar");
  if (!written.ok()) return;
  const auto compiled = ByteEngine().Compile(grammar::SourceOf(grammar::Kind::kEbnf, *written));
  DT_CHECK(compiled.ok() || absl::IsResourceExhausted(compiled.status()), std::string(compiled.status().message()),
           *written);
}

}  // namespace dovetail::fuzz
