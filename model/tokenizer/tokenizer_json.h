#pragma once
#include <cstddef>
#include <optional>
#include <string_view>

#include "base/status.h"
#include "model/tokenizer/vocabulary.h"

namespace dovetail::model {

inline constexpr size_t kMaxTokenizerJsonBytes = size_t{128} << 20;  // Gemma's has 33 MB

// Reads a Hugging Face folder's `tokenizer.json` and, if there is one, `tokenizer_config.json` (bos, eos and pad
// tokens, add_bos_token, add_eos_token). BPE models, byte-level or with U+2581 for spaces, both spellings of merges. A
// normalizer, pre-tokenizer, post-processor or decoder selects one of the known ways of working, or is refused.
// Errors: kInvalidArgument for text that is not JSON or does not fit together, kUnimplemented for a tokenizer we do not
// have; the message names file and field.
// Ownership: the result owns its texts.
// Threads: pure.
absl::StatusOr<TokenizerData> TokenizerDataFromJson(
    std::string_view tokenizer_json, std::optional<std::string_view> tokenizer_config_json = std::nullopt);

}  // namespace dovetail::model
