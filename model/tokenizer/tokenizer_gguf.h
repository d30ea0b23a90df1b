#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/tokenizer/vocabulary.h"

namespace dovetail::model {

// The `tokenizer.ggml.*` metadata of a GGUF file, each field as stored (without the prefix); absent ones are empty. The
// views belong to the file.
struct GgufTokenizerFields {
  std::string_view model;               // "gpt2" or "llama"
  std::optional<std::string_view> pre;  // ignored for "llama"
  std::vector<std::string_view> tokens;
  std::vector<float> scores;
  std::vector<int64_t> token_type;
  std::vector<std::string_view> merges;  // "left right"
  std::optional<int64_t> bos_token_id, eos_token_id, unknown_token_id, padding_token_id, eot_token_id, eom_token_id;
  std::optional<bool> add_bos_token, add_eos_token, add_space_prefix;
};

// Errors: kInvalidArgument for fields that are missing or do not fit together, kUnimplemented for a tokenizer or
// pre-tokenizer we do not have; the message names the key.
// Ownership: the result owns its texts.
// Threads: pure.
absl::StatusOr<TokenizerData> TokenizerDataFromGguf(const GgufTokenizerFields& fields);

}  // namespace dovetail::model
