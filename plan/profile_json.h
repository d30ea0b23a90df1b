#pragma once
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"

// Values to and from JSON by one list of their fields, so that what is written can be read: a function
//   template <typename Io> void FieldsOf(Io& io, Value& value)
// calls io.Number, io.Whole, io.Text and io.List for each field, and io.OptionalNumber and io.OptionalList for those
// that may be missing, which are not written while they are 0 or empty.
//
// Threads: thread-compatible.

namespace dovetail::plan {

enum class Least : uint8_t { kZero, kPositive };

class FieldReader {
 public:
  using Json = nlohmann::ordered_json;

  FieldReader(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
    if (!object.is_object()) Fail(InvalidArgument(place_, ": is not an object"));
  }

  void Number(const char* name, double& value, Least least = Least::kPositive) {
    const Json* const found = Find(name);
    if (found == nullptr) return;
    value = found->is_number() ? found->get<double>() : std::nan("");
    if (!std::isfinite(value) || value < 0 || (value == 0 && least == Least::kPositive))
      Fail(InvalidArgument(place_, ": ", name, ": ", found->dump(), " is no number ",
                           least == Least::kPositive ? "above 0" : "of at least 0"));
  }
  template <typename Int>
  void Whole(const char* name, Int& value) {
    const Json* const found = Find(name);
    if (found == nullptr) return;
    constexpr int64_t kMost = int64_t{1} << 30;
    const bool fits = found->is_number_integer() && found->get<int64_t>() >= 1 && found->get<int64_t>() <= kMost;
    if (!fits)
      return Fail(InvalidArgument(place_, ": ", name, ": ", found->dump(), " is no whole number in 1..", kMost));
    value = static_cast<Int>(found->get<int64_t>());
  }
  void Truth(const char* name, bool& value) {
    const Json* const found = Find(name);
    if (found == nullptr) return;
    if (!found->is_boolean()) return Fail(InvalidArgument(place_, ": ", name, ": ", found->dump(), " is no boolean"));
    value = found->get<bool>();
  }
  void Text(const char* name, std::string& value) {
    const Json* const found = Find(name);
    if (found == nullptr) return;
    if (!found->is_string() || found->get<std::string>().empty())
      return Fail(InvalidArgument(place_, ": ", name, ": ", found->dump(), " is no text"));
    value = found->get<std::string>();
  }
  // One of `names`; the value is its place among them.
  template <typename Enum>
  void Choice(const char* name, Enum& value, const std::vector<std::string>& names) {
    std::string text;
    Text(name, text);
    for (size_t i = 0; i < names.size(); ++i)
      if (names[i] == text) {
        value = static_cast<Enum>(i);
        return;
      }
    std::string all;
    for (const std::string& known : names) absl::StrAppend(&all, all.empty() ? "" : ", ", known);
    Fail(InvalidArgument(place_, ": ", name, ": '", text, "' is none of ", all));
  }
  template <typename Value>
  void Object(const char* name, Value& value) {
    const Json* const found = Find(name);
    if (found != nullptr) Take(*found, absl::StrCat(place_, ": ", name), value);
  }
  template <typename Value>
  void List(const char* name, std::vector<Value>& values, size_t least = 0) {
    const Json* const found = Find(name);
    if (found == nullptr) return;
    if (!found->is_array() || found->size() < least || found->size() > kMostInList)
      return Fail(InvalidArgument(place_, ": ", name, ": is no list of ", least, "..", kMostInList));
    values.resize(found->size());
    for (size_t i = 0; i < values.size(); ++i)
      Take((*found)[i], absl::StrCat(place_, ": ", name, "[", i, "]"), values[i]);
  }

  // Fields that need not be there: then the value stays as it is.
  void OptionalNumber(const char* name, double& value) {
    if (object_.contains(name)) Number(name, value, Least::kZero);
  }
  template <typename Value>
  void OptionalList(const char* name, std::vector<Value>& values) {
    if (object_.contains(name)) List(name, values);
  }

  // Of the first field that was wrong, else of one that no call asked for.
  absl::Status Finish() {
    if (!status_.ok()) return status_;
    for (const auto& [name, value] : object_.items())
      if (!known_.contains(name)) return InvalidArgument(place_, ": there is no field ", name);
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kMostInList = 10'000;

  const Json* Find(const char* name) {
    known_.insert(name);
    if (!status_.ok()) return nullptr;
    const auto found = object_.find(name);
    if (found != object_.end()) return &*found;
    Fail(InvalidArgument(place_, ": has no ", name));
    return nullptr;
  }
  template <typename Value>
  void Take(const Json& json, std::string place, Value& value) {
    FieldReader reader(json, std::move(place));
    FieldsOf(reader, value);
    Fail(reader.Finish());
  }
  void Fail(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }

  const Json& object_;
  const std::string place_;
  absl::Status status_;
  std::set<std::string> known_;
};

class FieldWriter {
 public:
  using Json = nlohmann::ordered_json;

  void Number(const char* name, double& value, Least = Least::kPositive) { json[name] = value; }
  template <typename Int>
  void Whole(const char* name, Int& value) {
    json[name] = value;
  }
  void Truth(const char* name, bool& value) { json[name] = value; }
  void Text(const char* name, std::string& value) { json[name] = value; }
  template <typename Enum>
  void Choice(const char* name, Enum& value, const std::vector<std::string>& names) {
    json[name] = names[static_cast<size_t>(value)];
  }
  template <typename Value>
  void Object(const char* name, Value& value) {
    FieldWriter writer;
    FieldsOf(writer, value);
    json[name] = std::move(writer.json);
  }
  template <typename Value>
  void List(const char* name, std::vector<Value>& values, size_t = 0) {
    Json list = Json::array();
    for (Value& value : values) {
      FieldWriter writer;
      FieldsOf(writer, value);
      list.push_back(std::move(writer.json));
    }
    json[name] = std::move(list);
  }
  void OptionalNumber(const char* name, double& value) {
    if (value != 0) Number(name, value);
  }
  template <typename Value>
  void OptionalList(const char* name, std::vector<Value>& values) {
    if (!values.empty()) List(name, values);
  }

  Json json = Json::object();
};

}  // namespace dovetail::plan
