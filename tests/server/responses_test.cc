// The Responses API, from the fields of a request to the frames of its answer. No sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/openai/prepare.h"
#include "tests/server/block_answers.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

using ::testing::ElementsAre;

absl::StatusOr<PreparedGeneration> Ask(const ServedModel& model, const std::string& fields) {
  DT_ASSIGN_OR_RETURN(const Json json, ParseJson(absl::StrCat(R"({"model":"bytes",)", fields, "}")));
  DT_ASSIGN_OR_RETURN(const ChatRequest request, ParseResponsesRequest(json, model));
  return Prepare(request, model, {.id = "1", .id_seed = 7});
}

std::string PromptOf(const ServedModel& model, const std::string& fields) {
  return test::PromptOf(model, Ask(model, fields));
}

TEST(Responses, InputBecomesAConversation) {
  const auto model = TestModel();
  EXPECT_EQ(PromptOf(*model, R"("input":"hi")"), "<turn>user:hi<turn>assistant:");
  EXPECT_EQ(PromptOf(*model, R"("instructions":"Be brief.","input":[{"role":"user","content":[{"type":"input_text",
                                "text":"a"},{"type":"input_text","text":"b"}]},
                                {"type":"message","role":"assistant","content":[{"type":"output_text","text":"c"}]},
                                {"type":"message","role":"developer","content":"d"}])"),
            "<turn>system:Be brief.<turn>user:a\nb<turn>assistant:c<turn>system:d<turn>assistant:");
}

TEST(Responses, ThoughtsTextAndCallsOfATurnAreOneMessage) {
  const auto model = TestModel();
  const auto json = ParseJson(R"({"model":"bytes","input":[{"role":"user","content":"Rome?"},
      {"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"Hm."}]},
      {"role":"assistant","content":"Looking."},
      {"type":"function_call","call_id":"c1","name":"f","arguments":"{\"a\":1}"},
      {"type":"function_call","call_id":"c2","name":"g","arguments":""},
      {"type":"function_call_output","call_id":"c2","output":"two"},
      {"type":"function_call_output","call_id":"c1","output":[{"type":"input_text","text":"one"}]}]})");
  const auto request = ParseResponsesRequest(*json, *model);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(Dump(request->prompt.messages),
            R"([{"role":"user","content":"Rome?"},{"role":"assistant","content":"Looking.",)"
            R"("reasoning_content":"Hm.","tool_calls":[)"
            R"({"id":"c1","type":"function","function":{"name":"f","arguments":{"a":1}}},)"
            R"({"id":"c2","type":"function","function":{"name":"g","arguments":{}}}]},)"
            R"({"role":"tool","content":"two","tool_call_id":"c2","name":"g"},)"
            R"({"role":"tool","content":"one","tool_call_id":"c1","name":"f"}])");
}

TEST(Responses, ErrorsNameTheFieldsOfThisApi) {
  const auto model = TestModel();
  const std::string user = R"("input":"hi",)";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("x":1)", "input"},
      {R"("input":[])", "input"},
      {R"("input":1)", "input"},
      {R"("input":[1])", "input.0"},
      {R"("input":[{"content":"a"}])", "input.0.role"},
      {R"("input":[{"role":"tool","content":"a"}])", "input.0.role"},
      {R"("input":[{"role":"user"}])", "input.0.content"},
      {R"("input":[{"role":"user","content":[{"type":"input_image"}]}])", "input.0.content.0.type"},
      {R"("input":[{"type":"web_search_call"}])", "input.0.type"},
      {R"("input":[{"type":"reasoning","encrypted_content":"x"}])", "input.0.encrypted_content"},
      {R"("input":[{"role":"user","content":"a"},{"type":"function_call","name":"f"}])", "input.1.call_id"},
      {R"("input":[{"type":"function_call","call_id":"c","name":"a b"}])", "input.0.name"},
      {R"("input":[{"type":"function_call","call_id":"c","name":"f","arguments":{}}])", "input.0.arguments"},
      {R"("input":[{"type":"function_call_output","call_id":"c","output":"x"}])", "input.0.call_id"},
      {R"("input":[{"type":"function_call_output","call_id":"c"}])", "input.0.output"},
      {user + R"("max_output_tokens":0)", "max_output_tokens"},
      {user + R"("max_output_tokens":100000)", "max_output_tokens"},
      {user + R"("max_tokens":5)", "max_tokens"},
      {user + R"("messages":[])", "messages"},
      {user + R"("n":2)", "n"},
      {user + R"("instructions":1)", "instructions"},
      {user + R"("temperature":101)", "temperature"},
      {user + R"("previous_response_id":"resp_1")", "previous_response_id"},
      {user + R"("conversation":"c")", "conversation"},
      {user + R"("background":true)", "background"},
      {user + R"("truncation":"auto")", "truncation"},
      {user + R"("include":["message.output_text.logprobs"])", "include.0"},
      {user + R"("tools":[{"type":"web_search"}])", "tools.0.type"},
      {user + R"("tools":[{"type":"custom"}])", "tools.0.name"},
      {user + R"("tools":[{"type":"custom","name":"x","format":{"type":"yaml"}}])", "tools.0.format.type"},
      {user + R"("tools":[{"type":"custom","name":"x","format":{"type":"grammar","syntax":"lark"}}])",
       "tools.0.format.definition"},
      {user + R"("tools":[{"type":"custom","name":"x","format":{"type":"grammar","syntax":"bnf","definition":"a"}}])",
       "tools.0.format.syntax"},
      {user + R"("tools":[{"type":"function","name":"f"},{"type":"custom","name":"x",
                 "format":{"type":"grammar","syntax":"lark","definition":"start: a"}}])",
       "tools.1.format.definition"},
      {user + R"("tools":[{"type":"namespace","name":"n"}])", "tools.0.tools"},
      {user + R"("tools":[{"type":"namespace","tools":[]}])", "tools.0.name"},
      {user + R"("tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"},{"type":"custom"}]}])",
       "tools.0.tools.1.type"},
      {user + R"("tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"},
                 {"type":"function","name":"g h"}]}])",
       "tools.0.tools.1.name"},
      {user + R"("tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]},
                 {"type":"function","name":"g","parameters":1}])",
       "tools.1.parameters"},
      {R"("input":[{"type":"custom_tool_call","call_id":"c","name":"x"}])", "input.0.input"},
      {user + R"("tools":[{"type":"function","name":""}])", "tools.0.name"},
      {user + R"("tools":[{"type":"function","name":"f","parameters":[]}])", "tools.0.parameters"},
      {user + R"("tools":[{"type":"function","name":"f"}],"tool_choice":{"type":"function","name":"g"})",
       "tool_choice.name"},
      {user + R"("text":{"format":{"type":"json_schema","schema":{"not":{}}}})", "text.format.schema.not"},
      {user + R"("text":{"format":{"type":"yaml"}})", "text.format.type"},
      {user + R"("text":{"verbosity":1})", "text.verbosity"},
      {user + R"("reasoning":{"effort":"enormous"})", "reasoning.effort"},
      {user + R"("reasoning":{"summary":"long"})", "reasoning.summary"},
      {absl::StrCat(R"("input":")", std::string(9000, 'x'), "\""), "input"},
  };
  for (const auto& [fields, param] : cases) {
    SCOPED_TRACE(fields);
    ExpectAbout(param, Ask(*model, fields).status());
  }
  for (const char* harmless : {R"("store":true)", R"("truncation":"disabled")", R"("previous_response_id":null)",
                               R"("include":["reasoning.encrypted_content"])", R"("top_k":5,"stop":["x"])"})
    EXPECT_TRUE(Ask(*model, user + harmless).ok()) << harmless << Ask(*model, user + harmless).status();
}

// ---- answers ----

ResponseSpec Spec(bool stream) {
  return WithBlocks(Ask(*TestModel(), R"("input":"hi","temperature":0.5)")->spec, stream);
}

std::vector<Json> Stream(std::string_view text, size_t piece, requests::FinishReason reason) {
  const std::vector<Json> events = EventsOf(Spec(/*stream=*/true), text, piece, reason);
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i]["sequence_number"], i);
  return events;
}

Json Whole(std::string_view text, requests::FinishReason reason = requests::FinishReason::kStop) {
  return BodyOf(Spec(/*stream=*/false), text, reason);
}

TEST(Responses, AnAnswerIsItemsInTheirOrder) {
  const Json body = Whole(kThoughtTextAndCall);
  EXPECT_EQ(body["id"], "resp_1");
  EXPECT_EQ(body["status"], "completed");
  EXPECT_EQ(body["temperature"], 0.5);
  EXPECT_EQ(body["store"], false);
  const std::string id = CallId(Spec(false).answer, 0, 0);
  EXPECT_EQ(Dump(body["output"]),
            absl::StrCat(R"([{"id":"rs_1_0","status":"completed","type":"reasoning","summary":[],)"
                         R"("content":[{"type":"reasoning_text","text":"Hm."}]},)"
                         R"({"id":"msg_1_1","status":"completed","type":"message","role":"assistant",)"
                         R"("content":[{"type":"output_text","text":"Looking.","annotations":[],"logprobs":[]}]},)"
                         R"({"id":"fc_1_2","status":"completed","type":"function_call","call_id":")",
                         id, R"(","name":"f","arguments":"{\"a\": 1}"}])"));
  const int tokens = static_cast<int>(std::string_view(kThoughtTextAndCall).size()) + 1;
  EXPECT_EQ(body["usage"]["input_tokens"], 3);
  EXPECT_EQ(body["usage"]["input_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(body["usage"]["output_tokens"], tokens);
  EXPECT_GT(body["usage"]["output_tokens_details"]["reasoning_tokens"], 3);
  EXPECT_EQ(body["usage"]["total_tokens"], tokens + 3);
}

TEST(Responses, AStreamHasTheEventsOfTheApi) {
  std::vector<std::string> types;
  for (const Json& event : Stream(kThoughtTextAndCall, 1000, requests::FinishReason::kStop))
    types.push_back(event["type"].get<std::string>().substr(std::string("response.").size()));
  EXPECT_THAT(types,
              ElementsAre("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
                          "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added",
                          "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
                          "output_item.done", "output_item.added", "function_call_arguments.delta",
                          "function_call_arguments.done", "output_item.done", "completed"));
}

TEST(Responses, AStreamAddsUpToTheBodyHoweverItIsCut) {
  for (const auto reason : {requests::FinishReason::kStop, requests::FinishReason::kLength}) {
    const Json body = Whole(kThoughtTextAndCall, reason);
    for (size_t piece = 1; piece < 20; ++piece) {
      std::string text, thought, arguments;
      Json items = Json::array();
      const std::vector<Json> events = Stream(kThoughtTextAndCall, piece, reason);
      for (const Json& event : events) {
        if (event["type"] == "response.output_text.delta") text += event["delta"];
        if (event["type"] == "response.reasoning_text.delta") thought += event["delta"];
        if (event["type"] == "response.function_call_arguments.delta") arguments += event["delta"];
        if (event["type"] == "response.output_item.done") items.push_back(event["item"]);
      }
      EXPECT_EQ(text, "Looking.");
      EXPECT_EQ(thought, "Hm.");
      EXPECT_EQ(arguments, "{\"a\": 1}");
      EXPECT_EQ(Dump(items), Dump(body["output"])) << piece;
      EXPECT_EQ(Dump(events.back()["response"]["output"]), Dump(body["output"]));
      EXPECT_EQ(Dump(events.back()["response"]["usage"]), Dump(body["usage"]));
    }
  }
}

TEST(Responses, WhatTheLengthEndsIsIncomplete) {
  const Json body = Whole("Once upon", requests::FinishReason::kLength);
  EXPECT_EQ(body["status"], "incomplete");
  EXPECT_EQ(body["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(body["output"][0]["status"], "incomplete");
  EXPECT_EQ(Stream("Once upon", 3, requests::FinishReason::kLength).back()["type"], "response.incomplete");
}

constexpr char kClientTools[] =
    R"("input":"hi","tools":[{"type":"custom","name":"patch","description":"Changes files."},
       {"type":"namespace","name":"mail","description":"Letters.","tools":[
           {"type":"function","name":"send","description":"Sends one.","parameters":{"type":"object"}}]}])";

TEST(Responses, CustomToolsAndNamespacesAreFunctionsToTheModel) {
  const auto model = TestModel();
  const auto json = ParseJson(absl::StrCat(R"({"model":"bytes",)", kClientTools, "}"));
  const auto request = ParseResponsesRequest(*json, *model);
  ASSERT_TRUE(request.ok()) << request.status();
  const Json& tools = request->prompt.tools;
  EXPECT_EQ(tools[0]["function"]["name"], "patch");
  EXPECT_EQ(Dump(tools[0]["function"]["parameters"]["required"]), R"(["input"])");
  EXPECT_EQ(tools[1]["function"]["name"], "mail__send");
  EXPECT_EQ(tools[1]["function"]["description"], "Letters.\nSends one.");
  for (const char* known :
       {R"({"type":"custom","name":"patch"})", R"({"type":"function","namespace":"mail","name":"send"})"})
    ExpectAbout("tool_choice",
                Ask(*model, absl::StrCat(kClientTools, R"(,"tool_choice":)", known)).status());  // no grammars here
  ExpectAbout("tool_choice.name",
              Ask(*model, absl::StrCat(kClientTools, R"(,"tool_choice":{"type":"function","name":"send"})")).status());
}

TEST(Responses, CallsOfCustomToolsAndOfNamespacesAreReadBack) {
  const auto model = TestModel();
  const auto json = ParseJson(R"({"model":"bytes","input":[{"role":"user","content":"go"},
      {"type":"custom_tool_call","call_id":"c1","name":"patch","input":"*** a\n\"b\""},
      {"type":"custom_tool_call_output","call_id":"c1","output":"done"},
      {"type":"function_call","call_id":"c2","namespace":"mail","name":"send","arguments":"{}"},
      {"type":"function_call_output","call_id":"c2","output":"sent"}]})");
  const auto request = ParseResponsesRequest(*json, *model);
  ASSERT_TRUE(request.ok()) << request.status();
  const Json& messages = request->prompt.messages;
  EXPECT_EQ(messages[1]["tool_calls"][0]["function"]["arguments"]["input"], "*** a\n\"b\"");
  EXPECT_EQ(messages[2]["content"], "done");
  EXPECT_EQ(messages[3]["tool_calls"][0]["function"]["name"], "mail__send");
  EXPECT_EQ(messages[4]["content"], "sent");
}

TEST(Responses, AnswersCallCustomToolsAndNamespacesAsTheClientNamedThem) {
  const std::string text =
      "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"*** a\\n\\u00e4\"}}\n</tool_call>\n"
      "<tool_call>\n{\"name\": \"mail__send\", \"arguments\": {}}\n</tool_call>\n"
      "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"text\": 1}}\n</tool_call>";
  const auto spec = [](bool stream) { return WithBlocks(Ask(*TestModel(), kClientTools)->spec, stream); };
  const Json body = BodyOf(spec(false), text, requests::FinishReason::kStop);
  ASSERT_EQ(body["output"].size(), 3u) << body["output"];
  const Json& patch = body["output"][0];
  EXPECT_EQ(patch["id"], "ctc_1_0");
  EXPECT_EQ(patch["type"], "custom_tool_call");
  EXPECT_EQ(patch["name"], "patch");
  EXPECT_EQ(patch["input"], "*** a\n\u00e4");
  EXPECT_FALSE(patch.contains("arguments"));
  EXPECT_EQ(body["output"][1]["type"], "function_call");
  EXPECT_EQ(body["output"][1]["namespace"], "mail");
  EXPECT_EQ(body["output"][1]["name"], "send");
  EXPECT_EQ(body["output"][2]["input"], "{\"text\": 1}");  // not lost
  for (size_t piece = 1; piece < 30; ++piece) {
    std::string delta, done;
    Json items = Json::array();
    for (const Json& event : EventsOf(spec(true), text, piece, requests::FinishReason::kStop)) {
      const bool first = event.value("output_index", -1) == 0;
      if (first && event["type"] == "response.custom_tool_call_input.delta") delta += event["delta"];
      if (first && event["type"] == "response.custom_tool_call_input.done") done = event["input"];
      if (event["type"] == "response.output_item.done") items.push_back(event["item"]);
    }
    EXPECT_EQ(delta, "*** a\n\u00e4") << piece;
    EXPECT_EQ(done, delta);
    EXPECT_EQ(Dump(items), Dump(body["output"])) << piece;
  }
}

TEST(Responses, AStreamThatFailsSaysSo) {
  const Json last = Stream("Once upon", 3, requests::FinishReason::kError).back();
  EXPECT_EQ(last["type"], "response.failed");
  EXPECT_EQ(last["response"]["status"], "failed");
  EXPECT_EQ(last["response"]["error"]["code"], "server_error");
  EXPECT_EQ(last["response"]["output"][0]["content"][0]["text"], "Once upon");
}

}  // namespace
}  // namespace dovetail::server::test
