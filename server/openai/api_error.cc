#include "server/openai/api_error.h"

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "server/openai/json.h"

namespace dovetail::server {
namespace {

constexpr char kParam[] = "dovetail/param";
constexpr char kCode[] = "dovetail/code";
constexpr char kType[] = "dovetail/type";
constexpr char kPromptTokens[] = "dovetail/n_prompt_tokens";
constexpr char kContext[] = "dovetail/n_ctx";

std::optional<std::string> Payload(const absl::Status& status, const char* url) {
  const auto cord = status.GetPayload(url);
  if (!cord) return std::nullopt;
  return std::string(*cord);
}

std::optional<int64_t> NumberPayload(const absl::Status& status, const char* url) {
  const auto text = Payload(status, url);
  int64_t value = 0;
  if (!text || !absl::SimpleAtoi(*text, &value)) return std::nullopt;
  return value;
}

}  // namespace

namespace internal {
absl::Status WithParam(absl::Status status, const std::string& param) {
  status.SetPayload(kParam, absl::Cord(param));
  return status;
}
}  // namespace internal

absl::Status ContextExceeded(const std::string& param, int64_t n_prompt_tokens, int64_t n_ctx,
                             const std::string& message) {
  absl::Status status = BadField(param, message);
  status.SetPayload(kType, absl::Cord("exceed_context_size_error"));
  status.SetPayload(kCode, absl::Cord("context_length_exceeded"));
  status.SetPayload(kPromptTokens, absl::Cord(absl::StrCat(n_prompt_tokens)));
  status.SetPayload(kContext, absl::Cord(absl::StrCat(n_ctx)));
  return status;
}

absl::Status UnknownModel(const std::string& name) {
  absl::Status status = NotFound("The model `", name.size() <= 256 ? name : std::string("(a long name)"),
                                 "` does not exist; GET /v1/models lists what is served");
  status.SetPayload(kParam, absl::Cord("model"));
  status.SetPayload(kCode, absl::Cord("model_not_found"));
  return status;
}

ApiError ToApiError(const absl::Status& status, int overload_status) {
  ApiError error;
  error.message = std::string(status.message());
  error.param = Payload(status, kParam);
  error.code = Payload(status, kCode);
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      error.http_status = 400;
      error.type = Payload(status, kType).value_or("invalid_request_error");
      error.n_prompt_tokens = NumberPayload(status, kPromptTokens);
      error.n_ctx = NumberPayload(status, kContext);
      break;
    case absl::StatusCode::kUnauthenticated:
      error.http_status = 401;
      error.type = "authentication_error";
      error.code = "invalid_api_key";
      break;
    case absl::StatusCode::kNotFound:
      error.http_status = 404;
      error.type = "not_found_error";
      break;
    case absl::StatusCode::kResourceExhausted:
      error.http_status = overload_status;
      error.type = overload_status == 429 ? "rate_limit_error" : "overloaded_error";
      error.message = "The server's queue is full; try again shortly.";
      error.code = "overloaded";
      error.retry_after_s = 1;
      break;
    case absl::StatusCode::kAborted:
      error.http_status = 429;
      error.type = "rate_limit_error";
      error.message = "Your requests fill your part of the server's queue; try again shortly.";
      error.code = "rate_limit_exceeded";
      error.retry_after_s = 1;
      break;
    case absl::StatusCode::kUnavailable:
      error.http_status = 503;
      error.type = "unavailable_error";
      error.message = "The server cannot take requests now: it is loading, draining or recovering; try again shortly.";
      error.code = "unavailable";
      error.retry_after_s = 5;
      break;
    case absl::StatusCode::kDeadlineExceeded:
      error.http_status = 504;
      error.type = "timeout_error";
      error.code = "request_timeout";
      break;
    default:
      error.http_status = 500;
      error.type = "server_error";
      error.message = "The generation failed inside the server; the cause is in its log.";
      error.param.reset();
  }
  return error;
}

std::string ErrorBody(const ApiError& error) {
  Json inner = {{"message", error.message},
                {"type", error.type},
                {"param", error.param ? Json(*error.param) : Json()},
                {"code", error.code ? Json(*error.code) : Json()}};
  if (error.n_prompt_tokens) inner["n_prompt_tokens"] = *error.n_prompt_tokens;
  if (error.n_ctx) inner["n_ctx"] = *error.n_ctx;
  return Dump(Json{{"error", std::move(inner)}});
}

}  // namespace dovetail::server
