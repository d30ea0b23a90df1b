// <|tool_call|>[{"name": "f", "arguments": {...}}, ...]: Granite 3. Granite 4 writes hermes' marks, which are read,
// too.
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/json_call.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

class Granite : public CallSyntax {
 public:
  std::vector<std::string> markers() const override { return {"<|tool_call|>", "<tool_call>"}; }
  void Head(Cursor& cursor, Place place, size_t, CallHead& head) override {
    cursor.Spaces();
    if (place == Place::kMarked) in_array_ = cursor.Try("[");
    call_.Head(cursor, head);
  }
  bool Tail(Cursor& cursor) override {
    call_.Tail(cursor);
    cursor.Commit();
    cursor.Spaces();
    if (in_array_) {
      if (cursor.Try(",")) return cursor.ok();
      cursor.Literal("]");
      cursor.Commit();
      cursor.Spaces();
    }
    cursor.Try("</tool_call>");
    return false;
  }

 private:
  JsonCallReader call_;
  bool in_array_ = false;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>&) {
  return std::make_unique<MarkedCalls>(std::make_unique<Granite>());
}

Json Grammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence(
        {parts::Text("{\"name\": \"" + tool.name + "\", \"arguments\": "), parts::Arguments(tool), parts::Text("}")}));
  return parts::Sequence({mark("<|tool_call|>"), parts::Text("["),
                          parts::List(parts::OneOf(std::move(calls)), parts::Text(", "), several), parts::Text("]")});
}

}  // namespace

const CallFormat& GraniteFormat() {
  static const CallFormat format{
      "granite", "<|tool_call|>", {"<|tool_call|>", "<tool_call>", "</tool_call>"}, Parser, Grammar};
  return format;
}

}  // namespace dovetail::server
