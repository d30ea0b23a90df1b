// What clients get from `dovetail serve` with a real model: every sampling parameter, streams and bodies, over HTTP.
#include <gmock/gmock.h>

#include <signal.h>

#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/ids.h"
#include "tests/server/serve_process.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

constexpr char kModel[] = "models/stories260K/stories260K-f32.gguf";
constexpr int kEos = 2;

class RealEngine : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (const auto model = dovetail::test::TestData(kModel))
      server_ = new ServeProcess({model->string(), "--served-model-name", "stories", "--attention-workers", "2",
                                  "--placement", "mixed", "--chat-template", "chatml"});
  }
  static void TearDownTestSuite() {
    if (server_ == nullptr) return;
    EXPECT_TRUE(server_->WaitForMetric("vllm:num_requests_running", 0));
    EXPECT_TRUE(server_->WaitForMetric("dovetail:kv_blocks_in_use", 0));
    server_->Signal(SIGTERM);
    EXPECT_EQ(server_->Wait(), 0);
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override { DOVETAIL_DATA_OR_SKIP([[maybe_unused]] const auto model, kModel); }

  static std::string Body(const Json& fields) {
    Json body = {{"model", "stories"}, {"prompt", "Once upon a time"}, {"temperature", 0}, {"max_tokens", 24}};
    if (!fields.is_null()) body.update(fields);
    return Dump(body);
  }
  static Json Complete(const Json& fields, int status = 200) {
    return server_->AskJson(Post("/v1/completions", Body(fields)), status);
  }
  static std::string Text(const Json& fields) { return Complete(fields)["choices"][0]["text"]; }
  static std::vector<TokenId> Tokenize(const std::string& text) {
    return server_->AskJson(Post("/tokenize", Dump({{"prompt", text}, {"add_special_tokens", false}})))["tokens"];
  }

  static ServeProcess* server_;
};
ServeProcess* RealEngine::server_ = nullptr;

TEST_F(RealEngine, GreedyTextIsTheModelsOwn) {
  EXPECT_EQ(Text({}), ", there was a little girl named Lily. She loved to play outside in the p");
  const Json body = Complete({});
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(body["usage"]["completion_tokens"], 24);
  EXPECT_THAT(body["system_fingerprint"].get<std::string>(), testing::MatchesRegex("fp_[0-9a-f]{16}"));
}

// What a stream shows, put together as the body that would have come.
struct Collected {
  std::map<int, std::string> text, finish;
  std::map<int, Json> stop_reason;
  std::map<int, std::vector<std::string>> tokens;
  std::map<int, std::vector<double>> logprobs;
  Json usage;
};

Collected FromBody(const Json& body) {
  Collected all;
  for (const Json& choice : body["choices"]) {
    const int index = choice["index"];
    all.text[index] = choice.contains("message") ? choice["message"]["content"] : choice["text"];
    all.finish[index] = choice["finish_reason"];
    all.stop_reason[index] = choice["stop_reason"];
    if (choice["logprobs"].is_null()) continue;
    if (choice["logprobs"].contains("content")) {
      for (const Json& one : choice["logprobs"]["content"]) {
        all.tokens[index].push_back(one["token"]);
        all.logprobs[index].push_back(one["logprob"]);
      }
    } else {
      for (const Json& one : choice["logprobs"]["tokens"]) all.tokens[index].push_back(one);
      for (const Json& one : choice["logprobs"]["token_logprobs"])
        all.logprobs[index].push_back(one.is_null() ? 1.0 : one.get<double>());
    }
  }
  all.usage = body["usage"];
  return all;
}

Collected FromStream(const std::string& body) {
  Collected all;
  const auto frames = SseData(body);
  EXPECT_EQ(frames.back(), "[DONE]");
  for (size_t i = 0; i + 1 < frames.size(); ++i) {
    const Json chunk = *ParseJson(frames[i]);
    if (chunk["choices"].empty()) {
      all.usage = chunk["usage"];
      continue;
    }
    const Json& choice = chunk["choices"][0];
    const int index = choice["index"];
    EXPECT_EQ(all.finish.count(index), 0u) << "a choice goes on behind its end";
    if (choice.contains("delta")) {
      if (choice["delta"].contains("content") && choice["delta"]["content"].is_string())
        all.text[index] += choice["delta"]["content"].get<std::string>();
    } else {
      all.text[index] += choice["text"].get<std::string>();
    }
    if (!choice["logprobs"].is_null()) {
      const bool chat = choice["logprobs"].contains("content");
      for (const Json& one : chat ? choice["logprobs"]["content"] : choice["logprobs"]["tokens"])
        all.tokens[index].push_back(chat ? one["token"] : one);
      for (const Json& one : chat ? choice["logprobs"]["content"] : choice["logprobs"]["token_logprobs"])
        all.logprobs[index].push_back(chat ? one["logprob"].get<double>() : one.is_null() ? 1.0 : one.get<double>());
    }
    if (choice["finish_reason"].is_null()) continue;
    all.finish[index] = choice["finish_reason"];
    all.stop_reason[index] = choice["stop_reason"];
  }
  return all;
}

void ExpectSame(const Collected& stream, const Collected& body) {
  EXPECT_EQ(stream.text, body.text);
  EXPECT_EQ(stream.finish, body.finish);
  EXPECT_EQ(stream.stop_reason, body.stop_reason);
  EXPECT_EQ(stream.tokens, body.tokens);
  EXPECT_EQ(stream.logprobs, body.logprobs);
  for (const char* key : {"prompt_tokens", "completion_tokens", "total_tokens"})
    EXPECT_EQ(stream.usage[key], body.usage[key]);
}

// Requests of every kind; the streams among them are also asked for without streaming.
std::vector<Json> MixedRequests() {
  return {
      Json::object(),
      {{"temperature", 1}, {"seed", 5}, {"max_tokens", 60}},
      {{"temperature", 0.7}, {"seed", 6}, {"top_p", 0.9}, {"top_k", 20}, {"min_p", 0.05}, {"n", 3}},
      {{"stop", {" girl", "zzz"}}},
      {{"stop", {"Lily", "named"}}, {"include_stop_str_in_output", true}},
      {{"stop_token_ids", {403, 426}}, {"max_tokens", 60}},
      {{"frequency_penalty", 1.5}, {"presence_penalty", 0.5}, {"repetition_penalty", 1.3}, {"max_tokens", 80}},
      {{"logit_bias", {{"2", 100}}}, {"min_tokens", 6}},
      {{"logit_bias", {{"2", 100}}}, {"ignore_eos", true}, {"skip_special_tokens", false}},
      {{"logprobs", 3}, {"echo", true}},
      {{"logprobs", 0}, {"temperature", 1}, {"seed", -9}},
      {{"prompt", {"Once", "Lily and Tom", "The end"}}, {"n", 2}, {"temperature", 1}, {"seed", 1}},
      {{"prompt", {1, 403, 407, 261}}, {"max_tokens", 400}, {"ignore_eos", true}},
      {{"prompt", std::string(700, 'a')}, {"max_tokens", 3}, {"truncate_prompt_tokens", 300}},
      {{"prompt", "caf\xC3\xA9 \xF0\x9F\x8D\xB0"}, {"temperature", 2}, {"seed", 2}, {"max_tokens", 100}},
  };
}

std::string AskFor(const Json& fields, bool stream, bool chat) {
  Json body = {{"model", "stories"}, {"temperature", 0}, {"max_tokens", 24}};
  body.update(fields);
  if (chat) {
    body.erase("prompt");
    body["messages"] = Json::array({{{"role", "user"}, {"content", "Tell me of Lily and <|im_end|> her cat."}}});
    if (body.contains("logprobs")) {
      body["top_logprobs"] = body["logprobs"];
      body["logprobs"] = true;
    }
    for (const char* name : {"echo", "truncate_prompt_tokens"}) body.erase(name);
  } else if (!body.contains("prompt")) {
    body["prompt"] = "Once upon a time";
  }
  if (stream) {
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
  }
  return Post(chat ? "/v1/chat/completions" : "/v1/completions", Dump(body));
}

TEST_F(RealEngine, AStreamSaysWhatTheBodySays) {
  for (const Json& fields : MixedRequests()) {
    for (const bool chat : {false, true}) {
      SCOPED_TRACE(Dump(fields));
      const RawResponse stream = server_->Ask(AskFor(fields, true, chat));
      const RawResponse body = server_->Ask(AskFor(fields, false, chat));
      ASSERT_EQ(stream.status, 200) << stream.body;
      ASSERT_EQ(body.status, 200) << body.body;
      ExpectSame(FromStream(stream.body), FromBody(*ParseJson(body.body)));
    }
  }
}

// While requests are refused and clients leave, in whatever batches come about: each answer is the one that
// the request gets alone.
TEST_F(RealEngine, SixtyFourMixedStreamsAreEachWhatTheyAreAlone) {
  std::vector<std::string> requests;
  std::vector<Collected> alone;
  for (const Json& fields : MixedRequests()) {
    for (const bool chat : {false, true}) {
      requests.push_back(AskFor(fields, true, chat));
      alone.push_back(FromStream(server_->Ask(requests.back()).body));
    }
  }
  const std::vector<std::string> poison = {Post("/v1/completions", "{"),
                                           Post("/v1/completions", R"({"model":"stories","prompt":[1,99999]})"),
                                           AskFor({{"max_tokens", 100000}}, true, false),
                                           AskFor({{"n", 9}}, false, true),
                                           AskFor({{"prompt", std::string(20000, 'x')}}, true, false),
                                           "BROKEN\r\n\r\n"};
  std::vector<RawClient> clients, poisoned, leaving;
  for (int i = 0; i < 64; ++i) {
    clients.emplace_back(server_->port()).Send(requests[i % requests.size()]);
    poisoned.emplace_back(server_->port()).Send(poison[i % poison.size()]);
    if (i % 4 == 0) leaving.emplace_back(server_->port()).Send(AskFor({{"max_tokens", 480}, {"n", 4}}, true, false));
  }
  for (RawClient& client : leaving) {
    EXPECT_TRUE(client.ReadUntil("data: "));
    client.Reset();
  }
  for (int i = 0; i < 64; ++i) {
    SCOPED_TRACE(requests[i % requests.size()]);
    ExpectSame(FromStream(clients[i].Read().body), alone[i % requests.size()]);
  }
  for (RawClient& client : poisoned) EXPECT_EQ(client.Read().status, 400);
}

TEST_F(RealEngine, AStopStringEndsTheTextAndIsNamed) {
  Json choice = Complete({{"stop", {" girl"}}})["choices"][0];
  EXPECT_EQ(choice["text"], ", there was a little");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], " girl");
  EXPECT_EQ(Text({{"stop", {" girl"}}, {"include_stop_str_in_output", true}}), ", there was a little girl");
  EXPECT_EQ(Text({{"stop", {" little girl named"}}}), ", there was a");  // across tokens
  const TokenId lily = Complete({{"return_token_ids", true}})["choices"][0]["token_ids"][7];
  choice = Complete({{"stop_token_ids", {lily}}})["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], lily);
  EXPECT_EQ(Text({}).rfind(choice["text"].get<std::string>(), 0), 0u);
}

TEST_F(RealEngine, EndTokensWaitForMinTokensAndCanBeIgnored) {
  const Json bias = {{std::to_string(kEos), 100}};
  Json body = Complete({{"logit_bias", bias}});
  EXPECT_EQ(body["choices"][0]["text"], "");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["usage"]["completion_tokens"], 1);
  body = Complete({{"logit_bias", bias}, {"min_tokens", 6}});
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["usage"]["completion_tokens"], 7);
  EXPECT_EQ(Text({}).rfind(body["choices"][0]["text"].get<std::string>(), 0), 0u);
  body = Complete({{"logit_bias", bias}, {"ignore_eos", true}, {"return_token_ids", true}});
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["choices"][0]["token_ids"], Json(std::vector<int>(24, kEos)));
}

TEST_F(RealEngine, LogitBiasBadWordsAndAllowedTokensSteer) {
  const std::vector<TokenId> cat = Tokenize(" cat");
  ASSERT_FALSE(cat.empty());
  const std::string id = std::to_string(cat[0]);
  EXPECT_EQ(
      Complete({{"logit_bias", {{id, 100}}}, {"max_tokens", 4}, {"return_token_ids", true}})["choices"][0]["token_ids"],
      Json(std::vector<TokenId>(4, cat[0])));
  const Json first = Complete({{"max_tokens", 1}, {"return_token_ids", true}})["choices"][0]["token_ids"][0];
  const Json banned = Complete({{"max_tokens", 24}, {"return_token_ids", true}, {"logit_bias", {{Dump(first), -100}}}});
  for (const Json& token : banned["choices"][0]["token_ids"]) EXPECT_NE(token, first);
  const Json allowed =
      Complete({{"allowed_token_ids", {cat[0], 403}}, {"temperature", 1}, {"seed", 1}, {"return_token_ids", true}});
  for (const Json& token : allowed["choices"][0]["token_ids"]) EXPECT_TRUE(token == cat[0] || token == 403) << token;
}

TEST_F(RealEngine, PenaltiesMakeRepetitionRarer) {
  const auto distinct = [](const Json& fields) {
    Json more = {{"max_tokens", 120}, {"ignore_eos", true}, {"return_token_ids", true}};
    more.update(fields);
    const std::vector<TokenId> ids = Complete(more)["choices"][0]["token_ids"];
    return std::set<TokenId>(ids.begin(), ids.end()).size();
  };
  const size_t plain = distinct(Json::object());
  EXPECT_GT(distinct({{"frequency_penalty", 2}}), plain);
  EXPECT_GT(distinct({{"presence_penalty", 2}}), plain);
  EXPECT_GT(distinct({{"repetition_penalty", 1.5}}), plain);
  EXPECT_LE(distinct({{"frequency_penalty", -2}}), plain);
}

TEST_F(RealEngine, ASeedIsWhatDraws) {
  const auto draw = [](int64_t seed) { return Text({{"temperature", 1}, {"seed", seed}}); };
  EXPECT_EQ(draw(11), draw(11));
  EXPECT_EQ(draw(-2), draw(-2));
  std::set<std::string> texts;
  for (int seed = 0; seed < 8; ++seed) texts.insert(draw(seed));
  EXPECT_GT(texts.size(), 4u);
  const Json two = Complete({{"temperature", 1}, {"seed", 11}, {"n", 2}});
  EXPECT_EQ(two["choices"][0]["text"], draw(11));
  EXPECT_EQ(two["choices"][1]["text"], draw(12));  // choice i draws with seed + i
  EXPECT_NE(Text({{"temperature", 1}}), Text({{"temperature", 1}}));
}

TEST_F(RealEngine, TheBestOfAreTheLikeliest) {
  const Json fields = {{"temperature", 1}, {"seed", 3}, {"max_tokens", 12}};
  Json all = fields, best = fields;
  all.update({{"n", 6}, {"logprobs", 0}});
  best.update({{"n", 2}, {"best_of", 6}});
  std::vector<std::pair<double, std::string>> ranked;
  const Json drawn = Complete(all);
  for (const Json& choice : drawn["choices"]) {
    const std::vector<double> logprobs = choice["logprobs"]["token_logprobs"];
    ranked.emplace_back(std::accumulate(logprobs.begin(), logprobs.end(), 0.0), choice["text"]);
  }
  std::sort(ranked.rbegin(), ranked.rend());
  const Json body = Complete(best);
  ASSERT_EQ(body["choices"].size(), 2u);
  EXPECT_EQ(body["choices"][0]["text"], ranked[0].second);
  EXPECT_EQ(body["choices"][1]["text"], ranked[1].second);
  EXPECT_EQ(body["usage"]["completion_tokens"], drawn["usage"]["completion_tokens"]);
}

TEST_F(RealEngine, LogprobsAreThoseOfADistribution) {
  const Json logprobs = Complete({{"logprobs", 20}, {"temperature", 0}})["choices"][0]["logprobs"];
  for (size_t i = 0; i < logprobs["tokens"].size(); ++i) {
    double total = 0, best = -1e9;
    for (const auto& [token, logprob] : logprobs["top_logprobs"][i].items()) {
      total += std::exp(logprob.get<double>());
      best = std::max(best, logprob.get<double>());
    }
    EXPECT_LE(total, 1 + 1e-5);
    EXPECT_GT(total, 0.3);
    EXPECT_EQ(logprobs["token_logprobs"][i], best);  // greedy takes the likeliest
    EXPECT_EQ(logprobs["top_logprobs"][i].size(), 20u);
  }
}

// A text's log probabilities are the same bits whether it was generated, echoed as a prompt, or asked for as
// prompt_logprobs.
TEST_F(RealEngine, EchoAndPromptLogprobsAreThoseOfGeneration) {
  const Json made = Complete({{"logprobs", 1}, {"return_token_ids", true}, {"max_tokens", 100}});
  const std::vector<double> generated = made["choices"][0]["logprobs"]["token_logprobs"];
  std::vector<TokenId> ids = made["choices"][0]["prompt_token_ids"];
  const size_t prompt = ids.size();
  for (const Json& id : made["choices"][0]["token_ids"]) ids.push_back(id);
  const Json echoed = Complete({{"prompt", ids}, {"echo", true}, {"logprobs", 1}, {"max_tokens", 0}});
  const Json& again = echoed["choices"][0]["logprobs"]["token_logprobs"];
  ASSERT_EQ(again.size(), ids.size());
  EXPECT_TRUE(again[0].is_null());
  EXPECT_EQ(echoed["usage"]["completion_tokens"], 0);
  const Json asked =
      Complete({{"prompt", ids}, {"prompt_logprobs", 2}, {"max_tokens", 1}})["choices"][0]["prompt_logprobs"];
  ASSERT_EQ(asked.size(), ids.size());
  EXPECT_TRUE(asked[0].is_null());
  for (size_t i = 0; i < generated.size(); ++i) {
    EXPECT_EQ(again[prompt + i].get<double>(), generated[i]) << i;
    EXPECT_EQ(asked[prompt + i][std::to_string(ids[prompt + i])]["logprob"].get<double>(), generated[i]) << i;
  }
}

TEST_F(RealEngine, APromptThatIsTooLongSaysByHowMuch) {
  const Json error = Complete({{"prompt", std::vector<int>(600, 403)}}, 400)["error"];
  EXPECT_EQ(error["type"], "exceed_context_size_error");
  EXPECT_EQ(error["n_prompt_tokens"], 600);
  EXPECT_EQ(error["n_ctx"], 512);
  EXPECT_EQ(Complete({{"prompt", std::vector<int>(512, 403)}, {"max_tokens", 1}}, 400)["error"]["param"], "prompt");
  EXPECT_EQ(Complete({{"prompt", std::vector<int>(511, 403)}, {"max_tokens", 1}})["usage"]["completion_tokens"], 1);
  EXPECT_EQ(Complete({{"max_tokens", 508}}, 400)["error"]["param"], "max_tokens");
  EXPECT_EQ(Complete({{"max_tokens", 507}, {"ignore_eos", true}})["usage"]["total_tokens"], 512);
}

TEST_F(RealEngine, EveryParameterAtAndPastItsLimitsIsTakenOrRefused) {
  RawClient client(server_->port());
  int cases = 0;
  for (const char* field : {"max_tokens",
                            "max_completion_tokens",
                            "min_tokens",
                            "n",
                            "best_of",
                            "top_k",
                            "logprobs",
                            "prompt_logprobs",
                            "seed",
                            "truncate_prompt_tokens",
                            "priority",
                            "temperature",
                            "top_p",
                            "min_p",
                            "repetition_penalty",
                            "presence_penalty",
                            "frequency_penalty",
                            "stop",
                            "stop_token_ids",
                            "logit_bias",
                            "allowed_token_ids",
                            "bad_words",
                            "echo",
                            "stream",
                            "suffix",
                            "user",
                            "cache_salt",
                            "prompt",
                            "model"}) {
    for (const char* value : {"-1",
                              "0",
                              "1",
                              "2",
                              "8",
                              "9",
                              "20",
                              "21",
                              "-2.0",
                              "2.0",
                              "2.01",
                              "0.01",
                              "10.1",
                              "511",
                              "512",
                              "2147483647",
                              "2147483648",
                              "-2147483649",
                              "9223372036854775807",
                              "9223372036854775808",
                              "1e308",
                              "-1e308",
                              "1e-320",
                              "NaN",
                              "Infinity",
                              "null",
                              "\"x\"",
                              "\"\"",
                              "[]",
                              "{}",
                              "[1]",
                              "[-1]",
                              "[511]",
                              "[512]",
                              "[[1]]",
                              "{\"2\":1}",
                              "{\"2\":1e308}",
                              "{\"512\":1}",
                              "[\"a\"]",
                              "true"}) {
      std::string body = "{";  // keys may come once only
      for (const char* other : {R"("model":"stories")", R"("prompt":"Once")", R"("max_tokens":2)"})
        if (std::string(other).find(absl::StrCat("\"", field, "\":")) == std::string::npos)
          absl::StrAppend(&body, other, ",");
      absl::StrAppend(&body, "\"", field, "\":", value, "}");
      client.Send(Post("/v1/completions", body));
      const RawResponse response = client.Read();
      const bool expected = response.status == 200 || response.status == 400 ||
                            (response.status == 404 && std::string_view(field) == "model");
      EXPECT_TRUE(expected) << response.status << " " << body << " " << response.body;
      ++cases;
    }
  }
  EXPECT_GT(cases, 1000);
  EXPECT_EQ(Text({}).substr(0, 11), ", there was");
}

TEST_F(RealEngine, AMebibyteOfOneCharacterIsCountedAndRefusedAsAPrompt) {
  for (const std::string unit : {"A", " ", "\xE6\xBC\xA2", "\xCC\x81", "7", "\xF0\x9F\x8D\xB0", "\n", "<|im_end|>"}) {
    std::string text;
    while (text.size() < (1 << 20)) text += unit;
    const RawResponse counted = server_->Ask(Post("/tokenize", Dump({{"prompt", text}})));
    EXPECT_EQ(counted.status, 200);
    EXPECT_GT(std::stoi(counted.body.substr(counted.body.find("\"count\":") + 8)), 512);
    EXPECT_EQ(Complete({{"prompt", text}}, 400)["error"]["type"], "exceed_context_size_error");
  }
}

TEST_F(RealEngine, TokensAreConserved) {
  const auto counted = [] { return server_->Metric("vllm:generation_tokens_total"); };
  EXPECT_TRUE(server_->WaitForMetric("vllm:num_requests_running", 0));
  const double before = counted(), asked = server_->Metric("vllm:prompt_tokens_total");
  double tokens = 0, prompts = 0;
  for (const Json& fields : MixedRequests()) {
    const Json usage = (*ParseJson(server_->Ask(AskFor(fields, false, false)).body))["usage"];
    tokens += usage["completion_tokens"].get<double>();
    prompts += usage["prompt_tokens"].get<double>();
  }
  EXPECT_EQ(counted() - before, tokens);
  EXPECT_EQ(server_->Metric("vllm:prompt_tokens_total") - asked, prompts);
}

}  // namespace
}  // namespace dovetail::server::test
