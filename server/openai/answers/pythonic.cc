// [f(a=1, b="x"), g()], which is the whole answer, or stands between the marks of Llama 4 or LFM2.
#include <algorithm>

#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

class Pythonic : public CallSyntax {
 public:
  explicit Pythonic(const std::vector<Tool>& tools) {
    for (const Tool& tool : tools) known_.push_back(tool.name);
  }
  std::vector<std::string> markers() const override { return {"<|python_start|>", "<|tool_call_start|>"}; }
  bool begins_bare() const override { return true; }
  void Head(Cursor& cursor, Place place, size_t, CallHead& head) override {
    cursor.Spaces();
    if (place != Place::kNext) cursor.Literal("[");
    cursor.Spaces();
    head.name = cursor.Name();
    cursor.Literal("(");
    if (place == Place::kBare && std::find(known_.begin(), known_.end(), head.name) == known_.end()) cursor.Refuse();
    if (place == Place::kBare) SeesArgument(cursor);
  }
  std::unique_ptr<ArgumentReader> Arguments(const CallHead&) override { return MakePythonArguments(); }
  bool Tail(Cursor& cursor) override {
    cursor.Spaces();
    if (cursor.Try(",")) return cursor.ok();
    cursor.Literal("]");
    cursor.Commit();
    cursor.Spaces();
    if (!cursor.Try("<|python_end|>")) cursor.Try("<|tool_call_end|>");
    return false;
  }

 private:
  // Prose, too, has names before brackets: [f(x)].
  static void SeesArgument(Cursor& cursor) {
    Cursor ahead = cursor;
    ahead.Spaces();
    if (ahead.Sees(")") || ahead.Sees("**")) return;
    ahead.Name();
    ahead.Spaces();
    ahead.Literal("=");
    if (ahead.found() == Found::kNo) cursor.Refuse();
    if (ahead.found() == Found::kMore) cursor.Wait();
  }

  std::vector<std::string> known_;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>& tools) {
  return std::make_unique<MarkedCalls>(std::make_unique<Pythonic>(tools));
}

// JSON's literals are not all Python's, so a whole object is unpacked: f(**{"a": true}) is read as it stands.
Json Grammar(const std::vector<Tool>& tools, bool several, const MarkSpeller&) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence({parts::Text(tool.name + "(**"), parts::Arguments(tool), parts::Text(")")}));
  return parts::Sequence(
      {parts::Text("["), parts::List(parts::OneOf(std::move(calls)), parts::Text(", "), several), parts::Text("]")});
}

}  // namespace

const CallFormat& PythonicFormat() {
  static const CallFormat format{"pythonic",
                                 "[",
                                 {"<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"},
                                 Parser,
                                 Grammar};
  return format;
}

}  // namespace dovetail::server
