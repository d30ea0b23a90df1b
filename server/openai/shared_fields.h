#pragma once
#include <span>
#include <string_view>

#include "base/status.h"
#include "server/openai/json.h"

namespace dovetail::server {

// A field of another API that is not served.
struct RefusedField {
  std::string_view name;
  std::string_view harmless;  // JSON of a value that asks for nothing; null always does
  std::string_view why;
};

// The fields of another API's body that mean what they mean in chats: all but its `own` and the refused ones.
// kInvalidArgument names a refused one that asks for something.
// Threads: pure.
absl::StatusOr<Json> SharedFields(const Json& body, std::span<const std::string_view> own,
                                  std::span<const RefusedField> refused);

}  // namespace dovetail::server
