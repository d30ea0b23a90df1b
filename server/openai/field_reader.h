#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "server/openai/api_error.h"
#include "server/openai/json.h"
#include "server/openai/parameters.h"

namespace dovetail::server {

// Reads the fields of one JSON object. An absent field and an explicit null are the same: nullopt (a client library
// writes null for everything it leaves out). Each error is kInvalidArgument, says what was found and what is allowed,
// and carries the dotted path.
// Threads: immutable.
class FieldReader {
 public:
  // `object` must outlive the reader. `path` is where it is: "" or "stream_options".
  explicit FieldReader(const Json& object, std::string path = "");

  const Json* Find(const std::string& name) const;  // nullptr when absent or null
  bool Has(const std::string& name) const { return Find(name) != nullptr; }
  std::string Path(const std::string& name) const;

  // By the rule of that name in parameters.h. A float with an integer value counts as an integer: JSON does not tell
  // them apart.
  absl::StatusOr<std::optional<int64_t>> Int(const std::string& name) const;
  absl::StatusOr<std::optional<float>> Float(const std::string& name) const;

  absl::StatusOr<bool> Bool(const std::string& name, bool absent) const;
  absl::StatusOr<std::optional<std::string>> String(const std::string& name, size_t max_bytes) const;
  absl::StatusOr<std::optional<std::vector<TokenId>>> TokenIds(const std::string& name, size_t max_count,
                                                               int vocab_size) const;

 private:
  const Json& object_;
  const std::string path_;
};

std::string Describe(const Json& value);  // "the string \"x\"", "1e308", "an array": short, for error texts

absl::StatusOr<int64_t> ToInt(const Json& value, const std::string& path, const IntRule& rule);
absl::StatusOr<float> ToFloat(const Json& value, const std::string& path, const FloatRule& rule);
absl::StatusOr<TokenId> ToTokenId(const Json& value, const std::string& path, int vocab_size);

}  // namespace dovetail::server
