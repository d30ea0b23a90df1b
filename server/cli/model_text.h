#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "model/checkpoint.h"
#include "model/tokenizer/tokenizer.h"
#include "server/openai/served_model.h"

namespace dovetail::cli {

// The tokenizer that came with a checkpoint: in the GGUF file, or tokenizer.json beside the weights. Null when there is none.
absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizer(const model::Checkpoint& checkpoint);

// The chat template's source: the file `override_path` if given, else what came with the checkpoint. Empty when there is none.
absl::StatusOr<std::string> LoadChatTemplate(const model::Checkpoint& checkpoint, const std::string& override_path);

// What the API serves. `name` empty: the model's own name.
absl::StatusOr<std::shared_ptr<const server::ServedModel>> MakeServedModel(const model::Checkpoint& checkpoint, const std::string& name,
                                                                           const std::string& chat_template_path, int64_t max_model_len);

}  // namespace dovetail::cli
