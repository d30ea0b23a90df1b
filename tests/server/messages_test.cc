// Anthropic's Messages API, from the fields of a request to the frames of its answer. No sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/openai/api_error.h"
#include "server/openai/messages_answer.h"
#include "server/openai/prepare.h"
#include "server/openai/small_responses.h"
#include "tests/server/block_answers.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<ChatRequest> Parse(const ServedModel& model, const std::string& fields) {
  DT_ASSIGN_OR_RETURN(const Json json, ParseJson(absl::StrCat(R"({"model":"bytes","max_tokens":500,)", fields, "}")));
  return ParseMessagesRequest(json, model);
}

absl::StatusOr<PreparedGeneration> Ask(const ServedModel& model, const std::string& fields) {
  DT_ASSIGN_OR_RETURN(const ChatRequest request, Parse(model, fields));
  return Prepare(request, model, {.id = "1", .id_seed = 7});
}

std::string PromptOf(const ServedModel& model, const std::string& fields) {
  return test::PromptOf(model, Ask(model, fields));
}

constexpr char kUser[] = R"("messages":[{"role":"user","content":"hi"}])";

TEST(Messages, BecomeAConversation) {
  const auto model = TestModel();
  EXPECT_EQ(PromptOf(*model, absl::StrCat(R"("system":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}},
                                             {"type":"text","text":"b"}],)",
                                          kUser)),
            "<turn>system:a\nb<turn>user:hi<turn>assistant:");
  EXPECT_EQ(PromptOf(*model, R"("messages":[{"role":"user","content":[{"type":"text","text":"a"}]},
                                {"role":"assistant","content":"The"}])"),
            "<turn>user:a<turn>assistant:The");
}

TEST(Messages, WhatClaudeCodeSendsIsRead) {
  const auto model = TestModel();
  const std::string fields = R"("system":[{"type":"text","text":"Be brief.","cache_control":{"type":"ephemeral"}}],
      "messages":[{"role":"user","content":[{"type":"text","text":"hi"}]},
                  {"role":"system","content":"The shell is bash."},
                  {"role":"system","content":[{"type":"text","text":"It is Saturday."}]}],
      "context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]},
      "thinking":{"type":"adaptive","display":"omitted"},"output_config":{"effort":"max"})";
  EXPECT_EQ(PromptOf(*model, fields),
            "<turn>system:Be brief.<turn>user:hi<turn>system:The shell is bash.<turn>system:It is Saturday."
            "<turn>assistant:");
  EXPECT_TRUE(Ask(*model, absl::StrCat(kUser, R"(,"context_management":{})")).ok());
}

// As Claude Code finds tools by a search and has the system add and remove others in the midst of a conversation.
TEST(Messages, ToolsThatAreFoundAddedAndRemovedAreThoseThatMayBeCalled) {
  const auto model = TestModel();
  const std::string begin = R"("tools":[{"name":"search","input_schema":{"type":"object"}},
      {"name":"late","input_schema":{"type":"object"},"defer_loading":true},
      {"name":"old","input_schema":{"type":"object"}}],"messages":[{"role":"user","content":"hi"})";
  const auto names = [&](const std::string& more) {
    const auto request = Parse(*model, absl::StrCat(begin, more, "]"));
    EXPECT_TRUE(request.ok()) << request.status();
    std::vector<std::string> all;
    if (request.ok())
      for (const Tool& tool : request->tools.tools) all.push_back(tool.name);
    return all;
  };
  EXPECT_THAT(names(""), ElementsAre("search", "late", "old"));
  const std::string found =
      R"(,{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"search","input":{}}]},
      {"role":"user","content":[{"type":"tool_result","tool_use_id":"c",
         "content":[{"type":"tool_reference","tool_name":"late"}]}]})";
  EXPECT_THAT(names(found), ElementsAre("search", "late", "old"));
  EXPECT_THAT(PromptOf(*model, absl::StrCat(begin, found, "]")), HasSubstr("The tool late may be called now."));
  const auto system = [](const std::string& blocks) {
    return absl::StrCat(R"(,{"role":"system","content":[)", blocks, "]}");
  };
  const std::string added = R"({"type":"tool_addition","tool":{"type":"tool_definition",
      "definition":{"name":"mail","description":"d","input_schema":{"type":"object"}}}})";
  const std::string removed = R"({"type":"tool_removal","tool":{"type":"tool_reference","name":"old"}})";
  const std::string back = R"({"type":"tool_addition","tool":{"type":"tool_reference","name":"old"}})";
  EXPECT_THAT(names(system(added + "," + removed)), ElementsAre("search", "late", "mail"));
  EXPECT_THAT(names(system(removed) + system(back)), ElementsAre("search", "late", "old"));
  EXPECT_THAT(
      names(system(added) + system(R"({"type":"tool_removal","tool":{"type":"tool_reference","name":"mail"}})")),
      ElementsAre("search", "late", "old"));
  EXPECT_THAT(PromptOf(*model, absl::StrCat(begin, system(R"({"type":"text","text":"So:"},)" + removed), "]")),
              HasSubstr("<turn>system:So:\nThe tool old may not be called any more."));
  const auto param = [&](const std::string& blocks) {
    return ToApiError(Parse(*model, absl::StrCat(begin, system(blocks), "]")).status()).param.value_or("none");
  };
  EXPECT_EQ(param(R"({"type":"tool_addition"})"), "messages.1.content.0.tool");
  EXPECT_EQ(param(R"({"type":"tool_removal","tool":{"type":"tool_definition"}})"), "messages.1.content.0.tool.type");
  EXPECT_EQ(param(R"({"type":"tool_addition","tool":{"type":"tool_definition","definition":{"name":"a b"}}})"),
            "messages.1.content.0.tool.definition.name");
  EXPECT_EQ(param(R"({"type":"tool_addition","tool":{"type":"tool_reference"}})"), "messages.1.content.0.tool.name");
}

TEST(Messages, BlocksOfATurnAreOneMessageAndResultsAreTheirOwn) {
  const auto model = TestModel();
  const auto request = Parse(*model, R"("messages":[{"role":"user","content":"Rome?"},
      {"role":"assistant","content":[{"type":"thinking","thinking":"Hm.","signature":""},
         {"type":"text","text":"Looking."},{"type":"tool_use","id":"c1","name":"f","input":{"a":1}},
         {"type":"tool_use","id":"c2","name":"g","input":{}}]},
      {"role":"user","content":[{"type":"tool_result","tool_use_id":"c2","content":"two"},
         {"type":"tool_result","tool_use_id":"c1","is_error":true,"content":[{"type":"text","text":"one"}]},
         {"type":"text","text":"And?"}]}])");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(Dump(request->prompt.messages),
            R"([{"role":"user","content":"Rome?"},{"role":"assistant","content":"Looking.",)"
            R"("reasoning_content":"Hm.","tool_calls":[)"
            R"({"id":"c1","type":"function","function":{"name":"f","arguments":{"a":1}}},)"
            R"({"id":"c2","type":"function","function":{"name":"g","arguments":{}}}]},)"
            R"({"role":"tool","content":"two","tool_call_id":"c2","name":"g"},)"
            R"({"role":"tool","content":"one","tool_call_id":"c1","name":"f"},{"role":"user","content":"And?"}])");
  EXPECT_FALSE(request->prompt.continue_final_message);
}

TEST(Messages, DocumentsOfTextAreText) {
  const auto model = TestModel();
  const auto request = Parse(*model, R"("messages":[{"role":"user","content":[
      {"type":"document","source":{"type":"text","media_type":"text/plain","data":"Green."},"title":"Sky","context":"",
       "citations":{"enabled":false},"cache_control":{"type":"ephemeral"}},
      {"type":"document","source":{"type":"content","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
       "context":"Letters"},
      {"type":"text","text":"Which?"}]},
      {"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]},
      {"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":[
         {"type":"document","source":{"type":"content","content":"found"}}]}]}])");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->prompt.messages[0]["content"], "Sky\nGreen.\nLetters\na\nb\nWhich?");
  EXPECT_EQ(request->prompt.messages[2]["content"], "found");
}

TEST(Messages, DocumentsOfNoTextAreNamed) {
  const auto model = TestModel();
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("source":{"type":"base64","media_type":"application/pdf","data":"aa"})", "source.type"},
      {R"("source":{"type":"url","url":"http://a"})", "source.type"},
      {R"("source":{"type":"file","file_id":"f"})", "source.type"},
      {R"("source":{"type":"text","media_type":"text/html","data":"a"})", "source.media_type"},
      {R"("source":{"type":"text","data":1})", "source.data"},
      {R"("source":{"type":"content","content":[{"type":"image"}]})", "source.content.0.type"},
      {R"("source":{"type":"content"})", "source.content"},
      {R"("source":{})", "source.type"},
      {R"("title":"a")", "source"},
      {R"("source":{"type":"text","data":"a"},"title":1)", "title"},
      {R"("source":{"type":"text","data":"a"},"citations":{"enabled":true})", "citations.enabled"},
  };
  for (const auto& [fields, at] : cases) {
    SCOPED_TRACE(fields);
    const std::string document = absl::StrCat(R"({"type":"document",)", fields, "}");
    ExpectAbout(absl::StrCat("messages.0.content.0.", at),
                Ask(*model, absl::StrCat(R"("messages":[{"role":"user","content":[)", document, "]}]")).status());
    ExpectAbout(absl::StrCat("messages.0.content.0.content.0.", at),
                Ask(*model, absl::StrCat(R"("messages":[{"role":"user","content":[{"type":"tool_result",)",
                                         R"("tool_use_id":"c","content":[)", document, "]}]}]"))
                    .status());
  }
}

TEST(Messages, FieldsMeanWhatTheyMeanInChats) {
  const auto model = TestModel();
  const auto request = Parse(*model, absl::StrCat(kUser, R"(,"stop_sequences":["x"],"top_k":3,
      "tools":[{"name":"f","description":"d","input_schema":{"type":"object"}}],
      "tool_choice":{"type":"auto","disable_parallel_tool_use":true},
      "thinking":{"type":"enabled","budget_tokens":1024})"));
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(request->fields.stop, ElementsAre("x"));
  EXPECT_EQ(request->fields.max_tokens, 500);
  EXPECT_EQ(request->fields.top_k, 3);
  EXPECT_FALSE(request->tools.parallel);
  EXPECT_EQ(Dump(request->prompt.tools[0]["function"]),
            R"({"name":"f","description":"d","parameters":{"type":"object"}})");
  EXPECT_EQ(request->prompt.template_kwargs["enable_thinking"], true);
}

TEST(Messages, ErrorsNameTheFieldsOfThisApi) {
  const auto model = TestModel();
  const std::string user = std::string(kUser) + ",";
  const auto block = [](const std::string& role, const std::string& one) {
    return absl::StrCat(R"("messages":[{"role":")", role, R"(","content":[)", one, "]}]");
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("x":1)", "messages"},
      {R"("messages":[])", "messages"},
      {R"("messages":[1])", "messages.0"},
      {R"("messages":[{"role":"system","content":"a"}])", "messages.0.role"},
      {R"("messages":[{"role":"user","content":"a"},{"role":"tool","content":"a"}])", "messages.1.role"},
      {R"("messages":[{"role":"user","content":"a"},{"role":"system","content":[{"type":"tool_result"}]}])",
       "messages.1.content.0.type"},
      {R"("messages":[{"role":"user"}])", "messages.0.content"},
      {block("user", "1"), "messages.0.content.0"},
      {block("user", R"({"type":"image"})"), "messages.0.content.0.type"},
      {block("user", R"({"type":"tool_use"})"), "messages.0.content.0.type"},
      {block("user", R"({"type":"text"})"), "messages.0.content.0.text"},
      {block("user", R"({"type":"tool_result","tool_use_id":"c"})"), "messages.0.content.0.tool_use_id"},
      {block("user", R"({"type":"tool_result","tool_use_id":"c","content":[{"type":"image"}]})"),
       "messages.0.content.0.content.0.type"},
      {block("assistant", R"({"type":"redacted_thinking"})"), "messages.0.content.0.type"},
      {block("assistant", R"({"type":"tool_use","name":"f","input":{}})"), "messages.0.content.0.id"},
      {block("assistant", R"({"type":"tool_use","id":"c","name":"a b","input":{}})"), "messages.0.content.0.name"},
      {block("assistant", R"({"type":"tool_use","id":"c","name":"f","input":1})"), "messages.0.content.0.input"},
      {user + R"("system":1)", "system"},
      {user + R"("stop_sequences":[1])", "stop_sequences.0"},
      {user + R"("stop":"x")", "stop"},
      {user + R"("n":2)", "n"},
      {user + R"("temperature":101)", "temperature"},
      {user + R"("mcp_servers":[{}])", "mcp_servers"},
      {user + R"("container":"c")", "container"},
      {user + R"("thinking":{"type":"maybe"})", "thinking.type"},
      {user + R"("tools":[{"type":"bash_20250124","name":"bash"}])", "tools.0.type"},
      {user + R"("tools":[{"name":"","input_schema":{}}])", "tools.0.name"},
      {user + R"("tools":[{"name":"f","input_schema":[]}])", "tools.0.input_schema"},
      {user + R"("tools":[{"name":"f"}],"tool_choice":{"type":"tool","name":"g"})", "tool_choice.name"},
      {user + R"("tools":[{"name":"f"}],"tool_choice":{"type":"required"})", "tool_choice.type"},
      {user + R"("output_config":{"format":{"type":"json_schema","schema":{"not":{}}}})",
       "output_config.format.schema.not"},
      {user + R"("output_config":{"effort":"enormous"})", "output_config.effort"},
      {user + R"("context_management":1)", "context_management"},
      {user + R"("context_management":{"edits":{}})", "context_management.edits"},
      {user + R"("context_management":{"edits":[{"type":"clear_tool_uses_20250919"}]})", "context_management.edits.0"},
      {user + R"("context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"},
                 {"type":"clear_thinking_20251015","keep":{"type":"thinking_turns","value":1}}]})",
       "context_management.edits.1"},
  };
  for (const auto& [fields, param] : cases) {
    SCOPED_TRACE(fields);
    ExpectAbout(param, Ask(*model, fields).status());
  }
  const Json unlimited = Json::parse(absl::StrCat("{", kUser, "}"));
  EXPECT_EQ(ToApiError(ParseMessagesRequest(unlimited, *model).status()).param.value_or("none"), "max_tokens");
}

TEST(Messages, TokensAreCountedAsTheyAreUsed) {
  const auto model = TestModel();
  const auto json = ParseJson(absl::StrCat(R"({"model":"bytes",)", kUser, "}"));
  const auto request = ParseCountTokensRequest(*json, *model);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(*CountTokensBody(*request, *model),
            absl::StrCat(R"({"input_tokens":)", Ask(*model, kUser)->requests[0].prompt.size(), "}"));
}

TEST(Messages, ErrorsHaveTheEnvelopeOfTheApi) {
  const auto body = [](const absl::Status& status) { return MessagesErrorBody(ToApiError(status)); };
  EXPECT_EQ(body(BadField("system", "x")),
            R"({"type":"error","error":{"type":"invalid_request_error","message":"system: x"}})");
  EXPECT_THAT(body(UnknownModel("m")), HasSubstr("not_found_error"));
  EXPECT_THAT(body(absl::AbortedError("")), HasSubstr("rate_limit_error"));
  EXPECT_THAT(body(absl::ResourceExhaustedError("")), HasSubstr("overloaded_error"));
  EXPECT_THAT(body(absl::InternalError("/secret")), HasSubstr("api_error"));
  const auto model = TestModel();
  const std::string large = absl::StrCat(R"("messages":[{"role":"user","content":")", std::string(9000, 'x'), "\"}]");
  EXPECT_THAT(body(Ask(*model, large).status()), HasSubstr(R"("message":"prompt is too long: )"));
}

// ---- answers ----

ResponseSpec Spec(bool stream, const std::string& fields = "") {
  return WithBlocks(Ask(*TestModel(), absl::StrCat(kUser, fields))->spec, stream);
}

std::vector<Json> Stream(std::string_view text, size_t piece, requests::FinishReason reason) {
  return EventsOf(Spec(/*stream=*/true), text, piece, reason);
}

Json Whole(std::string_view text, requests::FinishReason reason = requests::FinishReason::kStop,
           const std::string& fields = "") {
  return BodyOf(Spec(/*stream=*/false, fields), text, reason);
}

TEST(Messages, AnAnswerIsBlocksInTheirOrder) {
  const Json body = Whole(kThoughtTextAndCall);
  EXPECT_EQ(body["id"], "msg_1");
  EXPECT_EQ(body["stop_reason"], "tool_use");
  EXPECT_EQ(Dump(body["content"]),
            absl::StrCat(R"([{"type":"thinking","thinking":"Hm.","signature":""},{"type":"text","text":"Looking."},)",
                         R"({"type":"tool_use","id":")", CallId(Spec(false).answer, 0, 0),
                         R"(","name":"f","input":{"a":1}}])"));
  EXPECT_EQ(Dump(body["usage"]),
            absl::StrCat(R"({"input_tokens":1,"cache_creation_input_tokens":0,)",
                         R"("cache_read_input_tokens":2,"output_tokens":)", sizeof(kThoughtTextAndCall), "}"));
}

TEST(Messages, TheReasonOfTheEndIsTold) {
  EXPECT_EQ(Whole("Once")["stop_reason"], "end_turn");
  EXPECT_EQ(Whole("Once", requests::FinishReason::kLength)["stop_reason"], "max_tokens");
  const Json stopped = Whole("Once upon", requests::FinishReason::kStop, R"(,"stop_sequences":["up"])");
  EXPECT_EQ(stopped["stop_reason"], "stop_sequence");
  EXPECT_EQ(stopped["stop_sequence"], "up");
  EXPECT_EQ(stopped["content"][0]["text"], "Once ");
}

TEST(Messages, AStreamHasTheEventsOfTheApi) {
  std::vector<std::string> types;
  for (const Json& event : Stream(kThoughtTextAndCall, 1000, requests::FinishReason::kStop))
    types.push_back(event["type"]);
  const std::string begin = "content_block_start", delta = "content_block_delta", end = "content_block_stop";
  EXPECT_THAT(types, ElementsAre("message_start", begin, delta, end, begin, delta, end, begin, delta, end,
                                 "message_delta", "message_stop"));
}

TEST(Messages, AStreamAddsUpToTheBodyHoweverItIsCut) {
  for (const auto reason : {requests::FinishReason::kStop, requests::FinishReason::kLength}) {
    const Json body = Whole(kThoughtTextAndCall, reason);
    for (size_t piece = 1; piece < 20; ++piece) {
      const std::vector<Json> events = Stream(kThoughtTextAndCall, piece, reason);
      Json content = Json::array();
      std::string input;
      for (const Json& event : events) {
        if (event["type"] == "content_block_start") content.push_back(event["content_block"]);
        if (event["type"] != "content_block_delta") continue;
        EXPECT_EQ(event["index"], content.size() - 1);
        const Json& delta = event["delta"];
        for (const char* field : {"text", "thinking"})
          if (delta.contains(field))
            content.back()[field] = content.back()[field].get<std::string>() + delta[field].get<std::string>();
        if (delta["type"] == "input_json_delta") input += delta["partial_json"];
      }
      content.back()["input"] = Json::parse(input);
      EXPECT_EQ(Dump(content), Dump(body["content"])) << piece;
      const Json& last = events[events.size() - 2];
      EXPECT_EQ(last["delta"]["stop_reason"], body["stop_reason"]);
      EXPECT_EQ(Dump(last["usage"]), Dump(body["usage"]));
    }
  }
}

TEST(Messages, AStreamThatFailsEndsWithAnError) {
  const Json last = Stream("Once upon", 3, requests::FinishReason::kError).back();
  EXPECT_EQ(last["type"], "error");
  EXPECT_EQ(last["error"]["type"], "api_error");
}

}  // namespace
}  // namespace dovetail::server::test
