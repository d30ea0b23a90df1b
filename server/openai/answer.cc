#include "server/openai/answer.h"

#include <utility>

#include "grammar/grammar_engine.h"
#include "server/openai/answers/grammar_parts.h"
#include "server/openai/answers/marks.h"

namespace dovetail::server {
namespace {

bool IsHarmony(const CallFormat* calls, const ThoughtFormat* thoughts) {
  return (calls != nullptr && calls == &OpenAiFormat()) || (thoughts != nullptr && thoughts->open.empty());
}

Json AnyText(Json::array_t excluded = {}) { return {{"type", "any_text"}, {"excludes", std::move(excluded)}}; }

Json Spaces() { return {{"type", "regex"}, {"pattern", "[ \\n]{0,4}"}}; }

// A grammar of structured_output.h as a part of a larger one.
Json PartOf(const std::string& source) {
  const std::string text = source.substr(1);
  switch (static_cast<grammar::Kind>(source[0])) {
    case grammar::Kind::kJsonSchema: return parts::Schema(Json::parse(text));
    case grammar::Kind::kRegex: return {{"type", "regex"}, {"pattern", text}};
    case grammar::Kind::kStructuralTag: return Json::parse(text)["format"];
    default: return {{"type", "grammar"}, {"grammar", text}};
  }
}

// Text that does not begin a call, and calls behind it if there are some.
Json TextAndCalls(const Json& calls, const CallFormat& format, const MarkSpeller& mark) {
  const Json begin = mark(format.begin);
  if (begin["type"] == "token") return parts::Sequence({AnyText(), parts::Optional(calls)});
  if (format.begin.size() > 1)
    return parts::Sequence({AnyText(Json::array_t{std::string(format.begin)}), parts::Optional(calls)});
  const std::string other = "[^\\" + std::string(format.begin) + " \\n\\t]";
  return parts::Optional(
      parts::OneOf({calls, parts::Sequence({Json{{"type", "regex"}, {"pattern", other}}, AnyText()})}));
}

Json HarmonyMessage(std::string_view channel, Json content, const MarkSpeller& mark) {
  return parts::Sequence({mark("<|channel|>"), parts::Text(channel), mark("<|message|>"), std::move(content)});
}

Json Thought(const ThoughtFormat& format, ThoughtState state, const MarkSpeller& mark) {
  if (format.open.empty())
    return parts::Optional(parts::Sequence({HarmonyMessage("analysis", AnyText({"<|end|>"}), mark), mark("<|end|>"),
                                            mark("<|start|>"), parts::Text("assistant")}));
  Json rest = parts::Sequence({AnyText({std::string(format.close)}), mark(format.close), Spaces()});
  if (state == ThoughtState::kBegun) return rest;
  return parts::Optional(parts::Sequence({mark(format.open), std::move(rest)}));
}

}  // namespace

std::unique_ptr<AnswerParser> MakeAnswerParser(const AnswerSpec& spec) {
  if (IsHarmony(spec.calls, spec.thoughts)) return OpenAiFormat().parser(spec.tools);
  std::unique_ptr<AnswerParser> parser;
  if (spec.calls != nullptr) parser = spec.calls->parser(spec.tools);
  if (spec.thoughts != nullptr)
    parser = std::make_unique<ThoughtParser>(*spec.thoughts, spec.thought_begun, std::move(parser));
  return parser;
}

std::string CallId(const AnswerSpec& spec, int choice, int call) {
  constexpr std::string_view kDigits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const bool nine = spec.calls != nullptr && spec.calls->alnum_ids;
  std::string id = nine ? "" : "call_";
  // splitmix64: Steele, Lea and Flood 2014.
  uint64_t state = spec.id_seed + (static_cast<uint64_t>(choice) << 32) + static_cast<uint64_t>(call);
  for (int i = 0; i < (nine ? 9 : 24); ++i) {
    uint64_t mixed = state += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    id += kDigits[(mixed ^ (mixed >> 31)) % kDigits.size()];
  }
  return id;
}

ThoughtState ThoughtAfter(const std::vector<model::PromptPart>& prompt, const ServedModel& model) {
  if (model.thoughts == nullptr || prompt.empty() || prompt.back().is_input) return ThoughtState::kNone;
  if (model.thoughts->open.empty()) return ThoughtState::kMay;
  const std::string_view text = prompt.back().text;
  const std::string_view end = text.substr(0, LengthTrimmed(text));
  if (end.ends_with(model.thoughts->open)) return ThoughtState::kBegun;
  return end.ends_with(model.thoughts->close) ? ThoughtState::kNone : ThoughtState::kMay;
}

std::string AnswerGrammar(const std::string& text, const ToolUse& tools, ThoughtState thought,
                          const ServedModel& model) {
  const bool harmony = IsHarmony(model.calls, model.thoughts);
  const bool calls = !tools.grammar.is_null();
  if (text.empty() && !calls) return "";
  if (!calls && thought == ThoughtState::kNone && !harmony) return text;
  const MarkSpeller mark = MarksOf(model);
  const auto shown = [&](Json content) {
    return harmony ? HarmonyMessage("final", std::move(content), mark) : content;
  };
  Json body;
  if (!calls) {
    body = shown(PartOf(text));
  } else if (tools.required) {
    body = tools.grammar;
  } else if (!text.empty()) {
    body = parts::OneOf({shown(PartOf(text)), tools.grammar});
  } else if (harmony) {
    body = parts::OneOf({shown(AnyText()), tools.grammar});
  } else {
    body = TextAndCalls(tools.grammar, *model.calls, mark);
  }
  if (thought != ThoughtState::kNone)
    body = parts::Sequence({Thought(*model.thoughts, thought, mark), std::move(body)});
  return grammar::SourceOf(grammar::Kind::kStructuralTag,
                           Dump(Json{{"type", "structural_tag"}, {"format", std::move(body)}}));
}

}  // namespace dovetail::server
