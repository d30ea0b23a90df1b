// V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>.
// V3 and R1: function<｜tool▁sep｜>f, and the arguments in a block of code that is called json. Both are read.
#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

constexpr char kCalls[] = "<｜tool▁calls▁begin｜>", kCallsEnd[] = "<｜tool▁calls▁end｜>";
constexpr char kCall[] = "<｜tool▁call▁begin｜>", kCallEnd[] = "<｜tool▁call▁end｜>", kSeparator[] = "<｜tool▁sep｜>";

class DeepSeek : public CallSyntax {
 public:
  std::vector<std::string> markers() const override { return {kCalls}; }
  void Head(Cursor& cursor, Place, size_t, CallHead& head) override {
    cursor.Spaces();
    cursor.Literal(kCall);
    cursor.Spaces();
    head.name = cursor.Name();
    cursor.Spaces();
    cursor.Literal(kSeparator);
    cursor.Spaces();
    fenced_ = cursor.ok() && !cursor.Sees("{") && cursor.ok();
    if (fenced_) {
      head.name = cursor.Name();
      cursor.Spaces();
      cursor.Literal("```json");
      cursor.Spaces();
    }
    if (!cursor.Sees("{")) cursor.Refuse();
  }
  bool Tail(Cursor& cursor) override {
    cursor.Spaces();
    if (fenced_) cursor.Literal("```");
    cursor.Commit();
    cursor.Spaces();
    cursor.Literal(kCallEnd);
    cursor.Commit();
    cursor.Spaces();
    if (cursor.Try(kCallsEnd)) return false;
    return cursor.Sees(kCall);
  }

 private:
  bool fenced_ = false;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>&) {
  return std::make_unique<MarkedCalls>(std::make_unique<DeepSeek>());
}

Json GrammarOf(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark, bool fenced) {
  Json::array_t calls;
  for (const Tool& tool : tools) {
    Json::array_t one = {mark(kCall)};
    if (fenced) {
      one.insert(one.end(), {parts::Text("function"), mark(kSeparator), parts::Text(tool.name + "\n```json\n"),
                             parts::Arguments(tool), parts::Text("\n```")});
    } else {
      one.insert(one.end(), {parts::Text(tool.name), mark(kSeparator), parts::Arguments(tool)});
    }
    one.push_back(mark(kCallEnd));
    calls.push_back(parts::Sequence(std::move(one)));
  }
  const Json call = parts::OneOf(std::move(calls));
  return parts::Sequence({mark(kCalls), parts::List(call, parts::Text(fenced ? "\n" : ""), several), mark(kCallsEnd)});
}

Json Grammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  return GrammarOf(tools, several, mark, /*fenced=*/true);
}

Json NewGrammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  return GrammarOf(tools, several, mark, /*fenced=*/false);
}

const std::vector<std::string_view> kMarks = {kCalls, kCallsEnd, kCall, kCallEnd, kSeparator};

}  // namespace

const CallFormat& DeepSeekV3Format() {
  static const CallFormat format{"deepseek_v3", kCalls, kMarks, Parser, Grammar};
  return format;
}

const CallFormat& DeepSeekV31Format() {
  static const CallFormat format{"deepseek_v31", kCalls, kMarks, Parser, NewGrammar};
  return format;
}

}  // namespace dovetail::server
