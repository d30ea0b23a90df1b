#pragma once
#include <functional>
#include <string>
#include <utility>

#include "server/openai/json.h"

namespace dovetail::server {

// Whether values of one schema can be values of another, of schemas as EnforceableSchema gives them (json_schema.h).
// What it does not see to be impossible it takes for possible.
// Threads: pure.
class SchemaOverlap {
 public:
  // The schema that a $ref names; null: there is none.
  using Resolve = std::function<const Json*(const std::string& reference)>;
  explicit SchemaOverlap(Resolve resolve) : resolve_(std::move(resolve)) {}

  // True: no value that the grammar of `a` lets through is valid under the schema that `b` was made of. That grammar
  // writes no properties besides those of the schema; other schemas allow them.
  bool Excludes(const Json& a, const Json& b) const { return Excludes(a, b, 0); }

 private:
  bool Excludes(const Json& a, const Json& b, int depth) const;
  bool ObjectsExclude(const Json& a, const Json& b, int depth) const;

  const Resolve resolve_;
};

}  // namespace dovetail::server
