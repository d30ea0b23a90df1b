#pragma once
#include <string>

#include "server/http/exchange.h"
#include "server/openai/api_error.h"

namespace dovetail::server {

// The envelope, and the headers that clients' retry logic reads: Retry-After on 429 and 503, x-should-retry: false on
// 500. Pure.
HttpResponse ErrorResponse(const ApiError& error);
HttpResponse ErrorResponse(int status, const std::string& type, const std::string& message,
                           const std::string& code = "");
HttpResponse JsonResponse(std::string body);

}  // namespace dovetail::server
