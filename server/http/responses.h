#pragma once
#include <chrono>
#include <string>

#include "base/status.h"
#include "server/http/exchange.h"
#include "server/openai/answer.h"
#include "server/openai/api_error.h"

namespace dovetail::server {

// The envelope, and the headers that clients' retry logic reads: Retry-After on 429 and 503, x-should-retry: false on
// 500, 501 and 504.
// Threads: pure.
HttpResponse ErrorResponse(const ApiError& error);
HttpResponse ErrorResponse(int status, const std::string& type, const std::string& message,
                           const std::string& code = "");
// kDeadlineExceeded: what a request is told whose time is over.
absl::Status RequestTimedOut(std::chrono::milliseconds limit);

HttpResponse JsonResponse(std::string body);
// An error as the API of `shape` says it; anything else stays as it is.
void ShapeError(AnswerShape shape, HttpResponse& response);
// The answer to a request that ends with `status`; of an overload it says when to come again.
HttpResponse ErrorResponse(const absl::Status& status, int overload_status, int retry_after_s);

}  // namespace dovetail::server
