#include "server/http/responses.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/openai/messages_answer.h"

namespace dovetail::server {

HttpResponse ErrorResponse(const ApiError& error) {
  HttpResponse response;
  response.status = error.http_status;
  response.body = ErrorBody(error);
  response.error = error;
  if (error.http_status == 429 || error.http_status == 503)
    response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_s > 0 ? error.retry_after_s : 1));
  if (error.http_status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  // What failed, is not there, or took its whole time would do so again.
  if (error.http_status == 500 || error.http_status == 501 || error.http_status == 504)
    response.headers.emplace_back("x-should-retry", "false");
  return response;
}

HttpResponse ErrorResponse(int status, const std::string& type, const std::string& message, const std::string& code) {
  ApiError error;
  error.http_status = status;
  error.type = type;
  error.message = message;
  if (!code.empty()) error.code = code;
  return ErrorResponse(error);
}

HttpResponse ErrorResponse(const absl::Status& status, int overload_status, int retry_after_s) {
  ApiError error = ToApiError(status, overload_status);
  if (absl::IsResourceExhausted(status) || absl::IsAborted(status)) error.retry_after_s = retry_after_s;
  return ErrorResponse(error);
}

void ShapeError(AnswerShape shape, HttpResponse& response) {
  if (shape == AnswerShape::kMessages && response.error) response.body = MessagesErrorBody(*response.error);
}

absl::Status RequestTimedOut(std::chrono::milliseconds limit) {
  return absl::DeadlineExceededError(
      absl::StrCat("The request was not finished after ", absl::FormatDuration(absl::FromChrono(limit)),
                   ", the most that this server gives one (--request-timeout); ask for less, or for fewer tokens."));
}

HttpResponse JsonResponse(std::string body) {
  HttpResponse response;
  response.body = std::move(body);
  return response;
}

}  // namespace dovetail::server
