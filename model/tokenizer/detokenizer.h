#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "base/ids.h"
#include "model/tokenizer/tokenizer.h"

namespace dovetail::model {

// There is no spaces_between_special_tokens here: the decoders we know put nothing between special tokens, as those of
// the models' own fast tokenizers, so both of its values mean the same text.
struct DetokenizeOptions {
  bool skip_special_tokens = true;
  std::span<const TokenId> shown_special;  // that are not skipped; sorted, and outlive the detokenizer
  // The first token is the first of the whole sequence, where SPM-style tokenizers drop one space; false when the ids
  // continue a prompt.
  bool at_sequence_start = false;
};

// Turns ids into text one at a time. What Push returns is final and whole characters; a character that is still
// incomplete is held back (at most 3 bytes). The returned texts and that of Flush, joined, are the text of the ids
// however they are grouped. The tokenizer outlives it.
// Threads: thread-compatible; a value.
class IncrementalDetokenizer {
 public:
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, DetokenizeOptions options = {});

  // The text that `id` completes, often empty for a token of a few bytes. Ids outside the vocabulary add nothing.
  std::string Push(TokenId id);

  // The end: an incomplete character becomes U+FFFD.
  std::string Flush();

  // Length of all text returned so far: where the text of the next token begins (logprobs' text_offset counts code
  // points).
  size_t emitted_bytes() const { return emitted_bytes_; }
  size_t emitted_code_points() const { return emitted_code_points_; }

 private:
  std::string Emit(bool finish);

  const Tokenizer* tokenizer_;
  DetokenizeOptions options_;
  bool strip_space_;  // the next byte is the first of the sequence
  std::string pending_;
  size_t emitted_bytes_ = 0;
  size_t emitted_code_points_ = 0;
};

}  // namespace dovetail::model
