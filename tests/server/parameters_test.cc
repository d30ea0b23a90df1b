// Every field of a request at and past its limits: 200 or 400 that names the field, never anything else.
#include <gmock/gmock.h>

#include <cmath>

#include "server/openai/api_error.h"
#include "server/openai/parameters.h"
#include "server/openai/prepare.h"
#include "server/openai/requests.h"
#include "server/openai/unsupported_fields.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class Parameters : public testing::Test {
 protected:
  // Parses and prepares a request with this one field added.
  absl::Status Ask(Endpoint endpoint, const std::string& field, const std::string& value,
                   const std::string& more = "") {
    const std::string base = endpoint == Endpoint::kChat
                                 ? R"({"model":"bytes","messages":[{"role":"user","content":"hi"}])"
                                 : R"({"model":"bytes","prompt":"hi")";
    const auto json = ParseJson(absl::StrCat(base, more, ",\"", field, "\":", value, "}"));
    if (!json.ok()) return json.status();
    if (endpoint == Endpoint::kChat) {
      const auto request = ParseChatRequest(*json, *model_);
      return request.ok() ? Prepare(*request, *model_, {}).status() : request.status();
    }
    const auto request = ParseCompletionRequest(*json, *model_);
    return request.ok() ? Prepare(*request, *model_, {}).status() : request.status();
  }
  void ExpectRefused(Endpoint endpoint, const std::string& field, const std::string& value) {
    const absl::Status status = Ask(endpoint, field, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << " = " << value << ": " << status;
    if (value != "NaN") {
      EXPECT_EQ(ToApiError(status).param.value_or("").substr(0, field.size()), field) << value << ": " << status;
    }
    ++cases_;
  }
  void ExpectTakenOrRefused(Endpoint endpoint, const std::string& field, const std::string& value) {
    const absl::Status status = Ask(endpoint, field, value);
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument)
        << field << " = " << value << ": " << status;
    ++cases_;
  }

  const std::shared_ptr<ServedModel> model_ = TestModel();
  int cases_ = 0;
};

TEST_F(Parameters, EveryIntegerIsCheckedAtItsLimits) {
  for (const Endpoint endpoint : {Endpoint::kCompletions, Endpoint::kChat}) {
    for (const IntRule& rule : kIntRules) {
      const std::string name(rule.name);
      if (endpoint == Endpoint::kChat && (name == "best_of" || name == "logprobs")) continue;  // other types there
      if (endpoint == Endpoint::kCompletions && name == "top_logprobs") continue;              // chat only
      if (name == "dimensions" || name == "embd_normalize") continue;  // of vectors (embeddings_test.cc)
      EXPECT_TRUE(Ask(endpoint, name, "null").ok()) << name;
      ExpectTakenOrRefused(endpoint, name, std::to_string(rule.min));
      ExpectTakenOrRefused(endpoint, name, std::to_string(rule.max));
      if (rule.min > std::numeric_limits<int64_t>::min()) ExpectRefused(endpoint, name, std::to_string(rule.min - 1));
      if (rule.max < std::numeric_limits<int64_t>::max()) ExpectRefused(endpoint, name, std::to_string(rule.max + 1));
      if (rule.min > -1) ExpectRefused(endpoint, name, "-1");
      if (rule.max < int64_t{1} << 31) ExpectRefused(endpoint, name, "2147483648");
      for (const char* bad : {"9223372036854775808", "-9223372036854775809", "1e308", "-1e308", "1.5", "NaN", "\"1\"",
                              "true", "[]", "{}", "[1]"})
        ExpectRefused(endpoint, name, bad);
    }
  }
  EXPECT_GT(cases_, 250);
}

TEST_F(Parameters, EveryNumberIsCheckedAtItsLimits) {
  for (const Endpoint endpoint : {Endpoint::kCompletions, Endpoint::kChat}) {
    for (const FloatRule& rule : kFloatRules) {
      const std::string name(rule.name);
      if (name == "logit_bias") continue;
      EXPECT_TRUE(Ask(endpoint, name, "null").ok()) << name;
      EXPECT_TRUE(Ask(endpoint, name, absl::StrCat(rule.min)).ok()) << name;
      EXPECT_TRUE(Ask(endpoint, name, absl::StrCat(rule.max)).ok()) << name;
      EXPECT_TRUE(Ask(endpoint, name, absl::StrCat((rule.min + rule.max) / 2)).ok()) << name;
      for (const std::string& bad :
           {absl::StrCat(rule.min - 1), absl::StrCat(rule.max + 1), absl::StrCat(rule.max + 0.01),
            std::string("2147483648"), std::string("9223372036854775808"), std::string("1e308"), std::string("-1e308"),
            std::string("NaN"), std::string("\"0.5\""), std::string("false"), std::string("[]"), std::string("{}")})
        ExpectRefused(endpoint, name, bad);
    }
  }
  EXPECT_GT(cases_, 140);
}

TEST_F(Parameters, EveryFlagMustBeABoolean) {
  for (const char* name : {"stream", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
                           "spaces_between_special_tokens", "add_special_tokens", "return_token_ids",
                           "return_tokens_as_token_ids", "cache_prompt", "store", "parallel_tool_calls"}) {
    for (const Endpoint endpoint : {Endpoint::kCompletions, Endpoint::kChat}) {
      for (const char* good : {"true", "false", "null"}) EXPECT_TRUE(Ask(endpoint, name, good).ok()) << name;
      for (const char* bad : {"1", "0", "\"true\"", "[]", "{}", "1e308"}) ExpectRefused(endpoint, name, bad);
    }
  }
}

TEST_F(Parameters, LabelsMustBeStrings) {
  for (const char* name :
       {"user", "safety_identifier", "prompt_cache_key", "request_id", "service_tier", "cache_salt"}) {
    EXPECT_TRUE(Ask(Endpoint::kChat, name, "\"x\"").ok()) << name;
    EXPECT_TRUE(Ask(Endpoint::kChat, name, "null").ok()) << name;
    for (const char* bad : {"1", "true", "[]", "{}"}) ExpectRefused(Endpoint::kChat, name, bad);
    ExpectRefused(Endpoint::kChat, name, absl::StrCat("\"", std::string(513, 'x'), "\""));
  }
  ExpectRefused(Endpoint::kChat, "metadata", "[]");
}

TEST_F(Parameters, StopsAreBounded) {
  const auto strings = [](int count, int bytes) {
    std::string list = "[";
    for (int i = 0; i < count; ++i) absl::StrAppend(&list, i == 0 ? "" : ",", "\"", std::string(bytes, 'x'), "\"");
    return list + "]";
  };
  for (const auto& good : {std::string("\"x\""), std::string("\"\""), std::string("[]"), strings(16, 256)})
    EXPECT_TRUE(Ask(Endpoint::kCompletions, "stop", good).ok()) << good.substr(0, 20);
  for (const auto& bad : {strings(17, 1), strings(1, 257), std::string("[\"\"]"), std::string("[1]"), std::string("1"),
                          std::string("{}"), std::string("[null]")})
    ExpectRefused(Endpoint::kCompletions, "stop", bad);
  for (const char* bad : {"[-1]", "[262]", "[2147483648]", "[9223372036854775808]", "[\"1\"]", "[1.5]", "1", "{}"})
    for (const char* name : {"stop_token_ids", "allowed_token_ids"}) ExpectRefused(Endpoint::kCompletions, name, bad);
  ExpectRefused(Endpoint::kCompletions, "allowed_token_ids", "[]");
  EXPECT_TRUE(Ask(Endpoint::kCompletions, "bad_words", R"(["a","the"])").ok());
  ExpectRefused(Endpoint::kCompletions, "bad_words", R"(["ab"])");  // two tokens
}

TEST_F(Parameters, LogitBiasMapsTokenIdsToBoundedNumbers) {
  EXPECT_TRUE(Ask(Endpoint::kCompletions, "logit_bias", R"({"0":100,"261":-100,"7":0.5})").ok());
  for (const char* bad : {R"({"262":1})", R"({"-1":1})", R"({"x":1})", R"({"":1})", R"({"1":101})", R"({"1":-100.5})",
                          R"({"1":"1"})", R"({"1":null})", R"({"1":1e308})", R"({"7":1,"07":1})",
                          R"({"99999999999999999999":1})", R"({"+1":1})", "[]", "1"})
    ExpectRefused(Endpoint::kCompletions, "logit_bias", bad);
}

TEST_F(Parameters, PromptsAreTextOrTokenIds) {
  const auto ask = [&](const std::string& prompt) {
    const auto json = ParseJson(absl::StrCat(R"({"model":"bytes","prompt":)", prompt, "}"));
    const auto request = ParseCompletionRequest(*json, *model_);
    return request.ok() ? Prepare(*request, *model_, {}).status() : request.status();
  };
  for (const char* good : {"\"x\"", "[\"x\",\"y\"]", "[1,2]", "[[1,2],[3]]", "[[1],\"x\"]"})
    EXPECT_TRUE(ask(good).ok()) << good;
  for (const char* bad : {"null", "\"\"", "[]", "[[]]", "[\"\"]", "[-1]", "[262]", "[1.5]", "[null]", "[1,\"x\"]", "1",
                          "{}", "true", "[[[1]]]", "[9223372036854775808]"})
    EXPECT_EQ(ToApiError(ask(bad)).param.value_or("").substr(0, 6), "prompt") << bad;
  std::string many = "[\"x\"";
  for (int i = 0; i < kMaxPrompts; ++i) many += ",\"x\"";
  EXPECT_THAT(std::string(ask(many + "]").message()), HasSubstr("at most 128"));
}

TEST_F(Parameters, MessagesAreCheckedFieldByField) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"null", "messages"},
      {"[]", "messages"},
      {"\"hi\"", "messages"},
      {"[1]", "messages.0"},
      {R"([{"content":"x"}])", "messages.0.role"},
      {R"([{"role":"robot","content":"x"}])", "messages.0.role"},
      {R"([{"role":1,"content":"x"}])", "messages.0.role"},
      {R"([{"role":"user"}])", "messages.0.content"},
      {R"([{"role":"user","content":1}])", "messages.0.content"},
      {R"([{"role":"user","content":[1]}])", "messages.0.content.0"},
      {R"([{"role":"user","content":[{"text":"x"}]}])", "messages.0.content.0.type"},
      {R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])", "messages.0.content.0.type"},
      {R"([{"role":"user","content":[{"type":"text","text":"x"},{"type":"input_audio"}]}])",
       "messages.0.content.1.type"},
      {R"([{"role":"user","content":"x"},{"role":"tool","content":"x"}])", "messages.1.tool_call_id"},
      {R"([{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}])", "messages.0.tool_calls.0.function"},
  };
  for (const auto& [messages, param] : cases) {
    const auto json = ParseJson(absl::StrCat(R"({"model":"bytes","messages":)", messages, "}"));
    EXPECT_EQ(ToApiError(ParseChatRequest(*json, *model_).status()).param.value_or(""), param) << messages;
  }
  const auto parts = ParseMessages(
      *ParseJson(R"([{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])"));
  EXPECT_EQ(Dump(*parts), R"([{"role":"system","content":"a\nb"}])");
}

TEST_F(Parameters, WhatIsNotSupportedIsRefusedByName) {
  for (const UnsupportedField& field : UnsupportedFields()) {
    const std::string name(field.name);
    for (const Endpoint endpoint : {Endpoint::kCompletions, Endpoint::kChat}) {
      if (!(endpoint == Endpoint::kChat ? field.chat : field.completions)) continue;
      if (name != "messages" && name != "prompt") {
        EXPECT_TRUE(Ask(endpoint, name, "null").ok()) << name;
      }
      ExpectRefused(endpoint, name, R"([{"x":1}])");
    }
  }
  EXPECT_TRUE(Ask(Endpoint::kChat, "response_format", R"({"type":"text"})").ok());
  EXPECT_TRUE(Ask(Endpoint::kChat, "tools", "[]").ok());
  EXPECT_TRUE(Ask(Endpoint::kChat, "tool_choice", "\"none\"").ok());
  EXPECT_TRUE(Ask(Endpoint::kChat, "some_field_of_tomorrow", "1").ok());
  ExpectRefused(Endpoint::kChat, "top_n_sigma", "1.0");  // of llama-server
  EXPECT_TRUE(Ask(Endpoint::kChat, "top_n_sigma", "-1.0").ok());
  ExpectRefused(Endpoint::kCompletions, "regex", "\"a\"");  // of SGLang
  ExpectRefused(Endpoint::kChat, "reasoning_format", "\"none\"");
  for (const char* bad : {"\"auto\"", "\"required\""}) ExpectRefused(Endpoint::kChat, "tool_choice", bad);
  ExpectRefused(Endpoint::kChat, "response_format", R"({"type":"grammar"})");
  ExpectRefused(Endpoint::kChat, "chat_template", "\"{{ x }}\"");
  ExpectRefused(Endpoint::kChat, "chat_template_kwargs", R"({"chat_template":"{{ x }}"})");
  EXPECT_TRUE(Ask(Endpoint::kChat, "chat_template_kwargs", R"({"enable_thinking":false})").ok());
}

TEST_F(Parameters, CombinationsThatContradictAreRefused) {
  EXPECT_THAT(std::string(Ask(Endpoint::kCompletions, "best_of", "1", R"(,"n":2)").message()),
              StartsWith("best_of: 1 is less than n"));
  EXPECT_THAT(std::string(Ask(Endpoint::kCompletions, "best_of", "2", R"(,"stream":true)").message()),
              StartsWith("best_of:"));
  EXPECT_THAT(std::string(Ask(Endpoint::kChat, "top_logprobs", "2").message()),
              HasSubstr("only allowed when logprobs is true"));
  EXPECT_THAT(std::string(Ask(Endpoint::kChat, "stream_options", R"({"include_usage":true})").message()),
              HasSubstr("only allowed when stream"));
  EXPECT_THAT(std::string(Ask(Endpoint::kCompletions, "min_tokens", "17").message()),
              StartsWith("min_tokens: 17 is more than max_tokens"));
  EXPECT_THAT(
      std::string(Ask(Endpoint::kChat, "continue_final_message", "true", R"(,"add_generation_prompt":true)").message()),
      StartsWith("continue_final_message:"));
}

TEST_F(Parameters, BothNamesOfTheTokenLimitMayCome) {
  EXPECT_TRUE(
      Ask(Endpoint::kCompletions, "max_tokens", "8", R"(,"max_completion_tokens":8,"stop":null,"ignore_eos":true)")
          .ok());
  EXPECT_TRUE(Ask(Endpoint::kChat, "max_tokens", "8", R"(,"max_completion_tokens":8)").ok());
}

TEST_F(Parameters, SpellingsOfOtherServersMeanTheSame) {
  const auto ask = [&](const std::string& fields) {
    const auto request = ParseCompletionRequest(*ParseJson(absl::StrCat(R"({"prompt":"hi",)", fields, "}")), *model_);
    EXPECT_TRUE(request.ok()) << fields << ": " << request.status();
    return Prepare(*request, *model_, {.random_seed = 77})->requests[0];
  };
  const int fits = 4096 - 3;  // <bos>, h, i
  for (const char* name : {"max_tokens", "max_completion_tokens", "n_predict"}) {
    EXPECT_EQ(ask(absl::StrCat("\"", name, "\":-1")).max_tokens, fits) << name;
    EXPECT_EQ(ask(absl::StrCat("\"", name, "\":7")).max_tokens, 7) << name;
  }
  EXPECT_EQ(ask(R"("n_predict":7,"max_tokens":7)").max_tokens, 7);
  EXPECT_EQ(ask(R"("seed":-1)").sampling.seed, 77u);
  EXPECT_EQ(ask(R"("seed":-2)").sampling.seed, static_cast<uint64_t>(-2));
  EXPECT_FLOAT_EQ(ask(R"("repeat_penalty":1.5)").sampling.repetition_penalty, 1.5f);
  EXPECT_FLOAT_EQ(ask(R"("temperature":3.5)").sampling.temperature, 3.5f);
  EXPECT_TRUE(Ask(Endpoint::kChat, "repeat_last_n", "-1").ok());
  EXPECT_EQ(Ask(Endpoint::kChat, "n_predict", "7", R"(,"max_tokens":8)").message(),
            "n_predict: contradicts max_tokens, which is 8");
  EXPECT_EQ(Ask(Endpoint::kCompletions, "repeat_penalty", "1.5", R"(,"repetition_penalty":1.25)").message(),
            "repeat_penalty: contradicts repetition_penalty, which is 1.25");
}

// "<turn>" is the longest token: 6 bytes.
TEST_F(Parameters, ATextThatCannotFitIsRefusedByItsBytesAndOneThatCanIsNot) {
  const auto small = TestModel(/*max_model_len=*/32);
  const auto times = [](int count, const std::string& unit) {
    std::string text;
    for (int i = 0; i < count; ++i) text += unit;
    return text;
  };
  const auto error = [](const absl::Status& status) { return status.ok() ? ApiError{} : ToApiError(status); };
  const auto completion = [&](const std::string& text, const std::string& more = "") {
    const auto request = ParseCompletionRequest(
        *ParseJson(absl::StrCat(R"({"model":"bytes","prompt":")", text, "\"", more, "}")), *small);
    return error(Prepare(*request, *small, {}).status());
  };
  const auto chat = [&](const std::string& text) {
    const auto request = ParseChatRequest(
        *ParseJson(absl::StrCat(R"({"model":"bytes","messages":[{"role":"user","content":")", text, "\"}]}")), *small);
    return error(Prepare(*request, *small, {}).status());
  };
  const std::string shorten =
      ", but this model's maximum context length is 32 tokens for prompt and output; shorten it to at most 31";
  EXPECT_EQ(completion(times(30, "<turn>"), R"(,"max_tokens":1)").message, "") << "30 and <bos> fit";
  EXPECT_EQ(completion(times(31, "<turn>")).message, "prompt: 32 tokens" + shorten) << "counted, as it might have fit";
  EXPECT_EQ(completion(times(40, "<turn>")).message, "prompt: at least 40 tokens" + shorten);
  EXPECT_EQ(completion(times(40, "abcdef")).message, "prompt: at least 40 tokens" + shorten);
  EXPECT_EQ(completion(times(40, "<turn>")).n_prompt_tokens, 40);
  EXPECT_EQ(completion(times(40, "<turn>")).type, "exceed_context_size_error");
  EXPECT_EQ(completion(std::string(100, 'x')).message, "prompt: at least 65 tokens" + shorten) << "counted up to 64";
  EXPECT_EQ(completion(times(4000, "abcdef"), R"(,"truncate_prompt_tokens":8)").message, "") << "it is cut to length";
  EXPECT_EQ(chat(times(60, "abcdef")).message, "messages: at least 65 tokens" + shorten) << "6 bytes of <turn>user:";
  EXPECT_EQ(chat(std::string(15, 'x')).message, "messages: 32 tokens" + shorten);
}

TEST_F(Parameters, APromptThatDoesNotFitSaysByHowMuch) {
  const auto small = TestModel(/*max_model_len=*/32);
  const auto ask = [&](const std::string& fields) {
    const auto request = ParseCompletionRequest(*ParseJson(absl::StrCat(R"({"model":"bytes",)", fields, "}")), *small);
    return Prepare(*request, *small, {}).status();
  };
  const ApiError long_prompt = ToApiError(ask(absl::StrCat(R"("prompt":")", std::string(40, 'x'), "\"")));
  EXPECT_EQ(long_prompt.http_status, 400);
  EXPECT_EQ(long_prompt.type, "exceed_context_size_error");
  EXPECT_EQ(long_prompt.n_prompt_tokens, 41);
  EXPECT_EQ(long_prompt.n_ctx, 32);
  const ApiError long_output = ToApiError(ask(R"("prompt":"abcdefghi","max_tokens":23)"));
  EXPECT_EQ(
      long_output.message,
      "max_tokens: 23 exceeds what fits: this model's maximum context length is 32 tokens and the prompt uses 10; ask "
      "for at most 22");
  EXPECT_TRUE(ask(R"("prompt":"abcdefghi","max_tokens":22)").ok());
  EXPECT_TRUE(ask(absl::StrCat(R"("prompt":")", std::string(40, 'x'), R"(","truncate_prompt_tokens":-1)")).ok());
  EXPECT_TRUE(ask(absl::StrCat(R"("prompt":")", std::string(25, 'x'), "\"")).ok());  // the default of 16 is no demand
}

TEST_F(Parameters, DefaultsComeFromTheModel) {
  model_->defaults = {.temperature = 0.6f, .top_p = 0.9f, .top_k = 20};
  const auto request = ParseCompletionRequest(*ParseJson(R"({"model":"bytes","prompt":"x","top_p":0.5})"), *model_);
  const auto prepared = Prepare(*request, *model_, {.random_seed = 77});
  EXPECT_FLOAT_EQ(prepared->requests[0].sampling.temperature, 0.6f);
  EXPECT_FLOAT_EQ(prepared->requests[0].sampling.top_p, 0.5f);
  EXPECT_EQ(prepared->requests[0].sampling.top_k, 20);
  EXPECT_EQ(prepared->requests[0].sampling.seed, 77u);
}

}  // namespace
}  // namespace dovetail::server::test
