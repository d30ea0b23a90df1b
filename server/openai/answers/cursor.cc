#include "server/openai/answers/cursor.h"

#include <algorithm>

#include "server/openai/answers/answer_parser.h"
#include "server/openai/answers/json_extent.h"
#include "server/openai/json.h"

namespace dovetail::server {
namespace {

bool InName(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}

}  // namespace

bool IsFunctionName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxFunctionName && std::all_of(name.begin(), name.end(), InName);
}

void Cursor::Spaces() {
  if (!ok()) return;
  while (at_ < text_.size() && IsSpace(text_[at_])) ++at_;
}

bool Cursor::Sees(std::string_view text) {
  if (!ok()) return false;
  if (rest().substr(0, text.size()) == text) return true;
  if (text.substr(0, rest().size()) == rest() && !last_) found_ = Found::kMore;
  return false;
}

bool Cursor::Try(std::string_view text) {
  if (!Sees(text)) return false;
  at_ += text.size();
  return true;
}

void Cursor::Literal(std::string_view text) {
  if (!Try(text)) Refuse();
}

std::string Cursor::Until(std::string_view end) {
  if (!ok()) return {};
  const size_t length = rest().find(end);
  if (length == std::string_view::npos) {
    Lacks();
    return {};
  }
  const std::string text(rest().substr(0, length));
  at_ += length + end.size();
  return text;
}

std::string Cursor::Name() {
  if (!ok()) return {};
  size_t end = at_;
  while (end < text_.size() && InName(text_[end]) && end - at_ <= kMaxFunctionName) ++end;
  const std::string name(text_.substr(at_, end - at_));
  if (name.size() > kMaxFunctionName || (name.empty() && end < text_.size())) {
    Refuse();
  } else if (end == text_.size() && !last_) {
    found_ = Found::kMore;
  } else if (name.empty()) {
    Refuse();
  }
  at_ = end;
  return name;
}

std::string Cursor::JsonString() {
  if (!Sees("\"")) {
    Refuse();
    return {};
  }
  const std::string text = JsonValue();
  if (!ok()) return {};
  const auto parsed = ParseJson(text);
  if (parsed.ok() && parsed->is_string()) return parsed->get<std::string>();
  Refuse();
  return {};
}

std::string Cursor::JsonValue() {
  if (!ok()) return {};
  if (rest().empty()) {
    Lacks();
    return {};
  }
  JsonExtent extent;
  size_t length = extent.Read(rest());
  if (!extent.done()) {
    // A number or a word ends where the text does.
    if (last_ && extent.is_word()) {
      length = rest().size();
    } else {
      Lacks();
      return {};
    }
  }
  if (length == 0) {
    Refuse();
    return {};
  }
  const std::string text(rest().substr(0, length));
  at_ += length;
  return text;
}

}  // namespace dovetail::server
