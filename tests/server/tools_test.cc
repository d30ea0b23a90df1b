// Tools and thoughts of a chat, from the fields of a request to the frames of its answer. No sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "model/tokenizer/tokenizer.h"
#include "server/openai/api_error.h"
#include "server/openai/chat_renderer.h"
#include "server/openai/generation_response.h"
#include "server/openai/prepare.h"
#include "tests/server/test_model.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;

constexpr char kWeather[] =
    R"({"type":"function","function":{"name":"get_weather","parameters":{"type":"object",
        "properties":{"city":{"type":"string"}},"required":["city"]}}})";

std::shared_ptr<ServedModel> Model() {
  return ModelWithGrammars([] {}, /*max_model_len=*/8192);
}

absl::StatusOr<PreparedGeneration> Ask(const ServedModel& model, const std::string& fields,
                                       const std::string& messages = R"([{"role":"user","content":"hi"}])") {
  const auto json =
      ParseJson(absl::StrCat(R"({"model":"bytes","messages":)", messages, fields.empty() ? "" : ",", fields, "}"));
  if (!json.ok()) return json.status();
  const auto request = ParseChatRequest(*json, model);
  if (!request.ok()) return request.status();
  return Prepare(*request, model, {.id_seed = 7});
}

std::string ParamOf(const absl::Status& status) { return status.ok() ? "" : ToApiError(status).param.value_or("none"); }

std::string PromptOf(const ServedModel& model, const absl::StatusOr<PreparedGeneration>& prepared) {
  return prepared.ok() ? model.tokenizer->Decode(prepared->requests[0].prompt, /*skip_special=*/false)
                       : prepared.status().ToString();
}

TEST(Tools, WhatIsWrongIsNamed) {
  const auto model = Model();
  const auto tool = [](const std::string& function) {
    return absl::StrCat(R"("tools":[{"type":"function","function":)", function, "}]");
  };
  const std::string weather = absl::StrCat("\"tools\":[", kWeather, "]");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("tools":{})", "tools"},
      {R"("tools":[1])", "tools.0"},
      {R"("tools":[{"function":{"name":"f"}}])", "tools.0.type"},
      {R"("tools":[{"type":"web_search"}])", "tools.0.type"},
      {R"("tools":[{"type":"function"}])", "tools.0.function"},
      {tool("{}"), "tools.0.function.name"},
      {tool(R"({"name":""})"), "tools.0.function.name"},
      {tool(R"({"name":"a b"})"), "tools.0.function.name"},
      {tool(absl::StrCat(R"({"name":")", std::string(65, 'x'), "\"}")), "tools.0.function.name"},
      {tool(R"({"name":"f","parameters":[]})"), "tools.0.function.parameters"},
      {tool(R"({"name":"f","parameters":{"type":"string"}})"), "tools.0.function.parameters.type"},
      {tool(R"({"name":"f","strict":1})"), "tools.0.function.strict"},
      {absl::StrCat("\"tools\":[", kWeather, ",", kWeather, "]"), "tools.1.function.name"},
      {R"("tool_choice":"auto")", "tool_choice"},
      {R"("tool_choice":"required","tools":[])", "tool_choice"},
      {weather + R"(,"tool_choice":"any")", "tool_choice"},
      {weather + R"(,"tool_choice":1)", "tool_choice"},
      {weather + R"(,"tool_choice":{"type":"allowed_tools"})", "tool_choice.type"},
      {weather + R"(,"tool_choice":{"type":"function"})", "tool_choice.function"},
      {weather + R"(,"tool_choice":{"type":"function","function":{}})", "tool_choice.function.name"},
      {weather + R"(,"tool_choice":{"type":"function","function":{"name":"f"}})", "tool_choice.function.name"},
      {weather + R"(,"tool_choice":"required","min_tokens":1)", "min_tokens"},
      {weather + R"(,"tool_choice":"required","ignore_eos":true)", "ignore_eos"},
      {weather + R"(,"parallel_tool_calls":1)", "parallel_tool_calls"},
      {R"("functions":[{"name":"f"}])", "functions"},
      {R"("reasoning_effort":"much")", "reasoning_effort"},
      {R"("enable_thinking":1)", "enable_thinking"},
      {R"("enable_thinking":true,"reasoning_effort":"none")", "enable_thinking"},
      {R"("enable_thinking":true,"chat_template_kwargs":{"enable_thinking":false})", "enable_thinking"},
      {R"("reasoning_effort":"low","chat_template_kwargs":{"reasoning_effort":"high"})", "reasoning_effort"},
  };
  for (const auto& [fields, param] : cases) EXPECT_EQ(ParamOf(Ask(*model, fields).status()), param) << fields;
  std::string many = kWeather;
  for (int i = 0; i < 128; ++i) absl::StrAppend(&many, ",", kWeather);
  EXPECT_EQ(ParamOf(Ask(*model, absl::StrCat("\"tools\":[", many, "]")).status()), "tools");
  model->calls = nullptr;
  EXPECT_EQ(ParamOf(Ask(*model, weather).status()), "tools");
}

TEST(Tools, ASchemaThatCannotBeEnforcedIsRefusedWhereItWouldBe) {
  const auto model = Model();
  const auto ask = [&](const std::string& strict, const std::string& choice) {
    return Ask(*model, absl::StrCat(R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object",
      "properties":{"a":{"type":"string","format":"iri"}}})",
                                    strict, "}}]", choice))
        .status();
  };
  EXPECT_EQ(ParamOf(ask("", "")), "");
  EXPECT_EQ(ParamOf(ask("", R"(,"tool_choice":"required")")), "tools.0.function.parameters.properties.a.format");
  EXPECT_THAT(std::string(ask("", R"(,"tool_choice":"required")").message()), HasSubstr("strict: false"));
  EXPECT_EQ(ParamOf(ask(R"(,"strict":true)", "")), "tools.0.function.parameters.properties.a.format");
  EXPECT_EQ(ParamOf(ask(R"(,"strict":false)", R"(,"tool_choice":"required")")), "");
}

TEST(Tools, HistoryIsChecked) {
  const auto model = Model();
  const std::string call = R"({"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
      "function":{"name":"get_weather","arguments":"{\"city\":\"Rome\"}"}}]})";
  const std::string user = R"({"role":"user","content":"hi"})";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"role":"tool","content":"x"})", "messages.2.tool_call_id"},
      {R"({"role":"tool","tool_call_id":"c2","content":"x"})", "messages.2.tool_call_id"},
      {R"({"role":"tool","tool_call_id":"c1"})", "messages.2.content"},
      {R"({"role":"function","name":"f","content":"x"})", "messages.2.role"},
      {R"({"role":"user","content":"x","tool_calls":[{"id":"1"}]})", "messages.2.tool_calls"},
      {R"({"role":"assistant","tool_calls":{}})", ""},
      {R"({"role":"assistant","tool_calls":[1]})", "messages.2.tool_calls.0"},
      {R"({"role":"assistant","tool_calls":[{"function":{"name":"f"}}]})", "messages.2.tool_calls.0.id"},
      {R"({"role":"assistant","tool_calls":[{"id":"c1","function":{"name":"f"}}]})", "messages.2.tool_calls.0.id"},
      {R"({"role":"assistant","tool_calls":[{"id":"a","function":{}}]})", "messages.2.tool_calls.0.function.name"},
      {R"({"role":"assistant","tool_calls":[{"id":"a","type":"custom","function":{"name":"f"}}]})",
       "messages.2.tool_calls.0.type"},
      {R"({"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":{}}}]})",
       "messages.2.tool_calls.0.function.arguments"},
      {R"({"role":"tool","tool_call_id":"c1","content":[{"type":"text","text":"x"}]})", ""},
  };
  for (const auto& [message, param] : cases)
    EXPECT_EQ(ParamOf(Ask(*model, "", absl::StrCat("[", user, ",", call, ",", message, "]")).status()), param)
        << message;
  const std::string large(size_t{1} << 20, 'x');
  EXPECT_EQ(ToApiError(Ask(*model, "",
                           absl::StrCat("[", user, ",", call, R"(,{"role":"tool","tool_call_id":"c1","content":")",
                                        large, "\"}]"))
                           .status())
                .code.value_or(""),
            "context_length_exceeded");
}

TEST(Tools, ATemplateWithoutToolsGetsThemAsText) {
  const auto model = Model();
  const std::string prompt = PromptOf(*model, Ask(*model, absl::StrCat("\"tools\":[", kWeather, "]"),
                                                  R"([{"role":"user","content":"Rome?"},
                      {"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
                         "function":{"name":"get_weather","arguments":"{\"city\":\"Rome\"}"}}]},
                      {"role":"tool","tool_call_id":"c1","content":"sunny"}])"));
  EXPECT_THAT(prompt, HasSubstr("<turn>system:You can call functions."));
  EXPECT_THAT(prompt, HasSubstr(R"({"type":"function","function":{"name":"get_weather","parameters":)"));
  EXPECT_THAT(prompt, HasSubstr("<turn>assistant:<tool_call>\n{\"name\": \"get_weather\", \"arguments\": "
                                "{\"city\":\"Rome\"}}\n</tool_call><turn>user:<tool_response>\nsunny\n"));
  EXPECT_EQ(PromptOf(*model, Ask(*model, absl::StrCat("\"tool_choice\":\"none\",\"tools\":[", kWeather, "]"))),
            PromptOf(*model, Ask(*model, "")));
}

TEST(Tools, ATemplateGetsThemInTheFormThatItTakes) {
  const auto model = Model();
  const auto render = [&](const std::string& source) {
    model->chat = *MakeChatRenderer({source, "", "<bos>", "<eos>"});
    return PromptOf(*model, Ask(*model, absl::StrCat("\"tools\":[", kWeather, "]"),
                                R"([{"role":"user","content":"Rome?"},
                      {"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",
                         "function":{"name":"get_weather","arguments":"{\"city\":\"Rome\"}"}}]},
                      {"role":"tool","tool_call_id":"c1","content":"sunny"}])"));
  };
  const std::string tools = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}";
  EXPECT_EQ(render(tools + "{% for m in messages %}{% if m.tool_calls %}{% for k, v in "
                           "m.tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% else %}"
                           "{{ m.content }}{% endif %}{% endfor %}"),
            "[get_weather]Rome?city=Rome;sunny");
  EXPECT_EQ(render(tools + "{% for m in messages %}{% if m.content is none %}{{ 'C:' + "
                           "m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}{% endfor %}"),
            "[get_weather]Rome?C:{\"city\":\"Rome\"}sunny");
}

TEST(Tools, RequiredCallsAreEnforcedByAGrammar) {
  const auto model = Model();
  const std::string weather = absl::StrCat("\"tools\":[", kWeather, "]");
  const auto grammar = [&](const std::string& fields) {
    const auto prepared = Ask(*model, fields);
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    return prepared.ok() ? prepared->requests[0].sampling.grammar.source : "";
  };
  EXPECT_EQ(grammar(weather), "");
  EXPECT_THAT(grammar(weather + R"(,"tool_choice":"required")"), HasSubstr("get_weather"));
  EXPECT_THAT(grammar(weather + R"(,"tool_choice":{"type":"function","function":{"name":"get_weather"}})"),
              HasSubstr("get_weather"));
  EXPECT_THAT(grammar(weather + R"(,"response_format":{"type":"json_object"})"), HasSubstr("get_weather"));
}

// ---- answers ----

requests::GenerationUpdate Update(std::string_view text, bool finished) {
  requests::GenerationUpdate update;
  for (const char c : text) update.tokens.push_back(static_cast<uint8_t>(c));
  update.choice_finished = finished;
  if (finished) update.tokens.push_back(kEos);
  if (finished) update.stop_token = kEos;
  update.request_finished = finished;
  update.prompt_tokens = 3;
  return update;
}

ResponseSpec Spec(const std::string& calls, const std::string& thoughts = "") {
  ResponseSpec spec;
  spec.endpoint = Endpoint::kChat;
  spec.id = "chatcmpl-1";
  spec.model = "bytes";
  spec.prompts = {{kBos, 'h', 'i'}};
  spec.answer.calls = FindCallFormat(calls);
  spec.answer.thoughts = FindThoughtFormat(thoughts);
  spec.answer.id_seed = 7;
  return spec;
}

// Of a stream: each chunk's delta, in a line.
std::vector<Json> Chunks(ResponseSpec spec, const std::string& text, size_t piece) {
  spec.stream = true;
  GenerationResponse response(TestModel(), spec);
  std::string frames;
  for (size_t i = 0; i < text.size(); i += piece)
    frames += response.OnUpdate(0, Update(std::string_view(text).substr(i, piece), false)).frames;
  frames += response.OnUpdate(0, Update("", true)).frames;
  std::vector<Json> chunks;
  for (size_t at = 0; (at = frames.find("data: {", at)) != std::string::npos; ++at)
    chunks.push_back(Json::parse(frames.substr(at + 6, frames.find('\n', at) - at - 6))["choices"][0]);
  return chunks;
}

Json Whole(ResponseSpec spec, const std::string& text) {
  GenerationResponse response(TestModel(), spec);
  response.OnUpdate(0, Update(text, false));
  response.OnUpdate(0, Update("", true));
  return Json::parse(response.Body());
}

const std::string kText =
    "Looking.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

TEST(ToolAnswers, AreStreamedAsOpenAiStreamsThem) {
  const std::vector<Json> chunks = Chunks(Spec("hermes"), kText, 1000);
  const std::string id = CallId(Spec("hermes").answer, 0, 0);
  ASSERT_EQ(chunks.size(), 5u);
  EXPECT_EQ(Dump(chunks[0]["delta"]), R"({"role":"assistant","content":null})");
  EXPECT_EQ(Dump(chunks[1]["delta"]), R"({"content":"Looking."})");
  EXPECT_EQ(Dump(chunks[2]["delta"]),
            absl::StrCat(R"({"tool_calls":[{"index":0,"id":")", id,
                         R"(","type":"function","function":{"name":"get_weather","arguments":""}}]})"));
  EXPECT_EQ(Dump(chunks[3]["delta"]),
            R"({"tool_calls":[{"index":0,"function":{"arguments":"{\"city\": \"Rome\"}"}}]})");
  EXPECT_EQ(Dump(chunks[4]["delta"]), "{}");
  EXPECT_EQ(chunks[4]["finish_reason"], "tool_calls");
}

TEST(ToolAnswers, AreTheSameStreamedAndWhole) {
  const std::string text = "<think>\nWhich city?\n</think>\n" + kText + "\n<tool_call>{\"name\": \"now\"}</tool_call>";
  const Json whole = Whole(Spec("hermes", "think"), text);
  const Json& message = whole["choices"][0]["message"];
  EXPECT_EQ(message["content"], "Looking.");
  EXPECT_EQ(message["reasoning_content"], "Which city?");
  EXPECT_EQ(message["reasoning"], "Which city?");
  EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], "{\"city\": \"Rome\"}");
  EXPECT_EQ(message["tool_calls"][1]["function"]["name"], "now");
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "tool_calls");
  EXPECT_EQ(whole["usage"]["completion_tokens_details"]["reasoning_tokens"],
            std::string("<think>\nWhich city?\n</think>").size() - std::string("<think").size());
  for (const size_t piece : {1, 2, 3, 7, 50}) {
    std::string content, reasoning;
    std::vector<std::string> ids(2), names(2), arguments(2);
    for (const Json& chunk : Chunks(Spec("hermes", "think"), text, piece)) {
      const Json& delta = chunk["delta"];
      if (delta.contains("content") && delta["content"].is_string()) content += delta["content"].get<std::string>();
      if (delta.contains("reasoning_content")) reasoning += delta["reasoning_content"].get<std::string>();
      if (!delta.contains("tool_calls")) continue;
      const Json& call = delta["tool_calls"][0];
      const size_t index = call["index"];
      if (call.contains("id")) {
        EXPECT_EQ(ids[index], "") << "an id comes once";
        ids[index] = call["id"];
        names[index] = call["function"]["name"];
      }
      arguments[index] += call["function"]["arguments"].get<std::string>();
    }
    EXPECT_EQ(content, message["content"]);
    EXPECT_EQ(reasoning, message["reasoning_content"]);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(ids[i], message["tool_calls"][i]["id"]);
      EXPECT_EQ(names[i], message["tool_calls"][i]["function"]["name"]);
      EXPECT_EQ(arguments[i], message["tool_calls"][i]["function"]["arguments"]);
    }
  }
}

TEST(ToolAnswers, CallsAloneHaveNoContent) {
  const Json whole = Whole(Spec("hermes"), kText.substr(kText.find('<')));
  EXPECT_TRUE(whole["choices"][0]["message"]["content"].is_null());
  const Json plain = Whole(Spec("hermes"), "Just text.");
  EXPECT_EQ(plain["choices"][0]["message"]["content"], "Just text.");
  EXPECT_FALSE(plain["choices"][0]["message"].contains("tool_calls"));
  EXPECT_EQ(plain["choices"][0]["finish_reason"], "stop");
}

TEST(ToolAnswers, WithoutParallelCallsTheFirstIsTheLast) {
  ResponseSpec spec = Spec("hermes");
  spec.answer.parallel_calls = false;
  GenerationResponse response(TestModel(), spec);
  const auto effects = response.OnUpdate(0, Update(kText + kText, false));
  EXPECT_EQ(effects.stops.size(), 1u);
  EXPECT_TRUE(effects.done);
  const Json whole = Json::parse(response.Body());
  EXPECT_EQ(whole["choices"][0]["message"]["tool_calls"].size(), 1u);
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "tool_calls");
}

TEST(ToolAnswers, StopStringsAreLookedForInContentAlone) {
  ResponseSpec spec = Spec("hermes", "think");
  spec.stop = {"Rome", "ever"};
  EXPECT_EQ(Whole(spec, "<think>Rome</think>\n" + kText)["choices"][0]["finish_reason"], "tool_calls");
  const Json stopped = Whole(spec, "<think>Rome</think>Forever and ever");
  EXPECT_EQ(stopped["choices"][0]["message"]["content"], "For");
  EXPECT_EQ(stopped["choices"][0]["stop_reason"], "ever");
  EXPECT_EQ(Whole(spec, "an eve" + kText)["choices"][0]["message"]["content"], "an eveLooking.");
}

TEST(ToolAnswers, ReasoningMayBeLeftOut) {
  ResponseSpec spec = Spec("", "think");
  spec.answer.show_reasoning = false;
  const Json whole = Whole(spec, "<think>a</think>b");
  EXPECT_EQ(whole["choices"][0]["message"]["content"], "b");
  EXPECT_FALSE(whole["choices"][0]["message"].contains("reasoning"));
}

TEST(ToolAnswers, SpecialTokensOfTheFormatAreText) {
  ResponseSpec spec = Spec("", "think");
  ThoughtFormat format{"test", "<turn>", "<pad>"};
  spec.answer.thoughts = &format;
  spec.answer.marks = {kTurn, kTurn + 1};
  GenerationResponse response(TestModel(), spec);
  requests::GenerationUpdate update;
  update.tokens = {kTurn, 'a', kTurn + 1, 'b', kBos};
  response.OnUpdate(0, update);
  response.OnUpdate(0, Update("", true));
  const Json message = Json::parse(response.Body())["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "a");
  EXPECT_EQ(message["content"], "b");
}

// ---- what templates say ----

TEST(Templates, PublishedOnesSayHowTheirModelsCallAndThink) {
  struct Published {
    const char *file, *calls, *thoughts;
  };
  constexpr Published kPublished[] = {
      {"Qwen-Qwen3-0.6B", "hermes", "think"},
      {"Qwen3-Coder", "qwen3_coder", ""},
      {"MiniMax-M2", "minimax_m2", "think"},
      {"moonshotai-Kimi-K2", "kimi_k2", ""},
      {"openai-gpt-oss-120b", "openai", "openai"},
      {"unsloth-mistral-Devstral-Small-2507", "mistral", ""},
      {"mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "mistral"},
      {"ibm-granite-granite-4.0", "hermes", ""},
      {"meta-llama-Llama-3.1-8B-Instruct", "llama3_json", ""},
      {"meta-llama-Llama-3.2-3B-Instruct", "llama3_json", ""},
      {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", ""},
      {"LFM2-8B-A1B", "pythonic", ""},
      {"NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder", "think"},
      {"microsoft-Phi-3.5-mini-instruct", "hermes", ""},  // it shows no tools
      {"deepseek-ai-DeepSeek-V3.1", "hermes", "think"},   // nor does this one
      {"meetkai-functionary-medium-v3.1", "none", ""},    // formats that are not known here
      {"ByteDance-Seed-OSS", "none", "seed_oss"},
      {"GLM-4.6", "none", "think"},
  };
  DOVETAIL_DATA_OR_SKIP(const auto folder, "chat-templates");
  for (const Published& one : kPublished) {
    std::ifstream in(folder / absl::StrCat(one.file, ".jinja"));
    const ChatTemplateText text{std::string(std::istreambuf_iterator<char>(in), {}), "", "<s>", "</s>"};
    const CallFormat* calls = CallsUnder(text);
    const ThoughtFormat* thoughts = ThoughtsUnder(text);
    EXPECT_EQ(calls == nullptr ? "none" : calls->name, one.calls) << one.file;
    EXPECT_EQ(thoughts == nullptr ? "" : thoughts->name, one.thoughts) << one.file;
  }
}

// A call and its result, through published templates: each shows both, whatever form it wants them in.
TEST(Templates, PublishedOnesShowCallsAndResults) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "chat-templates");
  const auto model = Model();
  Json tools;
  ASSERT_TRUE(ParseTools(*ParseJson(absl::StrCat(R"({"tools":[)", kWeather, "]}")), *model, false, tools).ok());
  int shown = 0;
  std::vector<std::string> refused;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".jinja") continue;
    std::ifstream in(entry.path());
    const auto chat = MakeChatRenderer({std::string(std::istreambuf_iterator<char>(in), {}), "", "<s>", "</s>"});
    ASSERT_TRUE(chat.ok()) << entry.path();
    model->chat = *chat;
    const auto parts = (*chat)({.messages = *ParseMessages(*ParseJson(
                                    R"([{"role":"user","content":"Rome?"},{"role":"assistant","content":null,
                                        "tool_calls":[{"id":"abcdefgh1","type":"function","function":{
                                          "name":"get_weather","arguments":"{\"city\":\"Romulus\"}"}}]},
                                       {"role":"tool","tool_call_id":"abcdefgh1","content":"sunny"}])")),
                                .tools = tools});
    if (!parts.ok()) {
      refused.push_back(entry.path().stem());
      continue;
    }
    std::string text;
    for (const model::PromptPart& part : *parts) text += part.text;
    for (const char* needle : {"get_weather", "Romulus", "sunny"}) EXPECT_THAT(text, HasSubstr(needle)) << entry.path();
    ++shown;
  }
  EXPECT_EQ(shown, 42);
  // One wants variables of its own, and one writes to a message.
  EXPECT_THAT(refused, ::testing::UnorderedElementsAre("fireworks-ai-llama-3-firefunction-v2", "MiroThinker"));
}

std::string Rendering(const std::string& source, const std::string& messages) {
  const auto chat = MakeChatRenderer({source, "", "<s>", "</s>"});
  if (!chat.ok()) return chat.status().ToString();
  const auto parts = (*chat)({.messages = *ParseMessages(*ParseJson(messages))});
  if (!parts.ok()) return parts.status().ToString();
  std::string text;
  for (const model::PromptPart& part : *parts) text += part.text;
  return text;
}

TEST(Templates, OneThatTakesOneSystemMessageGetsTheOthersInIt) {
  const std::string loop = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}";
  const std::string strict =
      "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
      "{{ raise_exception('the system speaks first') }}{% endif %}{{ m.role }}:{{ m.content }}|{% endfor %}";
  constexpr char kSystems[] = R"([{"role":"system","content":"a"},{"role":"developer","content":"b"},
      {"role":"user","content":"c"},{"role":"system","content":"d"},{"role":"assistant","content":"e"},
      {"role":"system","content":"f"},{"role":"user","content":"g"}])";
  EXPECT_EQ(Rendering(loop, kSystems), "system:a|system:b|user:c|system:d|assistant:e|system:f|user:g|");
  EXPECT_EQ(Rendering(strict, kSystems), "system:a\n\nb|user:c\n\nd|assistant:e|user:f\n\ng|");
  EXPECT_EQ(Rendering(strict, R"([{"role":"user","content":"c"},{"role":"assistant","content":"e"},
                                  {"role":"system","content":"f"}])"),
            "user:c|assistant:e|user:f|");
}

// What coding agents send: two messages of the system, and one behind the user's.
TEST(Templates, PublishedOnesShowAllThatTheSystemSays) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "chat-templates");
  constexpr char kRules[] = R"([{"role":"system","content":"Rule one."},{"role":"system","content":"Rule two."},
      {"role":"user","content":"Rome?"},{"role":"system","content":"Rule three."}])";
  int shown = 0;
  std::vector<std::string> refused;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".jinja") continue;
    std::ifstream in(entry.path());
    const std::string text = Rendering({std::istreambuf_iterator<char>(in), {}}, kRules);
    const bool all = text.find("Rule one.") != text.npos && text.find("Rule two.") != text.npos &&
                     text.find("Rule three.") != text.npos && text.find("Rome?") != text.npos;
    if (!all) refused.push_back(entry.path().stem());
    shown += all;
  }
  EXPECT_EQ(shown, 42);
  // One wants variables of its own, and one cannot be without tools.
  EXPECT_THAT(refused, ::testing::UnorderedElementsAre("fireworks-ai-llama-3-firefunction-v2",
                                                       "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"));
}

// ---- what the prompt says ----

TEST(Reasoning, ThePromptSaysWhetherAThoughtHasBegun) {
  const auto model = Model();
  model->thoughts = FindThoughtFormat("think");
  const auto state = [&](const std::string& end, const std::string& fields = "") {
    model->chat = *MakeChatRenderer({"{{ messages[0].content }}|" + end, "", "<bos>", "<eos>"});
    const auto prepared = Ask(*model, fields, R"([{"role":"user","content":"<think>"}])");
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    const AnswerSpec& spec = prepared->spec.answer;
    return spec.thoughts == nullptr ? "none" : spec.thought_begun ? "begun" : "may";
  };
  EXPECT_STREQ(state("<think>\n"), "begun");
  EXPECT_STREQ(state("<think>\n\n</think>\n\n"), "none");
  EXPECT_STREQ(state("assistant:"), "may");
  EXPECT_STREQ(state("{% if enable_thinking is false %}<think></think>{% endif %}", R"("enable_thinking":false)"),
               "none");
  EXPECT_STREQ(
      state("{% if not thinking %}<think></think>{% else %}<think>{% endif %}", R"("reasoning_effort":"none")"),
      "none");
  EXPECT_STREQ(state("{% if reasoning_effort == 'high' %}<think>{% endif %}", R"("reasoning_effort":"high")"), "begun");
}

}  // namespace
}  // namespace dovetail::server::test
