#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "server/openai/json.h"

namespace dovetail::server {

// A schema that a value must be valid under, together with others.
struct SchemaPart {
  const Json* schema = nullptr;  // an object, without $ref and allOf of its own
  std::string path;              // for error texts
};

// One schema of objects whose values are valid under each part: it has their properties together and requires what any
// of them does.
// Errors: kInvalidArgument with the path (api_error.h): a part that is not of objects, a keyword besides properties,
//   required and additionalProperties, a property that two parts describe differently, additionalProperties that keeps
//   out what another part describes
//   Requires: at least one part
// Threads: pure
absl::StatusOr<Json> MergeObjects(const std::vector<SchemaPart>& parts);

}  // namespace dovetail::server
