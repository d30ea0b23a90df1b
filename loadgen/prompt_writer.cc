#include "loadgen/prompt_writer.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace dovetail::loadgen {
namespace {

constexpr size_t kFewestWords = 16;
constexpr size_t kMostWords = 4096;  // of a vocabulary: prompts need variety, not all of it
constexpr int kCorrections = 10;

// Short, frequent, and no two of them the same in lower case.
constexpr const char* kWords =
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good sentence "
    "man think say great where help through much before line right too mean old any same tell boy follow came want "
    "show also around form three small set put end does another well large must big even such because turn here why "
    "ask went men read need land different home us move try kind hand picture again change off play spell air away "
    "animal house point page letter mother answer found study still learn should world high every near add food "
    "between own below country plant last school father keep tree never start city earth eye light thought head under "
    "story saw left few while along might close something seem next hard open example begin life always those both "
    "paper together got group often run";

bool IsWord(std::string_view text) {
  return text.size() >= 2 && text.size() <= 16 &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return absl::ascii_isalpha(c); });
}

std::string Repeated(const std::string& word, int times) {
  std::vector<std::string> words(static_cast<size_t>(times), word);
  return absl::StrJoin(words, " ");
}

// How many tokens one more of `word` adds to a text that has it already.
absl::StatusOr<double> TokensOf(TokenCounter& counter, const std::string& word) {
  DT_ASSIGN_OR_RETURN(const int64_t few, counter.Count(Repeated(word, 2)));
  DT_ASSIGN_OR_RETURN(const int64_t more, counter.Count(Repeated(word, 6)));
  return static_cast<double>(more - few) / 4;
}

absl::StatusOr<Vocabulary> Measured(TokenCounter& counter, const std::vector<std::string>& words, std::string source) {
  Vocabulary vocabulary;
  vocabulary.source = std::move(source);
  for (const std::string& word : words) {
    if (vocabulary.words.size() == kMostWords) break;
    DT_ASSIGN_OR_RETURN(const double tokens, TokensOf(counter, word));
    if (tokens == 1) vocabulary.words.push_back(word);
  }
  if (vocabulary.words.size() < kFewestWords) {
    vocabulary.words = CommonWords();
    DT_ASSIGN_OR_RETURN(const int64_t all, counter.Count(absl::StrJoin(vocabulary.words, " ")));
    vocabulary.tokens_per_word = static_cast<double>(all) / static_cast<double>(vocabulary.words.size());
  }
  // What a text has in addition: the beginning and end tokens of the model.
  const std::string& word = vocabulary.words.front();
  DT_ASSIGN_OR_RETURN(const int64_t few, counter.Count(Repeated(word, 2)));
  DT_ASSIGN_OR_RETURN(const double each, TokensOf(counter, word));
  vocabulary.special_tokens = std::max<int64_t>(0, few - std::llround(2 * each));
  return vocabulary;
}

}  // namespace

absl::StatusOr<int64_t> LocalTokenCounter::Count(std::string_view text) {
  model::EncodeOptions options;
  options.max_input_bytes = SIZE_MAX;
  DT_ASSIGN_OR_RETURN(const auto ids, tokenizer_->Encode(text, options));
  return static_cast<int64_t>(ids.size());
}

absl::StatusOr<int64_t> LocalTokenCounter::CountAnswer(std::string_view text) {
  model::EncodeOptions options;
  options.max_input_bytes = SIZE_MAX;
  options.add_special = false;
  DT_ASSIGN_OR_RETURN(const auto ids, tokenizer_->Encode(text, options));
  return static_cast<int64_t>(ids.size());
}

const std::vector<std::string>& CommonWords() {
  static const auto* const words = new std::vector<std::string>(absl::StrSplit(kWords, ' ', absl::SkipEmpty()));
  return *words;
}

absl::StatusOr<Vocabulary> VocabularyOf(const model::Tokenizer& tokenizer, std::string source) {
  std::vector<std::string> words;
  for (TokenId id = 0; id < tokenizer.vocab_size() && words.size() < 2 * kMostWords; ++id) {
    if (tokenizer.IsSpecial(id)) continue;
    const std::string_view text = tokenizer.TokenText(id);
    if (text.size() > 1 && text[0] == ' ' && IsWord(text.substr(1))) words.emplace_back(text.substr(1));
  }
  // Not owned: the caller's outlives this call.
  LocalTokenCounter counter(std::shared_ptr<const model::Tokenizer>(&tokenizer, [](const model::Tokenizer*) {}));
  return Measured(counter, words, std::move(source));
}

absl::StatusOr<Vocabulary> VocabularyOf(TokenCounter& counter, std::string source) {
  return Measured(counter, CommonWords(), std::move(source));
}

Vocabulary GuessedVocabulary(double tokens_per_word, std::string source) {
  Vocabulary vocabulary;
  vocabulary.words = CommonWords();
  vocabulary.tokens_per_word = tokens_per_word;
  vocabulary.source = std::move(source);
  return vocabulary;
}

PromptWriter::PromptWriter(Vocabulary vocabulary, TokenCounter* counter)
    : vocabulary_(std::move(vocabulary)), counter_(counter) {}

const std::string& PromptWriter::Word(Random& random) const {
  return vocabulary_.words[random() % vocabulary_.words.size()];
}

void PromptWriter::Append(std::string& text, int64_t words, Random& random) const {
  for (int64_t i = 0; i < words; ++i) {
    if (!text.empty() && text.back() != ' ' && text.back() != '\n') text += ' ';
    text += Word(random);
  }
}

std::string PromptWriter::Piece(int64_t tokens, Random& random) const {
  std::string text;
  Append(text, std::llround(static_cast<double>(tokens) / vocabulary_.tokens_per_word), random);
  return text;
}

absl::StatusOr<Prompt> PromptWriter::Complete(std::string beginning, int64_t tokens, Random& random) const {
  const size_t kept = beginning.size();
  Prompt prompt{std::move(beginning), 0};
  int64_t have = vocabulary_.special_tokens;
  if (kept > 0) {
    DT_ASSIGN_OR_RETURN(const int64_t counted, Count(prompt.text));
    const auto words =
        1 + std::count_if(prompt.text.begin(), prompt.text.end(), [](char c) { return c == ' ' || c == '\n'; });
    have = counted >= 0 ? counted : std::llround(static_cast<double>(words) * vocabulary_.tokens_per_word);
  }
  const auto words_for = [this](int64_t missing) {
    return std::llround(static_cast<double>(missing) / vocabulary_.tokens_per_word);
  };
  Append(prompt.text, words_for(tokens - have), random);
  if (prompt.text.empty()) Append(prompt.text, 1, random);  // a prompt has at least a token
  prompt.tokens = tokens;
  for (int correction = 0; counter_ != nullptr && correction < kCorrections; ++correction) {
    DT_ASSIGN_OR_RETURN(prompt.tokens, counter_->Count(prompt.text));
    if (prompt.tokens == tokens) break;
    if (prompt.tokens < tokens) {
      Append(prompt.text, std::max<int64_t>(1, words_for(tokens - prompt.tokens)), random);
      continue;
    }
    size_t end = prompt.text.size();
    for (int64_t drop = std::max<int64_t>(1, words_for(prompt.tokens - tokens)); drop > 0 && end > kept; --drop) {
      const size_t space = prompt.text.find_last_of(" \n", end - 1);
      end = space == std::string::npos ? 0 : space;
    }
    if (end < kept || end == 0) break;
    prompt.text.resize(end);
  }
  return prompt;
}

absl::StatusOr<int64_t> PromptWriter::Count(std::string_view text) const {
  if (counter_ == nullptr) return -1;
  return counter_->Count(text);
}

}  // namespace dovetail::loadgen
