#include "server/openai/answers/json_call.h"

namespace dovetail::server {
namespace {

void ReadHead(Cursor& cursor, CallHead& head) {
  std::optional<std::string> early;  // arguments before the name
  cursor.Spaces();
  cursor.Literal("{");
  while (cursor.ok()) {
    cursor.Spaces();
    if (cursor.Sees("}")) break;
    const std::string key = cursor.JsonString();
    cursor.Spaces();
    cursor.Literal(":");
    cursor.Spaces();
    const bool arguments = key == "arguments" || key == "parameters";
    if (arguments && !cursor.Sees("{")) cursor.Refuse();
    if (arguments && !head.name.empty()) return;
    if (key == "name") {
      head.name = cursor.JsonString();
      if (cursor.ok() && !IsFunctionName(head.name)) cursor.Refuse();
    } else if (key == "id" && cursor.Sees("\"")) {
      head.id = cursor.JsonString();
    } else {
      std::string value = cursor.JsonValue();
      if (arguments) early = std::move(value);
    }
    cursor.Spaces();
    if (!cursor.Try(",")) break;
  }
  cursor.Literal("}");
  if (head.name.empty()) cursor.Refuse();
  head.arguments = early.value_or("{}");
}

void ReadTail(Cursor& cursor) {
  cursor.Spaces();
  while (cursor.Try(",")) {
    cursor.Spaces();
    cursor.JsonString();
    cursor.Spaces();
    cursor.Literal(":");
    cursor.Spaces();
    cursor.JsonValue();
    cursor.Spaces();
  }
  cursor.Literal("}");
}

}  // namespace

void JsonCallReader::Head(Cursor& cursor, CallHead& head) {
  ReadHead(cursor, head);
  closed_ = head.arguments.has_value();
}

void JsonCallReader::Tail(Cursor& cursor) const {
  if (!closed_) ReadTail(cursor);
}

}  // namespace dovetail::server
