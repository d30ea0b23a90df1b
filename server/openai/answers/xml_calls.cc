// Parameters as elements.
// Qwen3-Coder: <tool_call> <function=f> <parameter=a> 1 </parameter> </function> </tool_call>, in lines.
// MiniMax-M2: <minimax:tool_call> <invoke name="f"> <parameter name="a">1</parameter> </invoke> </minimax:tool_call>.
#include <algorithm>

#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/marked_calls.h"

namespace dovetail::server {
namespace {

constexpr XmlArgumentMarks kQwenMarks = {"<parameter=", ">", "</parameter>", "</function>"};
constexpr XmlArgumentMarks kMinimaxMarks = {"<parameter name=\"", "\">", "</parameter>", "</invoke>"};

class XmlCalls : public CallSyntax {
 public:
  explicit XmlCalls(const std::vector<Tool>& tools) : tools_(tools) {}

 protected:
  std::unique_ptr<ArgumentReader> ArgumentsBy(const XmlArgumentMarks& marks, const CallHead& head) const {
    const auto found =
        std::find_if(tools_.begin(), tools_.end(), [&](const Tool& tool) { return tool.name == head.name; });
    return MakeXmlArguments(marks, found == tools_.end() ? Json::object() : found->parameters);
  }

 private:
  const std::vector<Tool> tools_;
};

class Qwen3Coder : public XmlCalls {
 public:
  using XmlCalls::XmlCalls;
  std::vector<std::string> markers() const override { return {"<tool_call>", "<function="}; }
  void Head(Cursor& cursor, Place, size_t marker, CallHead& head) override {
    cursor.Spaces();
    if (marker == 0) cursor.Literal("<function=");
    head.name = cursor.Name();
    cursor.Literal(">");
  }
  std::unique_ptr<ArgumentReader> Arguments(const CallHead& head) override { return ArgumentsBy(kQwenMarks, head); }
  bool Tail(Cursor& cursor) override {
    cursor.Spaces();
    cursor.Try("</tool_call>");
    return false;
  }
};

class MinimaxM2 : public XmlCalls {
 public:
  using XmlCalls::XmlCalls;
  std::vector<std::string> markers() const override { return {"<minimax:tool_call>"}; }
  void Head(Cursor& cursor, Place, size_t, CallHead& head) override {
    cursor.Spaces();
    cursor.Literal("<invoke name=\"");
    head.name = cursor.Name();
    cursor.Literal("\">");
  }
  std::unique_ptr<ArgumentReader> Arguments(const CallHead& head) override { return ArgumentsBy(kMinimaxMarks, head); }
  bool Tail(Cursor& cursor) override {
    cursor.Spaces();
    if (cursor.Try("</minimax:tool_call>")) return false;
    return cursor.Sees("<invoke name=\"");
  }
};

template <typename Syntax>
std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>& tools) {
  return std::make_unique<MarkedCalls>(std::make_unique<Syntax>(tools));
}

Json QwenGrammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence({mark("<tool_call>"), parts::Text("\n<function=" + tool.name + ">\n"),
                                     parts::Schema(tool.parameters, "qwen_xml"), parts::Text("\n</function>\n"),
                                     mark("</tool_call>")}));
  return parts::List(parts::OneOf(std::move(calls)), parts::Text("\n"), several);
}

Json MinimaxGrammar(const std::vector<Tool>& tools, bool several, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(parts::Sequence({parts::Text("<invoke name=\"" + tool.name + "\">\n"),
                                     parts::Schema(tool.parameters, "minimax_xml"), parts::Text("\n</invoke>\n")}));
  return parts::Sequence({mark("<minimax:tool_call>"), parts::Text("\n"),
                          parts::List(parts::OneOf(std::move(calls)), parts::Text(""), several),
                          mark("</minimax:tool_call>")});
}

}  // namespace

const CallFormat& Qwen3CoderFormat() {
  static const CallFormat format{
      "qwen3_coder",       "<tool_call>",           {"<tool_call>", "</tool_call>"}, Parser<Qwen3Coder>, QwenGrammar,
      /*alnum_ids=*/false, /*json_arguments=*/false};
  return format;
}

const CallFormat& MinimaxM2Format() {
  static const CallFormat format{"minimax_m2",
                                 "<minimax:tool_call>",
                                 {"<minimax:tool_call>", "</minimax:tool_call>"},
                                 Parser<MinimaxM2>,
                                 MinimaxGrammar,
                                 /*alnum_ids=*/false,
                                 /*json_arguments=*/false};
  return format;
}

}  // namespace dovetail::server
