// Answers of models taken apart: calls, thoughts and content. However a text is cut, the same comes out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "server/openai/answer.h"
#include "server/openai/answers/marks.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

const std::vector<Tool>& Tools() {
  static const std::vector<Tool> tools = {
      {"get_weather", *ParseJson(R"({"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"},
                                     "units":{"enum":["C","F"]}},"required":["city"]})")},
      {"now", *ParseJson(R"({"type":"object","properties":{}})")},
      {"note", *ParseJson(R"({"type":"object","properties":{"text":{"type":"string"},"tags":{"type":"array"}}})")}};
  return tools;
}

AnswerSpec Spec(std::string_view calls, std::string_view thoughts = "", bool begun = false) {
  AnswerSpec spec;
  spec.calls = FindCallFormat(calls);
  spec.thoughts = FindThoughtFormat(thoughts);
  spec.thought_begun = begun;
  spec.tools = Tools();
  return spec;
}

// The pieces as one text: content as it is, <r:thought>, <name|id(arguments)>. A call that does not end is seen.
std::string Shown(const std::vector<AnswerPiece>& pieces) {
  std::string text;
  for (const AnswerPiece& piece : pieces) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent: text += piece.text; break;
      case AnswerPiece::Kind::kReasoning: text += "<r:" + piece.text + ">"; break;
      case AnswerPiece::Kind::kCallBegins:
        text += "<" + piece.text + (piece.id.empty() ? "" : "|" + piece.id) + "(";
        break;
      case AnswerPiece::Kind::kArguments: text += piece.text; break;
      case AnswerPiece::Kind::kCallEnds: text += ")>"; break;
    }
  }
  return text;
}

// Pieces of one kind that follow each other are one.
std::vector<AnswerPiece> Joined(const std::vector<AnswerPieces>& all) {
  AnswerPieces joined;
  for (const AnswerPieces& some : all)
    for (const AnswerPiece& piece : some.all()) joined.Add(piece.kind, piece.text, piece.id);
  return joined.all();
}

std::string Read(const AnswerSpec& spec, const std::string& text, const std::vector<size_t>& cuts = {}) {
  const auto parser = MakeAnswerParser(spec);
  std::vector<AnswerPieces> all;
  size_t from = 0;
  for (const size_t cut : cuts) {
    parser->Push(std::string_view(text).substr(from, cut - from), all.emplace_back());
    from = cut;
  }
  parser->Push(std::string_view(text).substr(from), all.emplace_back());
  parser->Finish(all.emplace_back());
  return Shown(Joined(all));
}

struct Case {
  const char* format;
  std::string text;
  std::string shown;
};

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"hermes",
       "Let me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Pa}ris "
       "\\\"\"}}\n</tool_call>",
       "Let me see.<get_weather({\"city\": \"Pa}ris \\\"\"})>"},
      {"hermes",
       "<tool_call>{\"arguments\": {\"a\": [1, {}]}, \"name\": \"note\"}</tool_call>\n<tool_call>\n{\"name\": "
       "\"now\"}\n"
       "</tool_call>\n",
       "<note({\"a\": [1, {}]})><now({})>"},
      {"hermes", "a <tool_call> b", "a <tool_call> b"},
      {"hermes", "<tool_call>{\"name\": \"bad name\", \"arguments\": {}}</tool_call>",
       "<tool_call>{\"name\": \"bad name\", \"arguments\": {}}</tool_call>"},
      {"hermes", "<tool_call><tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call> done",
       "<tool_call><now({})> done"},
      {"hermes", "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b", "<now({\"a\": \"b)>"},
      {"hermes", "<tool_call>{\"name\": \"no", "<tool_call>{\"name\": \"no"},
      {"hermes", "<tool_call>{\"name\": \"now\", \"arguments\": {}} oops", "<now({})> oops"},
      {"hermes", "if a < b and </tool", "if a < b and </tool"},
      {"llama3_json", "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Rome\"}}",
       "<get_weather({\"city\": \"Rome\"})>"},
      {"llama3_json",
       " {\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}; {\"name\": \"note\", \"parameters\": {}}",
       "<now({})><note({})>"},
      {"llama3_json", "<|python_tag|>{\"name\": \"anything\", \"parameters\": {}}", "<anything({})>"},
      {"llama3_json", "{\"name\": \"Bob\", \"parameters\": {}}", "{\"name\": \"Bob\", \"parameters\": {}}"},
      {"llama3_json", "{\"answer\": 1}", "{\"answer\": 1}"},
      {"llama3_json", "It is {\"name\": \"now\", \"parameters\": {}}", "It is {\"name\": \"now\", \"parameters\": {}}"},
      {"pythonic", "[get_weather(city='Pa\\'ris \"x\"', days=2, b=True, c=[1, (2,), {'k': None}], d=-1.5e3), now()]",
       "<get_weather({\"city\": \"Pa'ris \\\"x\\\"\", \"days\": 2, \"b\": true, \"c\": [1, [2], {\"k\": null}], \"d\": "
       "-1.5e3})><now({})>"},
      {"pythonic", "[note(**{\"text\": \"a\\u00e9\\n\", \"ok\": true})]",
       "<note({\"text\": \"a\\u00e9\\n\", \"ok\": true})>"},
      {"pythonic", "<|tool_call_start|>[now()]<|tool_call_end|>It is late.", "<now({})>It is late."},
      {"pythonic", "[note(x) is a call]", "[note(x) is a call]"},
      {"pythonic", "[1, 2]", "[1, 2]"},
      {"mistral", "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Oslo\"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
       "<get_weather({\"city\": \"Oslo\"})><now|abcdefghi({})>"},
      {"mistral",
       "[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": {}}, {\"name\": \"note\", \"arguments\": {\"a\": 1}, \"id\": "
       "\"x\"}]",
       "<now({})><note({\"a\": 1})>"},
      {"mistral", "[TOOL_CALLS]now{}", "<now({})>"},
      {"mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing"},
      {"qwen3_coder",
       "I will.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan "
       "\"F\"\nCity\n</parameter>\n<parameter=days>\n3\n"
       "</parameter>\n<parameter=units>\nC\n</parameter>\n</function>\n</tool_call>",
       "I will.<get_weather({\"city\": \"San \\\"F\\\"\\nCity\", \"days\": 3, \"units\": \"C\"})>"},
      {"qwen3_coder",
       "<function=note>\n<parameter=tags>\n[1, "
       "\"a\"]\n</parameter>\n<parameter=other>\nplain\n</parameter>\n</function>",
       "<note({\"tags\": [1, \"a\"], \"other\": \"plain\"})>"},
      {"qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>\n", "<now({})>"},
      {"qwen3_coder", "<tool_call>\n<function=note>\n<parameter=text>\na < b", "<note({\"text\": \"a < b)>"},
      {"granite", "<|tool_call|>[{\"name\": \"now\", \"arguments\": {}}, {\"name\": \"note\", \"arguments\": {}}]",
       "<now({})><note({})>"},
      {"granite", "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>", "<now({})>"},
      {"minimax_m2",
       "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Bonn</parameter>\n<parameter "
       "name=\"days\">1</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
       "<get_weather({\"city\": \"Bonn\", \"days\": 1})><now({})>"},
      {"kimi_k2",
       "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"
       "\"city\": "
       "\"Bern\"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
       "<|tool_calls_section_end|>",
       "Sure.<get_weather|functions.get_weather:0({\"city\": \"Bern\"})><now|functions.now:1({})>"},
      {"deepseek_v3",
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\n<"
       "｜tool▁call▁begin｜>"
       "function<｜tool▁sep｜>note\n```json\n{\"a\": \"```\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "<now({})><note({\"a\": \"```\"})>"},
      {"deepseek_v31",
       "ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>note<"
       "｜tool▁sep｜>{\"a\": 1}"
       "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "ok<now({})><note({\"a\": 1})>"},
      {"openai",
       "<|channel|>analysis<|message|>Hm, weather.<|end|><|start|>assistant<|channel|>commentary "
       "to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Graz\"}<|call|>",
       "<r:Hm, weather.><get_weather({\"city\": \"Graz\"})>"},
      {"openai",
       "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
       "<r:Easy.>It is 4."},
      {"openai", " to=functions.now<|channel|>commentary json<|message|>{}", "<now({})>"},
      {"openai", "no marks at all", "no marks at all"},
      {"openai", "<|start|><|start|>assistant", "<|start|><|start|>assistant"},
  };
  return cases;
}

TEST(Answers, CallsAreReadAndWhatIsNoCallIsContent) {
  for (const Case& one : Cases()) EXPECT_EQ(Read(Spec(one.format), one.text), one.shown) << one.format;
}

std::vector<size_t> Boundaries(const std::string& text) {  // of characters
  std::vector<size_t> all;
  for (size_t i = 1; i < text.size(); ++i)
    if ((text[i] & 0xC0) != 0x80) all.push_back(i);
  return all;
}

TEST(Answers, EverySplitGivesTheSame) {
  constexpr uint32_t kSeed = 20261125;
  std::mt19937 random(kSeed);
  SCOPED_TRACE(kSeed);
  std::vector<std::pair<AnswerSpec, std::string>> texts;
  for (const Case& one : Cases()) {
    texts.emplace_back(Spec(one.format), one.text);
    texts.emplace_back(Spec(one.format, "think"), "<think>\nlet me\n</think>\n\n" + one.text);
    // Damaged texts are taken apart the same, too.
    for (int i = 0; i < 8; ++i) {
      std::string text = one.text + " and " + one.text;
      const auto at = Boundaries(text);
      text.erase(at[random() % at.size()], random() % 3);
      if (Boundaries(text).size() + 1 != text.size()) continue;  // ASCII alone: an erased byte breaks a character
      texts.emplace_back(Spec(one.format), text);
    }
  }
  for (const auto& [spec, text] : texts) {
    const std::string whole = Read(spec, text);
    const auto at = Boundaries(text);
    EXPECT_EQ(Read(spec, text, at), whole) << spec.calls->name << ": " << text;
    for (const size_t cut : at) EXPECT_EQ(Read(spec, text, {cut}), whole) << spec.calls->name << ": " << text << cut;
    for (int i = 0; i < 20; ++i) {
      std::vector<size_t> cuts;
      for (const size_t cut : at)
        if (random() % 5 == 0) cuts.push_back(cut);
      ASSERT_EQ(Read(spec, text, cuts), whole) << spec.calls->name << ": " << text;
    }
  }
}

TEST(Answers, WhatIsHeldBackIsBounded) {
  const std::string endless = "<tool_call>{\"name\": \"" + std::string(100'000, 'x');
  EXPECT_EQ(Read(Spec("hermes"), endless), endless);
  const std::string spaces(10'000, ' ');
  EXPECT_EQ(Read(Spec("hermes"), "a" + spaces + "b"), "a" + spaces + "b");
  const auto parser = MakeAnswerParser(Spec("hermes"));
  AnswerPieces out;
  parser->Push("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"" + std::string(100'000, 'x'), out);
  EXPECT_GT(Shown(out.all()).size(), 100'000u) << "arguments are not held back";
}

TEST(Thoughts, StandBeforeTheAnswer) {
  EXPECT_EQ(Read(Spec("", "think"), "<think>\n a\nb \n</think>\n\n Hi <think>x</think>"),
            "<r:a\nb>Hi <think>x</think>");
  EXPECT_EQ(Read(Spec("", "think"), "No thought."), "No thought.");
  EXPECT_EQ(Read(Spec("", "think"), "<thin"), "<thin");
  EXPECT_EQ(Read(Spec("", "think", true), "\nstill thinking"), "<r:still thinking>");
  EXPECT_EQ(Read(Spec("", "think", true), "a</think>b"), "<r:a>b");
  EXPECT_EQ(Read(Spec("", "mistral"), "[THINK]a[/THINK]b"), "<r:a>b");
  EXPECT_EQ(Read(Spec("hermes", "think", true),
                 "x <tool_call>\n</think>\n<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>"),
            "<r:x <tool_call>><now({})>");
}

TEST(Answers, IdsOfCallsDiffer) {
  AnswerSpec spec = Spec("hermes");
  std::set<std::string> ids;
  for (int choice = 0; choice < 8; ++choice)
    for (int call = 0; call < 100; ++call) ids.insert(CallId(spec, choice, call));
  EXPECT_EQ(ids.size(), 800u);
  spec.calls = FindCallFormat("mistral");
  EXPECT_THAT(CallId(spec, 0, 0), ::testing::MatchesRegex("[0-9A-Za-z]{9}"));
}

}  // namespace
}  // namespace dovetail::server::test
