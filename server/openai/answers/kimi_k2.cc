// <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
// <|tool_calls_section_end|>, with the middle again for each call. The model counts the calls of a conversation.
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

class KimiK2 : public CallSyntax {
 public:
  std::vector<std::string> markers() const override { return {"<|tool_calls_section_begin|>"}; }
  void Head(Cursor& cursor, Place, size_t, CallHead& head) override {
    cursor.Spaces();
    cursor.Literal("<|tool_call_begin|>");
    cursor.Spaces();
    head.id = cursor.Until("<|tool_call_argument_begin|>");
    if (!cursor.ok()) return;
    while (!head.id.empty() && IsSpace(head.id.back())) head.id.pop_back();
    std::string_view name = head.id;
    if (name.starts_with("functions.")) name.remove_prefix(sizeof "functions." - 1);
    head.name = std::string(name.substr(0, name.rfind(':')));
    if (!IsFunctionName(head.name)) cursor.Refuse();
    cursor.Spaces();
    if (!cursor.Sees("{")) cursor.Refuse();
  }
  bool Tail(Cursor& cursor) override {
    cursor.Spaces();
    cursor.Literal("<|tool_call_end|>");
    cursor.Commit();
    cursor.Spaces();
    if (cursor.Try("<|tool_calls_section_end|>")) return false;
    return cursor.Sees("<|tool_call_begin|>");
  }
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>&) {
  return std::make_unique<MarkedCalls>(std::make_unique<KimiK2>());
}

Json Grammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence({mark("<|tool_call_begin|>"),
                                     parts::Text("functions." + tool.name + ":"),
                                     {{"type", "regex"}, {"pattern", "[0-9]{1,4}"}},
                                     mark("<|tool_call_argument_begin|>"),
                                     parts::Arguments(tool),
                                     mark("<|tool_call_end|>")}));
  const Json one = parts::OneOf(std::move(calls));
  return parts::Sequence({mark("<|tool_calls_section_begin|>"),
                          several ? Json{{"type", "plus"}, {"content", one}} : one,
                          mark("<|tool_calls_section_end|>")});
}

}  // namespace

const CallFormat& KimiK2Format() {
  static const CallFormat format{"kimi_k2",
                                 "<|tool_calls_section_begin|>",
                                 {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                                  "<|tool_call_end|>", "<|tool_call_argument_begin|>"},
                                 Parser,
                                 Grammar};
  return format;
}

}  // namespace dovetail::server
