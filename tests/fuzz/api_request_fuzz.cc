#include <memory>
#include <string_view>

#include "base/check.h"
#include "server/openai/api_error.h"
#include "server/openai/json.h"
#include "server/openai/llama_server.h"
#include "server/openai/prepare.h"
#include "server/openai/requests.h"
#include "server/openai/small_responses.h"
#include "tests/fuzz/targets.h"
#include "tests/server/test_model.h"

namespace dovetail::fuzz {
namespace {

using server::ToApiError;

// Refusals are the client's fault, and their envelope is JSON.
void CheckRefusal(const absl::Status& status) {
  const server::ApiError error = ToApiError(status);
  DT_CHECK(error.http_status == 400 || error.http_status == 404, status.ToString());
  DT_CHECK(server::ParseJson(server::ErrorBody(error)).ok());
}

void CheckGeneration(const absl::StatusOr<server::PreparedGeneration>& prepared, const server::ServedModel& model) {
  if (!prepared.ok()) return CheckRefusal(prepared.status());
  for (const requests::GenerationRequest& request : prepared->requests) {
    DT_CHECK(!request.prompt.empty() && request.max_tokens >= 1);
    DT_CHECK(static_cast<int>(request.prompt.size()) + request.max_tokens <= model.max_model_len,
             "beyond the positions");
    DT_CHECK(request.choices >= 1 && request.choices <= requests::kMaxChoices);
    DT_CHECK(request.min_tokens >= 0 && request.min_tokens <= request.max_tokens);
    DT_CHECK(request.sampling.temperature >= 0 && request.sampling.top_p > 0 && request.sampling.top_p <= 1);
    for (const TokenId id : request.prompt) DT_CHECK(id >= 0 && id < model.vocab_size);
  }
}

}  // namespace

// Any bytes as the body of each POST route: JSON that is refused, a request that is refused by name, or one that the
// engine can run.
void FuzzApiRequest(const uint8_t* data, size_t size) {
  static const std::shared_ptr<const server::ServedModel> model =
      server::test::TestModel(/*max_model_len=*/256, {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"});
  const auto json = server::ParseJson({reinterpret_cast<const char*>(data), size});
  if (!json.ok()) return CheckRefusal(json.status());
  for (const auto parse : {server::ParseCompletionRequest, server::ParseLlamaRequest, server::ParseInfillRequest}) {
    const auto completion = parse(*json, *model);
    if (completion.ok())
      CheckGeneration(server::Prepare(*completion, *model, {}), *model);
    else
      CheckRefusal(completion.status());
  }
  for (const auto parse : {server::ParseChatRequest, server::ParseResponsesRequest, server::ParseMessagesRequest}) {
    const auto chat = parse(*json, *model);
    if (chat.ok())
      CheckGeneration(server::Prepare(*chat, *model, {}), *model);
    else
      CheckRefusal(chat.status());
  }
  const auto tokenize = server::ParseTokenizeRequest(*json, *model);
  if (!tokenize.ok())
    CheckRefusal(tokenize.status());
  else if (const auto body = server::TokenizeBody(*tokenize, *model, model->max_model_len); !body.ok())
    CheckRefusal(body.status());
  const auto detokenize = server::ParseDetokenizeRequest(*json, *model);
  if (detokenize.ok())
    DT_CHECK(server::ParseJson(server::DetokenizeBody(*detokenize, *model)).ok());
  else
    CheckRefusal(detokenize.status());
}

}  // namespace dovetail::fuzz
