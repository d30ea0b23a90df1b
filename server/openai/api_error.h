#pragma once
#include <optional>
#include <string>

#include "base/status.h"

// Errors as OpenAI's clients expect them. Inside, an error is an absl::Status that may carry the field it is about; at
// the edge it becomes an ApiError with an HTTP status and the envelope {"error": {message, type, param, code}}.
// Threads: pure.

namespace dovetail::server {

struct ApiError {
  int http_status = 500;
  std::string message;
  std::string type = "server_error";
  std::optional<std::string> param;  // dotted path: "messages.0.content"
  std::optional<std::string> code;
  std::optional<int64_t> n_prompt_tokens, n_ctx;  // context overflow only
  int retry_after_s = 0;                          // > 0: a Retry-After header
};

// A field of the request is wrong. The text names it first: "n: 9 is above 8; ask for at most 8".
template <typename... Args>
absl::Status BadField(const std::string& param, const Args&... args);

// The prompt does not fit. `n_ctx` is the model's positions.
absl::Status ContextExceeded(const std::string& param, int64_t n_prompt_tokens, int64_t n_ctx,
                             const std::string& message);
absl::Status UnknownModel(const std::string& name);

// kInvalidArgument and kOutOfRange 400, kUnauthenticated 401, kNotFound 404, kAborted 429 (a tenant's own limit),
// kResourceExhausted `overload_status`, kUnavailable 503, kDeadlineExceeded 504 (a request's time is over),
// else 500 with a fixed text: what an internal error says (paths, addresses) never leaves the process.
ApiError ToApiError(const absl::Status& status, int overload_status = 503);

std::string ErrorBody(const ApiError& error);  // the envelope as JSON

namespace internal {
absl::Status WithParam(absl::Status status, const std::string& param);
}

template <typename... Args>
absl::Status BadField(const std::string& param, const Args&... args) {
  return internal::WithParam(InvalidArgument(param, ": ", args...), param);
}

}  // namespace dovetail::server
