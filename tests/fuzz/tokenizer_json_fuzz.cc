#include <optional>
#include <string_view>

#include "base/check.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/tokenizer_json.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {

// Any bytes as tokenizer.json and, after a NUL, tokenizer_config.json: an error, or a tokenizer that works.
void FuzzTokenizerJson(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t nul = text.find('\0');
  std::optional<std::string_view> config;
  if (nul != std::string_view::npos) config = text.substr(nul + 1);
  auto parsed = model::TokenizerDataFromJson(text.substr(0, nul), config);
  if (!parsed.ok()) {
    DT_CHECK(!parsed.status().message().empty());
    return;
  }
  const auto tokenizer = model::Tokenizer::Create(*parsed);
  if (!tokenizer.ok()) return;
  const auto ids = (*tokenizer)->Encode("The <s> 12 caf\xC3\xA9\n\n", {.parse_special = true});
  DT_CHECK(ids.ok(), ids.status().ToString());
  for (const TokenId id : *ids) DT_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
  (void)(*tokenizer)->Decode(*ids, /*skip_special=*/true);
}

}  // namespace dovetail::fuzz
