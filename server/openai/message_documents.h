#pragma once
#include <string>

#include "base/status.h"
#include "server/openai/field_reader.h"

namespace dovetail::server {

// The text of a block of type `document` in a message of Anthropic's API: its title and context, a line each, and what
// its source says, which is text, or blocks of text. Any other source (PDF files, images in it, links, files of a
// store) is refused, and so are citations.
// Errors:  kInvalidArgument names the field.
// Threads: pure.
absl::StatusOr<std::string> DocumentText(const FieldReader& block);

}  // namespace dovetail::server
