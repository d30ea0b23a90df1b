// {"name": "f", "parameters": {...}}, which is the whole answer, perhaps behind <|python_tag|>; several are separated
// by a semicolon. Llama 3.1 to 3.3.
#include <algorithm>

#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/json_call.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

class Llama3Json : public CallSyntax {
 public:
  explicit Llama3Json(const std::vector<Tool>& tools) {
    for (const Tool& tool : tools) known_.push_back(tool.name);
  }
  std::vector<std::string> markers() const override { return {"<|python_tag|>"}; }
  bool begins_bare() const override { return true; }
  void Head(Cursor& cursor, Place place, size_t, CallHead& head) override {
    call_.Head(cursor, head);
    if (place == Place::kBare && std::find(known_.begin(), known_.end(), head.name) == known_.end()) cursor.Refuse();
  }
  bool Tail(Cursor& cursor) override {
    call_.Tail(cursor);
    cursor.Commit();
    cursor.Spaces();
    if (cursor.Try("<|python_tag|>")) return cursor.ok();
    cursor.Literal(";");
    cursor.Spaces();
    return cursor.Sees("{");
  }

 private:
  std::vector<std::string> known_;
  JsonCallReader call_;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>& tools) {
  return std::make_unique<MarkedCalls>(std::make_unique<Llama3Json>(tools));
}

// These models make one call at a time.
Json Grammar(const std::vector<Tool>& tools, bool, const MarkSpeller&) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence(
        {parts::Text("{\"name\": \"" + tool.name + "\", \"parameters\": "), parts::Arguments(tool), parts::Text("}")}));
  return parts::OneOf(std::move(calls));
}

}  // namespace

const CallFormat& Llama3JsonFormat() {
  static const CallFormat format{"llama3_json", "{", {"<|python_tag|>"}, Parser, Grammar};
  return format;
}

}  // namespace dovetail::server
