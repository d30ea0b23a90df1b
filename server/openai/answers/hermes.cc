// <tool_call>
// {"name": "f", "arguments": {...}}
// </tool_call>
// Hermes, Qwen 2.5 and 3, SmolLM, Granite 4.
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/json_call.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

class Hermes : public CallSyntax {
 public:
  std::vector<std::string> markers() const override { return {"<tool_call>"}; }
  void Head(Cursor& cursor, Place, size_t, CallHead& head) override { call_.Head(cursor, head); }
  bool Tail(Cursor& cursor) override {
    call_.Tail(cursor);
    cursor.Commit();
    cursor.Spaces();
    cursor.Literal("</tool_call>");
    return false;
  }

 private:
  JsonCallReader call_;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>&) {
  return std::make_unique<MarkedCalls>(std::make_unique<Hermes>());
}

Json Grammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(
        parts::Sequence({mark("<tool_call>"), parts::Text("\n{\"name\": \"" + tool.name + "\", \"arguments\": "),
                         parts::Arguments(tool), parts::Text("}\n"), mark("</tool_call>")}));
  return parts::List(parts::OneOf(std::move(calls)), parts::Text("\n"), several);
}

}  // namespace

const CallFormat& HermesFormat() {
  static const CallFormat format{"hermes", "<tool_call>", {"<tool_call>", "</tool_call>"}, Parser, Grammar};
  return format;
}

}  // namespace dovetail::server
