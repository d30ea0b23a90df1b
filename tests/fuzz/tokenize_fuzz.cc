// Any bytes as a prompt: invalid UTF-8 is refused, anything else encodes, and decodes to what it was.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

using model::IncrementalDetokenizer;
using model::PreTokenizer;
using model::PromptPart;
using model::Tokenizer;
using model::TokenizerData;
using model::TokenType;

// The 256 byte tokens, a few merges of English letters, two control tokens and a user-defined one.
TokenizerData SmallData() {
  TokenizerData data;
  for (int byte = 0; byte < 256; ++byte)
    data.tokens.push_back(model::SpellingOfBytes(std::string(1, static_cast<char>(byte))));
  for (const char* word : {"th", "the", "in", "ing"}) data.tokens.push_back(model::SpellingOfBytes(word));
  data.types.assign(data.tokens.size(), TokenType::kNormal);
  data.merges = {{'t', 'h'}, {256, 'e'}, {'i', 'n'}, {258, 'g'}};
  for (const char* special : {"<|bos|>", "<|end|>", "<x>"}) data.tokens.emplace_back(special);
  data.types.insert(data.types.end(), {TokenType::kControl, TokenType::kControl, TokenType::kUserDefined});
  data.prefix_ids = {260};
  return data;
}

const Tokenizer& TokenizerFor(PreTokenizer pre) {
  static const auto* const tokenizers = [] {
    auto* all = new std::vector<std::unique_ptr<const Tokenizer>>;
    for (int i = static_cast<int>(PreTokenizer::kGpt2); i <= static_cast<int>(PreTokenizer::kSmolLm); ++i) {
      TokenizerData data = SmallData();
      data.pre_tokenizer = static_cast<PreTokenizer>(i);
      auto tokenizer = Tokenizer::Create(data);
      DT_CHECK(tokenizer.ok(), tokenizer.status().ToString());
      all->push_back(*std::move(tokenizer));
    }
    return all;
  }();
  return *(*tokenizers)[static_cast<size_t>(pre) - static_cast<size_t>(PreTokenizer::kGpt2)];
}

void TokenizeOne(PreTokenizer pre, bool input, std::string_view text) {
  const Tokenizer& tokenizer = TokenizerFor(pre);
  const PromptPart part{std::string(text), input};
  const auto ids = tokenizer.EncodeParts({&part, 1}, {.add_special = false});
  DT_CHECK(ids.ok() == (model::ValidUtf8Prefix(text) == text.size()));
  if (!ids.ok()) return;
  std::string decoded;
  IncrementalDetokenizer detokenizer(tokenizer, {.skip_special_tokens = false, .at_sequence_start = true});
  for (const TokenId id : *ids) {
    DT_CHECK(!input || !tokenizer.IsSpecial(id), "input made a control token");
    decoded += detokenizer.Push(id);
  }
  DT_CHECK(decoded + detokenizer.Flush() == text, "decoding gave another text");
}

}  // namespace

// The first byte chooses the pre-tokenizer and whether the rest is a user's text.
void FuzzTokenize(const uint8_t* data, size_t size) {
  if (size == 0) return;
  constexpr int kKinds = static_cast<int>(PreTokenizer::kSmolLm);  // kGpt2 is 1
  const auto pre = static_cast<PreTokenizer>(1 + (data[0] & 0x7F) % kKinds);
  TokenizeOne(pre, (data[0] & 0x80) != 0, {reinterpret_cast<const char*>(data) + 1, size - 1});
}

}  // namespace dovetail::fuzz
