#include "tests/server/block_answers.h"

#include <gtest/gtest.h>

#include "model/tokenizer/tokenizer.h"
#include "server/openai/api_error.h"
#include "server/openai/generation_response.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

requests::GenerationUpdate Update(std::string_view text, std::optional<requests::FinishReason> reason = std::nullopt) {
  requests::GenerationUpdate update;
  for (const char c : text) update.tokens.push_back(static_cast<uint8_t>(c));
  update.choice_finished = update.request_finished = reason.has_value();
  if (reason) update.reason = *reason;
  if (reason == requests::FinishReason::kStop) update.tokens.push_back(update.stop_token = kEos);
  update.prompt_tokens = 3;
  update.cached_tokens = 2;
  return update;
}

}  // namespace

std::string PromptOf(const ServedModel& model, const absl::StatusOr<PreparedGeneration>& prepared) {
  if (!prepared.ok()) return prepared.status().ToString();
  return model.tokenizer->Decode(prepared->requests[0].prompt, /*skip_special=*/false);
}

void ExpectAbout(const std::string& param, const absl::Status& status) {
  ASSERT_FALSE(status.ok()) << param;
  EXPECT_EQ(ToApiError(status).param.value_or("none"), param) << status;
  EXPECT_EQ(std::string(status.message()).substr(0, param.size()), param) << status;
}

ResponseSpec WithBlocks(ResponseSpec spec, bool stream) {
  spec.stream = stream;
  spec.prompts = {{kBos, 'h', 'i'}};
  spec.answer.calls = FindCallFormat("hermes");
  spec.answer.thoughts = FindThoughtFormat("think");
  return spec;
}

std::vector<Json> EventsOf(const ResponseSpec& spec, std::string_view text, size_t piece,
                           requests::FinishReason reason) {
  GenerationResponse response(TestModel(), spec);
  std::string frames;
  for (size_t i = 0; i < text.size(); i += piece) frames += response.OnUpdate(0, Update(text.substr(i, piece))).frames;
  frames += response.OnUpdate(0, Update("", reason)).frames;
  std::vector<Json> events;
  for (size_t at = 0; (at = frames.find("event: ", at)) != std::string::npos; ++at) {
    const size_t data = frames.find("\ndata: ", at);
    events.push_back(Json::parse(frames.substr(data + 7, frames.find("\n\n", data) - data - 7)));
    EXPECT_EQ(frames.substr(at + 7, data - at - 7), events.back()["type"]);
  }
  return events;
}

Json BodyOf(const ResponseSpec& spec, std::string_view text, requests::FinishReason reason) {
  GenerationResponse response(TestModel(), spec);
  EXPECT_EQ(response.OnUpdate(0, Update(text)).frames, "");
  EXPECT_EQ(response.OnUpdate(0, Update("", reason)).frames, "");
  return Json::parse(response.Body());
}

}  // namespace dovetail::server::test
