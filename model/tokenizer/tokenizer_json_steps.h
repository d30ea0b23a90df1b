#pragma once
#include "base/status.h"
#include "model/tokenizer/vocabulary.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {

// The parts of tokenizer.json that describe how text is treated. Each is a step or a Sequence of steps with a "type";
// together they must be one of the ways of working that TokenizerData can express. kUnimplemented names the step that
// is not, kInvalidArgument one that is malformed.
// Threads: pure, except for `data`.

// normalizer, pre_tokenizer and decoder (null where absent): sets kind, pre_tokenizer, normalize_nfc and the space
// fields.
absl::Status ReadTextSteps(const nlohmann::json& normalizer, const nlohmann::json& pre_tokenizer,
                           const nlohmann::json& decoder, TokenizerData& data);

// post_processor: sets prefix_ids, suffix_ids, and special.bos if exactly one token is put in front.
absl::Status ReadPostProcessor(const nlohmann::json& post_processor, TokenizerData& data);

}  // namespace dovetail::model
