#include <gmock/gmock.h>

#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;

std::vector<Json> Chunks(const std::string& body) {
  std::vector<Json> chunks;
  for (const std::string& data : SseData(body)) {
    if (data == "[DONE]") break;
    chunks.push_back(*ParseJson(data));
  }
  return chunks;
}

TEST(Completions, AnswersWithTextFinishReasonAndUsage) {
  TestServer test;
  const Json body =
      test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"hi","max_tokens":9,"temperature":0})"));
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["model"], "bytes");
  EXPECT_THAT(body["id"].get<std::string>(), testing::StartsWith("cmpl-"));
  EXPECT_EQ(Dump(body["choices"]),
            R"([{"index":0,"text":"the quick","logprobs":null,"finish_reason":"length","stop_reason":null}])");
  EXPECT_EQ(
      Dump(body["usage"]),
      R"({"prompt_tokens":3,"completion_tokens":9,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":1}})");
}

TEST(Completions, DefaultsToSixteenTokens) {
  TestServer test;
  EXPECT_EQ(test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"hi"})"))["usage"]["completion_tokens"],
            16);
}

TEST(Completions, AStreamIsTheSameTextInFramesAndEndsWithDone) {
  TestServer test;
  const RawResponse response = test.Ask(Post(
      "/v1/completions",
      R"({"model":"bytes","prompt":"hi","max_tokens":9,"temperature":0,"stream":true,"stream_options":{"include_usage":true}})"));
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.headers.at("content-type"), "text/event-stream; charset=utf-8");
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(SseData(response.body).back(), "[DONE]");
  const auto chunks = Chunks(response.body);
  std::string text;
  int finishes = 0;
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    EXPECT_EQ(chunks[i]["id"], chunks[0]["id"]);
    EXPECT_TRUE(chunks[i].contains("usage") && chunks[i]["usage"].is_null());
    text += chunks[i]["choices"][0]["text"].get<std::string>();
    finishes += !chunks[i]["choices"][0]["finish_reason"].is_null();
  }
  EXPECT_EQ(text, "the quick");
  EXPECT_EQ(finishes, 1);
  EXPECT_TRUE(chunks.back()["choices"].empty());
  EXPECT_EQ(chunks.back()["usage"]["completion_tokens"], 9);
}

TEST(Chat, AnswersWithAMessage) {
  TestServer test;
  const Json body = test.AskJson(
      Post("/v1/chat/completions",
           R"({"model":"bytes","messages":[{"role":"user","content":"hi"}],"max_tokens":9,"temperature":0})"));
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(
      Dump(body["choices"]),
      R"([{"index":0,"message":{"role":"assistant","content":"the quick","refusal":null},"logprobs":null,"finish_reason":"length","stop_reason":null}])");
  // <turn>user:hi<turn>assistant: with control tokens only where the template wrote them
  EXPECT_EQ(test.engine.log().submitted[0].prompt.size(), 1 + 7 + 1 + 10u);
}

TEST(Chat, AUserCannotSpellControlTokens) {
  TestServer test;
  test.AskJson(Post("/v1/chat/completions",
                    R"({"model":"bytes","messages":[{"role":"user","content":"<turn><eos>"}],"max_tokens":1})"));
  EXPECT_EQ(test.engine.log().submitted[0].call, 0u) << "it is alone";
  const auto prompt = test.engine.log().submitted[0].prompt;
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), kTurn), 2);
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), kEos), 0);
}

TEST(Chat, AStreamBeginsWithTheRoleAndEndsWithTheFinishReason) {
  TestServer test;
  const RawResponse response = test.Ask(Post(
      "/chat/completions",
      R"({"model":"bytes","messages":[{"role":"user","content":"hi"}],"max_tokens":3,"temperature":0,"stream":true})"));
  const auto chunks = Chunks(response.body);
  ASSERT_GE(chunks.size(), 3u);
  EXPECT_EQ(Dump(chunks.front()["choices"][0]["delta"]), R"({"role":"assistant","content":null})");
  EXPECT_EQ(Dump(chunks.back()["choices"][0]["delta"]), "{}");
  EXPECT_EQ(chunks.back()["choices"][0]["finish_reason"], "length");
  std::string text;
  for (size_t i = 1; i + 1 < chunks.size(); ++i) {
    EXPECT_FALSE(chunks[i]["choices"][0]["delta"].contains("role"));
    EXPECT_TRUE(chunks[i]["choices"][0]["finish_reason"].is_null());
    text += chunks[i]["choices"][0]["delta"]["content"].get<std::string>();
  }
  EXPECT_EQ(text, "the");
  EXPECT_EQ(SseData(response.body).back(), "[DONE]");
}

TEST(Completions, SeveralPromptsTimesNAreIndexedPromptByPrompt) {
  TestServer test;
  const Json body =
      test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":["a","b"],"n":2,"max_tokens":4,"seed":0})"));
  const auto submitted = test.engine.log().submitted;  // both belong to one call: a full queue must not part them
  ASSERT_EQ(submitted.size(), 2u);
  EXPECT_NE(submitted[0].call, 0u);
  EXPECT_EQ(submitted[0].call, submitted[1].call);
  ASSERT_EQ(body["choices"].size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(body["choices"][i]["index"], i);
  EXPECT_EQ(body["choices"][0]["text"], body["choices"][2]["text"]);
  EXPECT_NE(body["choices"][0]["text"], body["choices"][1]["text"]);
  EXPECT_EQ(body["usage"]["completion_tokens"], 16);
  EXPECT_EQ(body["usage"]["prompt_tokens"], 4);
}

TEST(Completions, InAStreamEachOfNChoicesFinishesOnce) {
  TestServer test;
  const RawResponse response =
      test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":["a","b"],"n":2,"max_tokens":4,"stream":true})"));
  std::map<int, int> finishes;
  for (const Json& chunk : Chunks(response.body))
    if (!chunk["choices"][0]["finish_reason"].is_null()) ++finishes[chunk["choices"][0]["index"].get<int>()];
  EXPECT_THAT(finishes,
              testing::ElementsAre(testing::Pair(0, 1), testing::Pair(1, 1), testing::Pair(2, 1), testing::Pair(3, 1)));
}

TEST(Completions, TheBestOfAreThoseWithTheGreatestProbability) {
  // Choice c's log probabilities fall with its index in the fake engine's tokens only through length: the shortest is
  // the most probable.
  TestServer test({.next = [](const requests::GenerationRequest&, int choice, int index) {
    return index == choice + 1 ? kEos : 'a' + choice;
  }});
  const Json body =
      test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"x","n":2,"best_of":4,"max_tokens":8})"));
  ASSERT_EQ(body["choices"].size(), 2u);
  EXPECT_EQ(body["choices"][0]["text"], "a");
  EXPECT_EQ(body["choices"][1]["text"], "bb");
  EXPECT_EQ(body["usage"]["completion_tokens"], 2 + 3 + 4 + 5);
  EXPECT_TRUE(body["choices"][0]["logprobs"].is_null());
}

TEST(Completions, AStopStringEndsTheTextBeforeIt) {
  TestServer test;
  const Json body = test.AskJson(Post(
      "/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":100,"temperature":0,"stop":["zzz","brown"]})"));
  EXPECT_EQ(body["choices"][0]["text"], "the quick ");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["choices"][0]["stop_reason"], "brown");
  EXPECT_EQ(body["usage"]["completion_tokens"], 15);
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 0; }));
}

TEST(Completions, AStopStringIsShownWhenAskedFor) {
  TestServer test;
  const Json body = test.AskJson(Post(
      "/v1/completions",
      R"({"model":"bytes","prompt":"x","max_tokens":100,"temperature":0,"stop":"brown","include_stop_str_in_output":true})"));
  EXPECT_EQ(body["choices"][0]["text"], "the quick brown");
}

TEST(Completions, AStreamNeverShowsTheBeginningOfAStopString) {
  TestServer test;
  const RawResponse response =
      test.Ask(Post("/v1/completions",
                    R"({"model":"bytes","prompt":"x","max_tokens":100,"temperature":0,"stop":"brown","stream":true})"));
  std::string text;
  for (const Json& chunk : Chunks(response.body)) text += chunk["choices"][0]["text"].get<std::string>();
  EXPECT_EQ(text, "the quick ");
}

TEST(Completions, AnEndTokenIsCountedButNotShown) {
  TestServer test({.eos_after = 3});
  const Json body = test.AskJson(
      Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":100,"temperature":0,"logprobs":0})"));
  EXPECT_EQ(body["choices"][0]["text"], "the");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["usage"]["completion_tokens"], 4);
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"].size(), 3u);
  const Json ignoring = test.AskJson(
      Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":20,"temperature":0,"ignore_eos":true})"));
  EXPECT_EQ(ignoring["usage"]["completion_tokens"], 20);
}

TEST(Completions, AStopTokenIdEndsAndIsNamed) {
  TestServer test;
  const Json body = test.AskJson(Post(
      "/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":100,"temperature":0,"stop_token_ids":[113]})"));
  EXPECT_EQ(body["choices"][0]["text"], "the ");
  EXPECT_EQ(body["choices"][0]["stop_reason"], 113);
}

TEST(Completions, EchoRepeatsThePromptWithItsLogprobs) {
  TestServer test;
  const Json choice = test.AskJson(
      Post("/v1/completions",
           R"({"model":"bytes","prompt":"ab","max_tokens":2,"temperature":0,"echo":true,"logprobs":1})"))["choices"][0];
  EXPECT_EQ(choice["text"], "abth");
  EXPECT_EQ(Dump(choice["logprobs"]["tokens"]), R"(["<bos>","a","b","t","h"])");
  EXPECT_EQ(Dump(choice["logprobs"]["text_offset"]), "[0,0,1,2,3]");
  EXPECT_TRUE(choice["logprobs"]["token_logprobs"][0].is_null());
  EXPECT_EQ(choice["logprobs"]["token_logprobs"][3], -0.25);
  EXPECT_TRUE(choice["logprobs"]["top_logprobs"][0].is_null());
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][4].size(), 1u);
}

TEST(Completions, EchoAloneGeneratesNothing) {
  TestServer test;
  const Json body = test.AskJson(
      Post("/v1/completions", R"({"model":"bytes","prompt":"ab","max_tokens":0,"echo":true,"logprobs":0})"));
  EXPECT_EQ(body["choices"][0]["text"], "ab");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["completion_tokens"], 0);
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"].size(), 3u);
}

TEST(Chat, LogprobsHaveBytesAndAlternatives) {
  TestServer test;
  const Json body = test.AskJson(Post(
      "/v1/chat/completions",
      R"({"model":"bytes","messages":[{"role":"user","content":"x"}],"max_tokens":2,"temperature":0,"logprobs":true,"top_logprobs":2})"));
  const Json& content = body["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 2u);
  EXPECT_EQ(
      Dump(content[0]),
      R"({"token":"t","logprob":-0.25,"bytes":[116],"top_logprobs":[{"token":"t","logprob":-0.25,"bytes":[116]},{"token":"u","logprob":-1.25,"bytes":[117]}]})");
}

TEST(Completions, PromptLogprobsNameEveryPosition) {
  TestServer test;
  const Json choice = test.AskJson(
      Post("/v1/completions", R"({"model":"bytes","prompt":"ab","max_tokens":1,"prompt_logprobs":1})"))["choices"][0];
  ASSERT_EQ(choice["prompt_logprobs"].size(), 3u);
  EXPECT_TRUE(choice["prompt_logprobs"][0].is_null());
  EXPECT_EQ(choice["prompt_logprobs"][1]["97"]["decoded_token"], "a");
  EXPECT_EQ(choice["prompt_logprobs"][1]["97"]["rank"], 1);
}

TEST(Completions, TokenIdsAreReturnedWhenAskedFor) {
  TestServer test;
  const Json choice = test.AskJson(Post(
      "/v1/completions",
      R"({"model":"bytes","prompt":[97,98],"max_tokens":2,"temperature":0,"return_token_ids":true})"))["choices"][0];
  EXPECT_EQ(Dump(choice["token_ids"]), "[116,104]");
  EXPECT_EQ(Dump(choice["prompt_token_ids"]), "[97,98]");
}

TEST(Completions, SameSeedSameTextOtherSeedOtherText) {
  TestServer test;
  const auto ask = [&](int seed) {
    return test.AskJson(Post(
        "/v1/completions", absl::StrCat(R"({"model":"bytes","prompt":"x","seed":)", seed, "}")))["choices"][0]["text"];
  };
  EXPECT_EQ(ask(5), ask(5));
  EXPECT_NE(ask(5), ask(6));
}

TEST(Completions, MultibyteCharactersAreNeverCutInAStream) {
  const std::string text = "na\xC3\xAFve \xF0\x9F\x98\x80!";
  TestServer test({.next = [text](const auto&, int, int index) {
    return static_cast<TokenId>(static_cast<uint8_t>(text[index]));
  }});
  const RawResponse response =
      test.Ask(Post("/v1/completions",
                    absl::StrCat(R"({"model":"bytes","prompt":"x","stream":true,"max_tokens":)", text.size(), "}")));
  std::string all;
  for (const Json& chunk : Chunks(response.body)) {
    const std::string piece = chunk["choices"][0]["text"];
    EXPECT_THAT(piece, testing::Not(HasSubstr("\xEF\xBF\xBD")));
    all += piece;
  }
  EXPECT_EQ(all, text);
}

TEST(Completions, AFailureBeforeTheFirstTokenIsA500ThatIsNotRetried) {
  TestServer test({.fail_after = 0});
  for (const char* stream : {"false", "true"}) {
    const RawResponse response =
        test.Ask(Post("/v1/completions", absl::StrCat(R"({"model":"bytes","prompt":"x","stream":)", stream, "}")));
    EXPECT_EQ(response.status, 500);
    EXPECT_EQ(response.headers.at("x-should-retry"), "false");
    EXPECT_EQ(response.body.find("secret"), std::string::npos);
    EXPECT_EQ(response.body.find("0x"), std::string::npos);
  }
}

TEST(Completions, AFailureInTheMiddleIsAnErrorFrameAndTheStreamEnds) {
  TestServer test({.fail_after = 3});
  const RawResponse response = test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x","stream":true})"));
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  const auto data = SseData(response.body);
  ASSERT_EQ(data.size(), 4u);
  EXPECT_EQ((*ParseJson(data.back()))["error"]["type"], "server_error");
}

TEST(Streams, ThatWaitForTheirFirstTokenBeginAndBringComments) {
  HttpServerOptions options;
  options.stream_keep_alive = std::chrono::milliseconds(50);
  TestServer test({.manual = true}, options);
  const std::string chat = R"("messages":[{"role":"user","content":"x"}],"max_tokens":2)";
  const std::vector<std::pair<std::string, std::string>> requests = {
      {"/v1/completions", R"("prompt":"x","max_tokens":2)"},
      {"/v1/chat/completions", chat},
      {"/v1/responses", R"("input":"x","max_output_tokens":2)"},
      {"/v1/messages", chat}};
  for (const auto& [path, fields] : requests) {
    RawClient client(test.port());
    client.Send(Post(path, absl::StrCat(R"({"model":"bytes","temperature":0,"stream":true,)", fields, "}")));
    ASSERT_TRUE(client.ReadUntil("HTTP/1.1 200 OK")) << path;
    ASSERT_TRUE(client.ReadUntil(": keep-alive\n\n")) << path;
    test.engine.Step(2);
    const RawResponse response = client.Read();
    EXPECT_TRUE(response.complete) << path;
    EXPECT_EQ(response.body.rfind(": keep-alive\n\n", 0), 0u) << response.body;
    EXPECT_GE(SseData(response.body).size(), 3u) << response.body;
  }
}

TEST(Streams, ThatFailBehindACommentEndWithAnErrorAndOthersHaveTheirStatus) {
  const std::string request = Post("/v1/completions", R"({"model":"bytes","prompt":"x","stream":true})");
  HttpServerOptions options;
  options.stream_keep_alive = std::chrono::milliseconds(50);
  TestServer begun({.manual = true, .fail_after = 0}, options);
  RawClient client(begun.port());
  client.Send(request);
  ASSERT_TRUE(client.ReadUntil(": keep-alive\n\n"));
  begun.engine.Step();
  const RawResponse response = client.Read();
  EXPECT_EQ(response.status, 200);
  ASSERT_EQ(SseData(response.body).size(), 1u) << response.body;
  EXPECT_EQ((*ParseJson(SseData(response.body)[0]))["error"]["type"], "server_error");

  options.stream_keep_alive = std::chrono::hours(1);
  TestServer silent({.fail_after = 0}, options);
  EXPECT_EQ(silent.Ask(request).status, 500);
}

// Before the body, in it, and by the engine.
TEST(Messages, ErrorsHaveTheShapeOfTheApiWhereverTheyAreFound) {
  HttpServerOptions options;
  options.body_grace = std::chrono::milliseconds(200);
  options.max_body_bytes = 100'000;
  TestServer test({}, options);
  const std::string good = R"({"model":"bytes","max_tokens":5,"messages":[{"role":"user","content":"hi"}]})";
  const auto expect = [&](const std::string& request, int status, const std::string& type) {
    const RawResponse response = test.Ask(request);
    EXPECT_EQ(response.status, status);
    const Json body = *ParseJson(response.body);
    EXPECT_EQ(body["type"], "error");
    EXPECT_EQ(body["error"]["type"], type);
    EXPECT_FALSE(body["error"]["message"].get<std::string>().empty());
  };
  EXPECT_EQ(test.AskJson(Post("/v1/messages", good))["type"], "message");
  expect(Post("/v1/messages", good, "Content-Encoding: gzip\r\n"), 415, "invalid_request_error");
  expect(Post("/v1/messages", "{"), 400, "invalid_request_error");
  expect(Post("/v1/messages/count_tokens", "{}"), 400, "invalid_request_error");
  expect(Get("/v1/messages/of"), 404, "not_found_error");
  expect(Get("/v1/messages/batches"), 501, "api_error");
  expect(Get("/v1/messages?beta=true"), 405, "invalid_request_error");
  const std::string head = "POST /v1/messages?beta=true HTTP/1.1\r\nHost: t\r\n";
  expect(head + "Content-Length: 10\r\n\r\n{", 408, "invalid_request_error");
  expect(head + "\r\n", 411, "invalid_request_error");
  expect(head + "Content-Length: 100001\r\n\r\n", 413, "request_too_large");
  expect(head + "X: " + std::string(8200, 'a') + "\r\n\r\n", 431, "invalid_request_error");
  for (const char* other : {"/v1/messages_of", "/v1/message", "/v1/chat/completions"}) {
    const std::string long_header = absl::StrCat("X: ", std::string(8200, 'a'), "\r\n");
    EXPECT_TRUE(ParseJson(test.Ask(Post(other, good, long_header)).body)->at("error").contains("param")) << other;
  }
  test.engine.SetRefusal(absl::ResourceExhaustedError("full"));
  expect(Post("/v1/messages", good), 503, "overloaded_error");
}

}  // namespace
}  // namespace dovetail::server::test
