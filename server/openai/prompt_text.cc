#include "server/openai/prompt_text.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "model/tokenizer/detokenizer.h"

namespace dovetail::server {

std::string PromptText(const std::vector<TokenId>& prompt, const ServedModel& model, size_t length) {
  const auto end = prompt.begin() + static_cast<int64_t>(std::min(prompt.size(), length));
  std::string text;
  if (model.tokenizer == nullptr) {
    text = absl::StrJoin(prompt.begin(), end, ",");
  } else {
    model::IncrementalDetokenizer detokenizer(*model.tokenizer, {.skip_special_tokens = false});
    for (auto token = prompt.begin(); token != end; ++token) text += detokenizer.Push(*token);
    text += detokenizer.Flush();
  }
  if (text.size() <= length) return text;
  size_t cut = length;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;  // not within a character
  return text.substr(0, cut);
}

}  // namespace dovetail::server
