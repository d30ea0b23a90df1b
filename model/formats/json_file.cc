#include "model/formats/json_file.h"

#include <cmath>
#include <vector>

#include "model/formats/file_errors.h"
#include "model/formats/mapped_file.h"

namespace dovetail::model {
namespace {

struct Replacement {
  std::string_view from, to;
};
constexpr Replacement kPythonNumbers[] = {
    {"-Infinity", "-1.7976931348623157e308"}, {"Infinity", "1.7976931348623157e308"}, {"NaN", "\"NaN\""}};

// Replaces Python's non-JSON numbers outside strings and measures how deep the text nests, without recursion.
absl::StatusOr<std::string> Normalise(const std::string& name, const std::string& text) {
  std::string out;
  out.reserve(text.size());
  bool in_string = false;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      out += c;
      if (c == '\\' && i + 1 < text.size()) out += text[++i];
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (c == '\0') return InvalidArgument(name, ": is not valid JSON at byte ", i + 1);
    if (depth > kMaxJsonDepth)
      return InvalidArgument(name, ": nests deeper than ", kMaxJsonDepth, " levels at byte ", i);
    bool replaced = false;
    for (const Replacement& number : kPythonNumbers) {
      if (std::string_view(text).substr(i).starts_with(number.from)) {
        out += number.to;
        i += number.from.size() - 1;
        replaced = true;
        break;
      }
    }
    if (!replaced) out += c;
  }
  return out;
}

std::optional<int64_t> ToInt(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  if (std::abs(number) > 9e15 || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseJson(const std::string& name, std::string text) {
  if (text.size() > kMaxJsonFileBytes) {
    return InvalidArgument(name, ": has ", Commas(text.size()), " bytes; at most ", Commas(kMaxJsonFileBytes),
                           " are read");
  }
  DT_ASSIGN_OR_RETURN(text, Normalise(name, text));
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    return InvalidArgument(name, ": is not valid JSON at byte ", error.byte);
  } catch (const nlohmann::json::exception&) {
    return InvalidArgument(name, ": is not valid JSON (a number out of range)");
  }
}

absl::StatusOr<nlohmann::json> ReadJsonFile(const std::filesystem::path& path) {
  DT_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  if (file->bytes().size() > kMaxJsonFileBytes) {
    return InvalidArgument(file->name(), ": has ", Commas(file->bytes().size()), " bytes; at most ",
                           Commas(kMaxJsonFileBytes), " are read");
  }
  return ParseJson(file->name(),
                   std::string(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()));
}

bool JsonFields::Has(const char* field) const { return Get(field) != nullptr; }

const nlohmann::json* JsonFields::Get(const char* field) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(field);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

absl::Status JsonFields::Error(const char* field, const std::string& what) const {
  return InvalidArgument(file_, ": ", prefix_, field, " ", what);
}

absl::StatusOr<std::optional<int64_t>> JsonFields::Int(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (const auto number = ToInt(*value)) return number;
  return Error(field, "must be an integer");
}

absl::StatusOr<std::optional<double>> JsonFields::Float(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return value->get<double>();
  return Error(field, "must be a number");
}

absl::StatusOr<std::optional<bool>> JsonFields::Bool(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  return Error(field, "must be true or false");
}

absl::StatusOr<std::optional<std::string>> JsonFields::String(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (value->is_string()) return value->get<std::string>();
  return Error(field, "must be a string");
}

absl::StatusOr<std::optional<std::vector<double>>> JsonFields::Floats(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) return Error(field, "must be a list of numbers");
  std::vector<double> result;
  for (const nlohmann::json& element : *value) {
    if (!element.is_number()) return Error(field, "must be a list of numbers");
    result.push_back(element.get<double>());
  }
  return result;
}

absl::StatusOr<std::optional<std::vector<int64_t>>> JsonFields::Ints(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  std::vector<int64_t> result;
  if (const auto one = ToInt(*value)) return std::vector<int64_t>{*one};
  if (!value->is_array()) return Error(field, "must be an integer or a list of integers");
  for (const nlohmann::json& element : *value) {
    const auto number = ToInt(element);
    if (!number) return Error(field, "must be an integer or a list of integers");
    result.push_back(*number);
  }
  return result;
}

absl::StatusOr<std::optional<std::vector<std::string>>> JsonFields::Strings(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) return Error(field, "must be a list of strings");
  std::vector<std::string> result;
  for (const nlohmann::json& element : *value) {
    if (!element.is_string()) return Error(field, "must be a list of strings");
    result.push_back(element.get<std::string>());
  }
  return result;
}

absl::StatusOr<std::optional<JsonFields>> JsonFields::Object(const char* field) const {
  const nlohmann::json* value = Get(field);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) return Error(field, "must be an object");
  return std::optional<JsonFields>(JsonFields(file_, *value, absl::StrCat(prefix_, field, ".")));
}

}  // namespace dovetail::model
