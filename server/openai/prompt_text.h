#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "base/ids.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

// The first `length` bytes of a prompt's text at most, special tokens in it, or of its ids where the model has no
// tokenizer. Looks at no more tokens than that.
// Threads: pure.
std::string PromptText(const std::vector<TokenId>& prompt, const ServedModel& model, size_t length);

}  // namespace dovetail::server
