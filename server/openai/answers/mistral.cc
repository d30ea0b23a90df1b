// [TOOL_CALLS]f[ARGS]{...}, again for each call: Mistral from 2025 on. Before that, [TOOL_CALLS][{"name": "f",
// "arguments": {...}}, ...]. Both are read.
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/json_call.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

class Mistral : public CallSyntax {
 public:
  std::vector<std::string> markers() const override { return {"[TOOL_CALLS]"}; }
  void Head(Cursor& cursor, Place place, size_t, CallHead& head) override {
    cursor.Spaces();
    if (place == Place::kMarked) in_array_ = cursor.Try("[");
    if (in_array_ || cursor.Sees("{")) {
      call_.Head(cursor, head);
      object_ = true;
      return;
    }
    object_ = false;
    head.name = cursor.Name();
    if (cursor.Try("[CALL_ID]")) head.id = cursor.Name();
    cursor.Try("[ARGS]");
    cursor.Spaces();
    if (!cursor.Sees("{")) cursor.Refuse();
  }
  bool Tail(Cursor& cursor) override {
    if (object_) call_.Tail(cursor);
    cursor.Commit();
    if (!in_array_) return false;
    cursor.Spaces();
    if (cursor.Try(",")) return cursor.ok();
    cursor.Literal("]");
    return false;
  }

 private:
  JsonCallReader call_;
  bool in_array_ = false, object_ = false;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>&) {
  return std::make_unique<MarkedCalls>(std::make_unique<Mistral>());
}

Json Grammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(
        parts::Sequence({mark("[TOOL_CALLS]"), parts::Text(tool.name), mark("[ARGS]"), parts::Arguments(tool)}));
  const Json one = parts::OneOf(std::move(calls));
  return several ? Json{{"type", "plus"}, {"content", one}} : one;
}

Json ArrayGrammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence(
        {parts::Text("{\"name\": \"" + tool.name + "\", \"arguments\": "), parts::Arguments(tool), parts::Text("}")}));
  return parts::Sequence({mark("[TOOL_CALLS]"), parts::Text("["),
                          parts::List(parts::OneOf(std::move(calls)), parts::Text(", "), several), parts::Text("]")});
}

}  // namespace

const CallFormat& MistralFormat() {
  static const CallFormat format{"mistral", "[TOOL_CALLS]", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"},
                                 Parser,    Grammar,        true};
  return format;
}

const CallFormat& MistralArrayFormat() {
  static const CallFormat format{"mistral_array", "[TOOL_CALLS]", {"[TOOL_CALLS]"}, Parser, ArrayGrammar, true};
  return format;
}

}  // namespace dovetail::server
