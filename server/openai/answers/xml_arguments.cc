#include <algorithm>
#include <array>
#include <utility>

#include "server/openai/answers/answer_parser.h"
#include "server/openai/answers/argument_reader.h"
#include "server/openai/answers/cursor.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxConverted = size_t{64} << 10;  // bytes of a value; what is longer is a string

// The inside of a JSON string.
std::string Escaped(std::string_view text) {
  const std::string quoted = Dump(Json(std::string(text)));
  return quoted.substr(1, quoted.size() - 2);
}

enum class Kind {
  kString,  // any
  kName,    // one of a few strings
  kOther
};

Kind KindOf(const Json& schema) {
  if (!schema.is_object()) return Kind::kOther;
  const auto values = schema.find("enum");
  const bool names = values != schema.end() && values->is_array() && !values->empty() &&
                     std::all_of(values->begin(), values->end(), [](const Json& one) { return one.is_string(); });
  const auto constant = schema.find("const");
  if (names || (constant != schema.end() && constant->is_string())) return Kind::kName;
  const auto type = schema.find("type");
  return type != schema.end() && *type == "string" ? Kind::kString : Kind::kOther;
}

class XmlArguments : public ArgumentReader {
 public:
  XmlArguments(const XmlArgumentMarks& marks, const Json& schema) : marks_(marks) {
    if (schema.is_object() && schema.contains("properties")) properties_ = schema.at("properties");
  }

  size_t Read(std::string_view text, bool last, std::string& json) override {
    size_t read = 0;
    while (!done_) {
      const size_t before = read;
      const State state = state_;
      const std::string_view rest = text.substr(read);
      read += state == State::kBetween ? Between(rest, last, json) : Value(rest, last, json);
      if (read == before && state == state_) break;
    }
    return read;
  }

 private:
  enum class State { kBetween, kString, kOther };

  // A parameter's name, or the end.
  size_t Between(std::string_view text, bool last, std::string& json) {
    Cursor cursor(text.substr(0, kMaxUndecided), last || text.size() > kMaxUndecided);
    cursor.Spaces();
    if (cursor.Try(marks_.end)) {
      json += first_ ? "{}" : "}";
      done_ = true;
      return cursor.at();
    }
    cursor.Literal(marks_.begin);
    const std::string name = cursor.Until(marks_.name_end);
    if (cursor.found() == Found::kMore) return 0;
    if (!cursor.ok()) {  // the arguments are over, though nothing says so, or cut off
      if (last) return text.size();
      json += first_ ? "{}" : "}";
      done_ = true;
      return 0;
    }
    json += std::exchange(first_, false) ? "{" : ", ";
    json += Dump(Json(name)) + ": ";
    const auto found = properties_.find(name);
    kind_ = found != properties_.end() ? KindOf(*found) : Kind::kOther;
    state_ = kind_ == Kind::kString ? State::kString : State::kOther;
    begun_ = false;
    if (state_ == State::kString) json += '"';
    return cursor.at();
  }

  // Models write a line break before a value and one behind it.
  size_t Value(std::string_view text, bool last, std::string& json) {
    size_t read = 0;
    if (!begun_) {
      if (text.empty() && !last) return 0;
      begun_ = true;
      if (text.substr(0, 1) == "\n") read = 1;
    }
    const std::string_view rest = text.substr(read);
    const size_t end = rest.find(marks_.value_end);
    const bool finished = end != std::string_view::npos;
    if (state_ == State::kOther &&
        (finished ? end : rest.size() - std::min(rest.size(), marks_.value_end.size())) > kMaxConverted) {
      state_ = State::kString;
      json += '"';
    }
    if (!finished) return read + Unfinished(rest, last, json);
    std::string_view value = rest.substr(0, end);
    if (value.ends_with('\n')) value.remove_suffix(1);
    json += state_ == State::kOther ? Converted(value) : Escaped(value) + '"';
    state_ = State::kBetween;
    return read + end + marks_.value_end.size();
  }

  // A string goes out as it comes, except for what may be its end; whole characters, so that it can be escaped.
  size_t Unfinished(std::string_view text, bool last, std::string& json) {
    if (state_ == State::kOther) {
      if (!last) return 0;
      json += Converted(text);
      return text.size();
    }
    size_t decided = text.size();
    if (!last) {
      decided -= PartialMarker(text, marks_.value_end);
      if (decided > 0 && text[decided - 1] == '\n') --decided;
    }
    json += Escaped(text.substr(0, decided));
    return decided;
  }

  std::string Converted(std::string_view text) const {
    while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
    const std::string value(text.substr(0, LengthTrimmed(text)));
    if (kind_ == Kind::kName) return Dump(Json(value));
    constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kPython = {
        {{"True", "true"}, {"False", "false"}, {"None", "null"}}};
    for (const auto& [python, json] : kPython)
      if (value == python) return std::string(json);
    const auto parsed = ParseJson(value);
    return parsed.ok() ? value : Dump(Json(value));
  }

  const XmlArgumentMarks marks_;
  Json properties_ = Json::object();
  State state_ = State::kBetween;
  Kind kind_ = Kind::kOther;  // of the parameter's value
  bool first_ = true, begun_ = false;
};

}  // namespace

std::unique_ptr<ArgumentReader> MakeXmlArguments(const XmlArgumentMarks& marks, const Json& schema) {
  return std::make_unique<XmlArguments>(marks, schema);
}

}  // namespace dovetail::server
