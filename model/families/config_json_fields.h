#pragma once
#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"
#include "model/formats/json_file.h"

// Reading of fields that hybrids share. Errors name file and field.
// Threads: pure.

namespace dovetail::model {

// A positive size; `missing` where the field is absent, which is an error without one.
inline absl::StatusOr<int64_t> Size(const JsonFields& fields, const char* field, std::optional<int64_t> missing = {}) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Int(field));
  if (!value && !missing) return fields.Error(field, "is missing");
  const int64_t size = value.value_or(missing.value_or(0));
  if (size < 1 || size > (int64_t{1} << 24))
    return fields.Error(field, absl::StrCat("is ", size, "; it must be positive"));
  return size;
}

inline absl::StatusOr<float> Scale(const JsonFields& fields, const char* field, double missing) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Float(field));
  if (value && !(*value >= -1e6 && *value <= 1e6))
    return fields.Error(field, absl::StrCat("is ", *value, "; a factor must be finite, and at most 1e6"));
  return static_cast<float>(value.value_or(missing));
}

inline absl::StatusOr<bool> Flag(const JsonFields& fields, const char* field, bool missing) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Bool(field));
  return value.value_or(missing);
}

}  // namespace dovetail::model
