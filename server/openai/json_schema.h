#pragma once
#include <string>

#include "base/status.h"
#include "server/openai/json.h"

// JSON schemas that are enforced.
// Threads: pure.

namespace dovetail::server {

inline constexpr int kMaxSchemaDepth = 24;
inline constexpr int kMaxSchemaParts = 1000;  // schemas, properties and enum values, in total
inline constexpr int kMaxSchemaItems = 1024;  // minItems, maxItems
inline constexpr int kMaxSchemaChars = 1024;  // minLength, maxLength

// The schema as the grammar's compiler gets it: only keywords that it enforces, in forms that it enforces. What is
// narrower is said: an object with `properties` has no others, and a `format` has no rare spellings (string_formats.h).
// allOf of objects is one object, oneOf is enforced where no value can be two of its alternatives. kInvalidArgument
// names the keyword, by its dotted path under `param`: one that is not enforced, a value of the wrong type, a reference
// that does not exist or leads nowhere, too many parts.
absl::StatusOr<Json> EnforceableSchema(const Json& schema, const std::string& param);

}  // namespace dovetail::server
