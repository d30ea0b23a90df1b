// Whole streams, byte by byte, as clients see them. No sockets: updates in, frames out.
#include <gtest/gtest.h>

#include "server/openai/generation_response.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

ResponseSpec Spec(Endpoint endpoint) {
  ResponseSpec spec;
  spec.endpoint = endpoint;
  spec.id = endpoint == Endpoint::kChat ? "chatcmpl-1" : "cmpl-1";
  spec.model = "bytes";
  spec.created = 1700000000;
  spec.stream = true;
  spec.prompts = {{kBos, 'h', 'i'}};
  return spec;
}

requests::GenerationUpdate Tokens(std::vector<TokenId> tokens, int choice = 0) {
  requests::GenerationUpdate update;
  update.choice = choice;
  for (const TokenId token : tokens)
    update.logprobs.push_back({{token, -0.5f, 1}, {{token, -0.5f, 1}, {'z', -1.5f, 2}}});
  update.tokens.assign(tokens.begin(), tokens.end());
  update.prompt_tokens = 3;
  update.cached_tokens = 2;
  return update;
}

requests::GenerationUpdate Finished(requests::GenerationUpdate update, requests::FinishReason reason,
                                    TokenId stop_token = -1) {
  update.choice_finished = true;
  update.reason = reason;
  update.stop_token = stop_token;
  return update;
}

std::string Transcript(ResponseSpec spec, const std::vector<requests::GenerationUpdate>& updates) {
  GenerationResponse response(TestModel(), std::move(spec));
  std::string all;
  for (const auto& update : updates) all += response.OnUpdate(0, update).frames;
  EXPECT_TRUE(response.done());
  return all;
}

TEST(SseGolden, AChat) {
  EXPECT_EQ(
      Transcript(Spec(Endpoint::kChat),
                 {Tokens({'H', 'e'}), Tokens({'y'}), Finished(Tokens({kEos}), requests::FinishReason::kStop, kEos)}),
      R"(data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{"role":"assistant","content":null},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{"content":"He"},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{"content":"y"},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}

data: [DONE]

)");
}

TEST(SseGolden, AChatWithUsageAndLogprobs) {
  ResponseSpec spec = Spec(Endpoint::kChat);
  spec.include_usage = true;
  spec.logprobs = 2;
  EXPECT_EQ(
      Transcript(spec, {Finished(Tokens({'H'}), requests::FinishReason::kLength)}),
      R"(data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{"role":"assistant","content":null},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{"content":"H"},"logprobs":{"content":[{"token":"H","logprob":-0.5,"bytes":[72],"top_logprobs":[{"token":"H","logprob":-0.5,"bytes":[72]},{"token":"z","logprob":-1.5,"bytes":[122]}]}],"refusal":null},"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}

data: [DONE]

)");
}

TEST(SseGolden, ACompletionOfTwoChoicesWithEchoAndAStopString) {
  ResponseSpec spec = Spec(Endpoint::kCompletions);
  spec.n = spec.best_of = 2;
  spec.echo = true;
  spec.stop = {"xy"};
  EXPECT_EQ(
      Transcript(spec, {Tokens({'a', 'x'}), Tokens({'b'}, 1), Tokens({'y', 'q'}),
                        Finished(Tokens({'x'}, 1), requests::FinishReason::kLength)}),
      R"(data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"text":"hia","logprobs":null,"finish_reason":null}]}

data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":1,"text":"hib","logprobs":null,"finish_reason":null}]}

data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":"xy"}]}

data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":1,"text":"x","logprobs":null,"finish_reason":"length","stop_reason":null}]}

data: [DONE]

)");
}

TEST(SseGolden, AFailureEndsWithAnErrorAndWithoutDone) {
  requests::GenerationUpdate failed;
  failed.choice_finished = true;
  failed.reason = requests::FinishReason::kError;
  failed.error = "secret";
  failed.error_code = absl::StatusCode::kInternal;
  EXPECT_EQ(
      Transcript(Spec(Endpoint::kCompletions), {Tokens({'a'}), failed, Tokens({'b'})}),
      R"(data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"bytes","system_fingerprint":"fp_dovetail","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}

data: {"error":{"message":"The generation failed inside the server; the cause is in its log.","type":"server_error","param":null,"code":null}}

)");
}

// What an engine says that is lost: once for the whole request, of its first choice.
requests::GenerationUpdate Lost() {
  requests::GenerationUpdate lost;
  lost.choice_finished = lost.request_finished = true;
  lost.reason = requests::FinishReason::kError;
  lost.error_code = absl::StatusCode::kUnavailable;
  return lost;
}

TEST(GenerationResponse, TheEndOfTheRequestEndsTheOthersOnceTheFirstChoiceHasEnded) {
  ResponseSpec spec = Spec(Endpoint::kCompletions);
  spec.n = spec.best_of = 2;
  for (const bool stream : {true, false}) {
    spec.stream = stream;
    GenerationResponse response(TestModel(), spec);
    response.OnUpdate(0, Finished(Tokens({'a'}), requests::FinishReason::kLength));
    response.OnUpdate(0, Tokens({'b'}, 1));
    const GenerationResponse::Effects effects = response.OnUpdate(0, Lost());
    EXPECT_TRUE(effects.done);
    EXPECT_TRUE(response.done());
    EXPECT_EQ(response.failure().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(effects.frames.rfind(R"(data: {"error":)", 0) == 0, stream) << effects.frames;
  }
}

TEST(GenerationResponse, TheLossOfTheEngineHarmsNoOtherPromptsWholeAnswer) {
  ResponseSpec spec = Spec(Endpoint::kCompletions);
  spec.prompts = {{kBos, 'h'}, {kBos, 'i'}};
  spec.stream = false;
  spec.stop = {"xy"};
  GenerationResponse response(TestModel(), spec);
  response.OnUpdate(0, Tokens({'a', 'x', 'y'}));  // ended here; the engine does not know yet
  EXPECT_FALSE(response.OnUpdate(0, Lost()).done);
  EXPECT_TRUE(response.OnUpdate(1, Finished(Tokens({'b'}), requests::FinishReason::kLength)).done);
  EXPECT_TRUE(response.failure().ok()) << response.failure();
}

}  // namespace
}  // namespace dovetail::server::test
