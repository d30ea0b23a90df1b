#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "base/status.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {

// The JSON files of a model, untrusted.
// Threads: thread-safe; blocks on the file.

// config.json and its kin are at most this large and this deep.
inline constexpr size_t kMaxJsonFileBytes = size_t{16} << 20;
inline constexpr int kMaxJsonDepth = 32;

// Parses JSON as Python writes it: Infinity and -Infinity become the largest finite double, and NaN becomes the string
// "NaN", which no field of a number accepts. `name` is for error texts.
// Errors: kInvalidArgument for text that is too large, too deep or not JSON (with the byte at fault).
absl::StatusOr<nlohmann::json> ParseJson(const std::string& name, std::string text);

// Reads and parses a file.
// Errors: ParseJson's and MappedFile's (kNotFound when it is not there).
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::filesystem::path& path);

// Reads of one object's fields. An absent or null field is nullopt; one of another type, or a number that does not fit,
// is kInvalidArgument naming file and field.
class JsonFields {
 public:
  // `object` outlives this; `prefix` ("rope_parameters.") goes before field names in error texts.
  JsonFields(std::string file, const nlohmann::json& object, std::string prefix = "")
      : file_(std::move(file)), object_(object), prefix_(std::move(prefix)) {}

  bool Has(const char* field) const;                                    // present and not null
  const nlohmann::json* Get(const char* field) const;                   // null when absent or null
  absl::StatusOr<std::optional<int64_t>> Int(const char* field) const;  // 4096 and 4096.0 are integers
  absl::StatusOr<std::optional<double>> Float(const char* field) const;
  absl::StatusOr<std::optional<bool>> Bool(const char* field) const;
  absl::StatusOr<std::optional<std::string>> String(const char* field) const;
  absl::StatusOr<std::optional<std::vector<double>>> Floats(const char* field) const;
  absl::StatusOr<std::optional<std::vector<int64_t>>> Ints(const char* field) const;  // one integer is a list of one
  absl::StatusOr<std::optional<std::vector<std::string>>> Strings(const char* field) const;
  absl::StatusOr<std::optional<JsonFields>> Object(const char* field) const;

  // kInvalidArgument "config.json: rope_parameters.factor <what>".
  absl::Status Error(const char* field, const std::string& what) const;
  const std::string& file() const { return file_; }

 private:
  std::string file_;
  const nlohmann::json& object_;
  std::string prefix_;
};

}  // namespace dovetail::model
