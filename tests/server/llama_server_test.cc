// llama-server's own API over HTTP: completions, filling in, templates, properties and slots.
#include <gmock/gmock.h>

#include "model/tokenizer/tokenizer.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Answers "ab", a line break, "c" and so on, from its own list.
FakeEngineOptions Saying(const std::string& text, int end_after = -1) {
  FakeEngineOptions options;
  options.next = [text](const requests::GenerationRequest&, int, int index) -> TokenId {
    return static_cast<uint8_t>(text[static_cast<size_t>(index) % text.size()]);
  };
  options.eos_after = end_after;
  return options;
}

TEST(LlamaServer, ACompletionHasItsFields) {
  TestServer test(Saying("ab\nc", /*end_after=*/4));
  for (const char* path : {"/completion", "/completions"}) {
    const Json body = test.AskJson(Post(
        path, R"({"prompt":"hi","temperature":0.5,"seed":7,"stop":["zz"],"repeat_penalty":1.5,"return_tokens":true})"));
    EXPECT_EQ(body["content"], "ab\nc");
    EXPECT_EQ(Dump(body["tokens"]).substr(0, 14), "[97,98,10,99,2");
    EXPECT_EQ(body["stop"], true);
    EXPECT_EQ(body["stop_type"], "eos");
    EXPECT_EQ(body["stopping_word"], "");
    EXPECT_EQ(body["has_new_line"], true);
    EXPECT_EQ(body["truncated"], false);
    EXPECT_EQ(body["model"], "bytes");
    EXPECT_EQ(body["prompt"], "<bos>hi");
    EXPECT_EQ(body["tokens_evaluated"], 3);
    EXPECT_EQ(body["tokens_predicted"], 5);
    EXPECT_EQ(body["tokens_cached"], 8);
    EXPECT_FALSE(body.contains("completion_probabilities"));
    const Json& settings = body["generation_settings"];
    EXPECT_EQ(settings["n_predict"], 4096 - 3) << "as many as fit";
    EXPECT_EQ(settings["seed"], 7);
    EXPECT_EQ(settings["temperature"], 0.5);
    EXPECT_EQ(settings["repeat_penalty"], 1.5);
    EXPECT_THAT(settings["stop"], ElementsAre("zz"));
    const Json& timings = body["timings"];
    EXPECT_EQ(timings["cache_n"].get<int>() + timings["prompt_n"].get<int>(), 3);
    EXPECT_EQ(timings["predicted_n"], 5);
    EXPECT_GE(timings["prompt_ms"].get<double>(), 0);
  }
}

TEST(LlamaServer, TheReasonOfTheEndIsTold) {
  TestServer test(Saying("abcd"));
  const Json limit = test.AskJson(Post("/completion", R"({"prompt":"x","n_predict":3})"));
  EXPECT_EQ(limit["stop_type"], "limit");
  EXPECT_EQ(limit["content"], "abc");
  EXPECT_EQ(limit["tokens"], Json::array()) << "not asked for";
  const Json word = test.AskJson(Post("/completion", R"({"prompt":"x","n_predict":9,"stop":["cd"]})"));
  EXPECT_EQ(word["stop_type"], "word");
  EXPECT_EQ(word["stopping_word"], "cd");
  EXPECT_EQ(word["content"], "ab");
}

TEST(LlamaServer, AStreamIsChunksAndALastOneWithAllElse) {
  TestServer test(Saying("abc"));
  const RawResponse response = test.Ask(
      Post("/completion", R"({"prompt":"x","n_predict":3,"stream":true,"timings_per_token":true,"n_probs":2})"));
  std::string text;
  std::vector<TokenId> tokens;
  const std::vector<std::string> frames = SseData(response.body);
  ASSERT_GE(frames.size(), 2u);
  for (const std::string& frame : frames) {
    const Json chunk = *ParseJson(frame);
    const bool last = &frame == &frames.back();
    EXPECT_EQ(chunk["stop"], last) << frame;
    EXPECT_EQ(chunk.contains("generation_settings"), last);
    EXPECT_TRUE(chunk.contains("timings"));
    text += chunk["content"];
    for (const Json& token : chunk["tokens"]) tokens.push_back(token);
    if (!last) {
      const Json& one = chunk["completion_probabilities"][0];
      EXPECT_EQ(one["id"], chunk["tokens"][0]);
      EXPECT_EQ(one["token"], chunk["content"].get<std::string>().substr(0, 1));
      EXPECT_TRUE(one["logprob"].is_number());
      EXPECT_TRUE(one["top_logprobs"].is_array());
    }
  }
  EXPECT_EQ(text, "abc");
  EXPECT_THAT(tokens, ElementsAre('a', 'b', 'c'));
  const Json last = *ParseJson(frames.back());
  EXPECT_EQ(last["stop_type"], "limit");
  EXPECT_EQ(last["tokens_predicted"], 3);
}

// The fake engine reads all of a prompt but its last token first.
TEST(LlamaServer, AStreamTellsHowFarItsPromptIsWhereThatIsAskedFor) {
  TestServer test(Saying("abc"));
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"/completion", R"("prompt":"abcd")"},
      {"/v1/completions", R"("prompt":"abcd")"},
      {"/v1/chat/completions", R"("messages":[{"role":"user","content":"hi"}])"}};
  for (const auto& [path, prompt] : cases) {
    const std::string body = absl::StrCat(R"({"max_tokens":3,"stream":true,)", prompt);
    std::vector<Json> told;
    bool text = false;
    for (const std::string& frame : SseData(test.Ask(Post(path, body + R"(,"return_progress":true})")).body)) {
      if (frame == "[DONE]") continue;
      const Json chunk = *ParseJson(frame);
      if (chunk.contains("prompt_progress")) {
        EXPECT_FALSE(text) << frame;
        told.push_back(chunk["prompt_progress"]);
      } else {
        text = true;
      }
    }
    ASSERT_EQ(told.size(), 2u) << path;
    const int total = told[0]["total"];
    EXPECT_EQ(told[0]["processed"], total - 1);
    EXPECT_EQ(told[1]["processed"], total);
    EXPECT_EQ(told[1]["cache"], total / 2);
    EXPECT_GE(told[1]["time_ms"].get<double>(), told[0]["time_ms"].get<double>());
    EXPECT_THAT(test.Ask(Post(path, body + "}")).body, Not(HasSubstr("prompt_progress")));
  }
  EXPECT_THAT(test.Ask(Post("/v1/messages", R"({"max_tokens":3,"return_progress":true,"messages":[]})")).body,
              HasSubstr("return_progress"));
}

TEST(LlamaServer, PromptsMixTextAndTokensAndBiasesComeInPairs) {
  TestServer test;
  const auto last = [&] { return test.engine.log().submitted.back(); };
  test.AskJson(
      Post("/completion", R"({"prompt":["x",259,"the<turn>"],"n_predict":1,"logit_bias":[[97,2.5],[98,false]]})"));
  EXPECT_THAT(last().prompt, ElementsAre(kBos, 'x', 259, kThe, 258));
  EXPECT_THAT(last().sampling.logit_bias, ElementsAre(std::pair(97, 2.5f), std::pair(98, -100.0f)));
  test.AskJson(Post("/completion", R"({"prompt":[97,98],"n_predict":1,"id_slot":3,"n_keep":5,"cache_prompt":false})"));
  EXPECT_THAT(last().prompt, ElementsAre(97, 98));
  EXPECT_FALSE(last().use_prefix_cache);
}

TEST(LlamaServer, WhatIsNotThereIsRefusedByName) {
  TestServer test;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("n_predict":1)", "prompt"},
      {R"("prompt":["a","b"])", "prompt"},
      {R"("prompt":[[1]])", "prompt"},
      {R"("prompt":"x","n_predict":-2)", "n_predict"},
      {R"("prompt":"x","n_probs":21)", "n_probs"},
      {R"("prompt":"x","id_slot":-2)", "id_slot"},
      {R"("prompt":"x","logit_bias":[[1]])", "logit_bias.0"},
      {R"("prompt":"x","logit_bias":[["a",1]])", "logit_bias.0"},
      {R"("prompt":"x","return_progress":7)", "return_progress"},
      {R"("prompt":"x","t_max_predict_ms":5)", "t_max_predict_ms"},
      {R"("prompt":"x","post_sampling_probs":true)", "post_sampling_probs"},
      {R"("prompt":"x","mirostat":2)", "mirostat"},
      {R"("prompt":"x","response_fields":["content"])", "response_fields"},
      {R"("prompt":"x","n":2)", "n"},
      {R"("prompt":"x","repeat_last_n":64)", "repeat_last_n"},
      {R"("prompt":"x","grammar":"root ::= ")", "grammar"}};
  for (const auto& [fields, param] : cases)
    EXPECT_EQ(test.AskJson(Post("/completion", "{" + fields + "}"), 400)["error"]["param"], param) << fields;
  const Json error =
      test.AskJson(Post("/completion", absl::StrCat(R"({"prompt":")", std::string(5000, 'x'), "\"}")), 400);
  EXPECT_EQ(error["error"]["type"], "exceed_context_size_error");
  EXPECT_EQ(error["error"]["n_ctx"], 4096);
  EXPECT_EQ(error["error"]["n_prompt_tokens"], 5001);
}

TEST(LlamaServer, FillsInWhereTheModelHasTokensForIt) {
  TestServer without;
  EXPECT_THAT(without.AskJson(Post("/infill", R"({"input_prefix":"a"})"), 400)["error"]["message"].get<std::string>(),
              HasSubstr("no tokens to fill in"));
  TestServer test({}, {}, FillInModel());
  const TokenId prefix = 262, suffix = 263, middle = 264, file = 265, end = 266;
  const auto last = [&] { return test.engine.log().submitted.back(); };
  test.AskJson(Post("/infill", R"({"input_prefix":"a","input_suffix":"b<|fim_middle|>","n_predict":1})"));
  std::vector<TokenId> expected = {kBos, prefix, 'a', suffix, 'b'};
  for (const char c : std::string("<|fim_middle|>")) expected.push_back(static_cast<uint8_t>(c));  // not a token
  expected.push_back(middle);
  EXPECT_EQ(last().prompt, expected);
  EXPECT_THAT(last().stop_token_ids, ::testing::IsSupersetOf({kEos, end, file}));
  test.AskJson(Post("/infill", R"({"input_prefix":"a","prompt":"m","n_predict":1,
                                   "input_extra":[{"filename":"f","text":"t"}]})"));
  EXPECT_THAT(last().prompt, ElementsAre(kBos, file, 'f', '\n', 't', '\n', prefix, 'a', suffix, middle, 'm'));
  for (const auto& [fields, param] : std::vector<std::pair<std::string, std::string>>{
           {"", "input_prefix"},
           {R"("input_prefix":1)", "input_prefix"},
           {R"("input_suffix":"x","input_extra":[1])", "input_extra.0"},
           {R"("input_suffix":"x","input_extra":[{"text":1}])", "input_extra.0.text"}})
    EXPECT_EQ(test.AskJson(Post("/infill", "{" + fields + "}"), 400)["error"]["param"], param) << fields;
}

TEST(LlamaServer, TellsThePromptThatATemplateMakes) {
  TestServer test;
  const std::string messages = R"("messages":[{"role":"user","content":"hi"}])";
  EXPECT_EQ(test.AskJson(Post("/apply-template", "{" + messages + "}"))["prompt"], "<turn>user:hi<turn>assistant:");
  EXPECT_EQ(test.AskJson(Post("/apply-template", R"({"prompt":"x"})"), 400)["error"]["param"], "messages");
}

TEST(LlamaServer, TellsPropertiesAndSlots) {
  auto model = TestModel();
  model->max_num_seqs = 2;
  model->chat_template = "{{ messages }}";
  model->defaults.temperature = 0.25f;
  TestServer test({.manual = true}, {}, model);
  const Json props = test.AskJson(Get("/props"));
  EXPECT_EQ(props["total_slots"], 2);
  EXPECT_EQ(props["model_alias"], "bytes");
  EXPECT_EQ(props["chat_template"], "{{ messages }}");
  EXPECT_EQ(props["bos_token"], "<bos>");
  EXPECT_EQ(props["eos_token"], "<eos>");
  EXPECT_EQ(props["default_generation_settings"]["n_ctx"], 4096);
  EXPECT_EQ(props["default_generation_settings"]["params"]["temperature"], 0.25);
  const auto busy = [&] {
    int count = 0;
    for (const Json& slot : test.AskJson(Get("/slots"))) count += slot["is_processing"].get<bool>() ? 1 : 0;
    return count;
  };
  EXPECT_EQ(busy(), 0);
  EXPECT_EQ(test.AskJson(Get("/slots")).size(), 2u);
  std::vector<RawClient> clients;
  for (int i = 1; i <= 2; ++i) {
    clients.emplace_back(test.port()).Send(Post("/completion", R"({"prompt":"x","n_predict":1})"));
    ASSERT_TRUE(test.engine.WaitFor([&](const FakeEngine::Log& log) { return log.live == i; }));
    EXPECT_EQ(busy(), i);
  }
  EXPECT_EQ(test.Ask(Get("/slots?fail_on_no_slot=1")).status, 503);
  test.engine.Step();
  for (RawClient& client : clients) EXPECT_EQ(client.Read().status, 200);
}

}  // namespace
}  // namespace dovetail::server::test
