#pragma once
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/openai/served_model.h"

namespace dovetail::server {

// A ChatRenderer that runs this chat template, which came with the model or from --chat-template. `bos_token` and
// `eos_token` are what the template may write. kInvalidArgument or kResourceExhausted if the template itself is bad.
// The result owns all it needs and is thread-safe.
absl::StatusOr<ChatRenderer> MakeChatRenderer(std::string_view template_source, std::string bos_token,
                                              std::string eos_token);

}  // namespace dovetail::server
