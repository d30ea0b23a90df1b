#include "model/tokenizer/detokenizer.h"

#include <algorithm>

#include "model/tokenizer/utf8.h"

namespace dovetail::model {

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer, DetokenizeOptions options)
    : tokenizer_(&tokenizer),
      options_(options),
      strip_space_(options.at_sequence_start && tokenizer.strip_first_space()) {}

std::string IncrementalDetokenizer::Push(TokenId id) {
  const auto& shown = options_.shown_special;
  if (options_.skip_special_tokens && tokenizer_->IsSpecial(id) && !std::binary_search(shown.begin(), shown.end(), id))
    return {};
  std::string_view bytes = tokenizer_->TokenText(id);
  if (bytes.empty()) return {};
  if (strip_space_ && bytes.front() == ' ') bytes.remove_prefix(1);
  strip_space_ = false;
  pending_.append(bytes);
  return Emit(/*finish=*/false);
}

std::string IncrementalDetokenizer::Flush() { return Emit(/*finish=*/true); }

std::string IncrementalDetokenizer::Emit(bool finish) {
  std::string text;
  DrainUtf8(pending_, finish, text);
  emitted_bytes_ += text.size();
  emitted_code_points_ +=
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
  return text;
}

}  // namespace dovetail::model
