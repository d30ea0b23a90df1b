#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace dovetail::model {

// How text is cut into pieces before merging. A pattern or a name in a model file only selects one of these: no
// expression that comes from a file is ever run, and one we do not know is refused.
enum class PreTokenizer : uint8_t {
  kNone,  // SPM-style: the whole text is one piece
  kGpt2,
  kLlama3,
  kQwen2,   // Qwen 2, 2.5, 3
  kQwen35,  // Qwen 3.5: marks count as letters
  kGpt4o,   // GPT-4o, GPT-OSS, Llama 4
  kTekken,  // Mistral Nemo and later
  kDeepSeek3,
  kSmolLm,  // single digits, then GPT-2
};

std::string_view Name(PreTokenizer pre);

// Its expressions, applied one after the other, as the models' tokenizer.json spells them.
std::span<const std::string> PatternsOf(PreTokenizer pre);

// What a GGUF file's `tokenizer.ggml.pre` implies.
struct GgufPre {
  PreTokenizer pre = PreTokenizer::kNone;
  bool ignore_merges = false;
  bool add_bos = false;
  bool normalize_nfc = false;
};
// kUnimplemented for a name that is not known here, listing those that are.
absl::StatusOr<GgufPre> PreTokenizerOfGguf(std::string_view name);

// The pre-tokenizer whose expressions are exactly `patterns`, applied one after the other (tokenizer.json's Split
// steps). kUnimplemented if there is none.
absl::StatusOr<PreTokenizer> PreTokenizerOfPatterns(std::span<const std::string> patterns);

// Cuts text into pieces. Time and memory are linear in the text, the stack used does not depend on it: the expressions
// run on PCRE2 with limits, never on std::regex.
// Threads: immutable.
class PieceSplitter {
 public:
  static absl::StatusOr<PieceSplitter> Create(PreTokenizer pre);
  PieceSplitter(PieceSplitter&&) noexcept;
  PieceSplitter& operator=(PieceSplitter&&) noexcept;
  ~PieceSplitter();

  // Replaces `pieces` by non-empty views that cover `text` (valid UTF-8) in order without gaps.
  // kResourceExhausted if a limit of the matcher is reached.
  absl::Status Split(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct Impl;
  explicit PieceSplitter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::model
