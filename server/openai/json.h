#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"
#include "nlohmann/json.hpp"

// Request bodies as JSON, untrusted: every limit is checked while parsing, before memory is spent.
// Threads: pure.

namespace dovetail::server {

using Json = nlohmann::ordered_json;  // templates show keys in the client's order

struct JsonLimits {
  int depth = 32;           // arrays and objects inside one another
  size_t values = 500'000;  // of any kind, in total
};

// Strict RFC 8259: UTF-8 without overlong forms or lone surrogates (escaped ones too), no NaN, no comments, nothing
// after the value. A key that comes twice in one object is refused, since proxies in front of us may read the other
// one. kInvalidArgument names the byte.
absl::StatusOr<Json> ParseJson(std::string_view text, const JsonLimits& limits = {});

// Compact text. Bytes that are not UTF-8 become U+FFFD.
std::string Dump(const Json& json);

}  // namespace dovetail::server
