#pragma once
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/tokenizer/tokenizer.h"

// Prompts of so many tokens, made of words that are one token each wherever possible: a text of such words has as many
// tokens as words in every tokenizer that splits at spaces, and cutting it at a word cuts it at a token.

namespace dovetail::loadgen {

using Random = std::mt19937_64;

// How many tokens a text has, special tokens that the model puts around it included.
// Threads: one thread at a time.
class TokenCounter {
 public:
  virtual ~TokenCounter() = default;
  virtual absl::StatusOr<int64_t> Count(std::string_view text) = 0;
};

// By a tokenizer in this process.
// Threads: thread-safe.
class LocalTokenCounter final : public TokenCounter {
 public:
  explicit LocalTokenCounter(std::shared_ptr<const model::Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}
  absl::StatusOr<int64_t> Count(std::string_view text) override;
  absl::StatusOr<int64_t> CountAnswer(std::string_view text);  // without special tokens

 private:
  std::shared_ptr<const model::Tokenizer> tokenizer_;
};

struct Vocabulary {
  std::vector<std::string> words;  // without spaces
  double tokens_per_word = 1;
  int64_t special_tokens = 0;  // that every prompt has besides its words
  std::string source;          // for people: "the tokenizer of model.gguf"
};

// Common English words, for servers whose tokens are not known.
const std::vector<std::string>& CommonWords();

// The words of `tokenizer` that are one token each, wherever they stand after a space. Common words where it has fewer
// than 16 of those, with the tokens that they have on average.
absl::StatusOr<Vocabulary> VocabularyOf(const model::Tokenizer& tokenizer, std::string source);
// Those of the common words that `counter` counts as one token each, or all of them with their average.
// Threads: as the counter.
absl::StatusOr<Vocabulary> VocabularyOf(TokenCounter& counter, std::string source);
// Common words of `tokens_per_word` each, when only usage tells.
Vocabulary GuessedVocabulary(double tokens_per_word, std::string source);

struct Prompt {
  std::string text;
  int64_t tokens = 0;
};

// Threads: thread-compatible.
class PromptWriter {
 public:
  // `counter` corrects what tokens_per_word gives, and outlives this; null: nothing does.
  PromptWriter(Vocabulary vocabulary, TokenCounter* counter);

  const Vocabulary& vocabulary() const { return vocabulary_; }

  // About `tokens` tokens of text, to be put before others: equal for equal random states. No special token is counted.
  std::string Piece(int64_t tokens, Random& random) const;

  // `beginning` and as many words as make `tokens` tokens with it, special ones included. The beginning is kept whole;
  // Prompt::tokens says how many tokens there are where it is longer or no number of words fits.
  absl::StatusOr<Prompt> Complete(std::string beginning, int64_t tokens, Random& random) const;

  // -1 without a counter.
  absl::StatusOr<int64_t> Count(std::string_view text) const;

 private:
  const std::string& Word(Random& random) const;
  void Append(std::string& text, int64_t words, Random& random) const;

  Vocabulary vocabulary_;
  TokenCounter* counter_;
};

}  // namespace dovetail::loadgen
