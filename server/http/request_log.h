#pragma once
#include "server/http/options.h"
#include "server/metrics/request_account.h"
#include "server/openai/prepare.h"

namespace dovetail::server {

// --enable-log-requests: a line as a request begins, with its parameters; where LogLevel::kDebug is kept another one
// with its prompts, as text where the model has a tokenizer.
// Threads: thread-safe; takes up to milliseconds, so it is not called on I/O threads.
void LogRequestBegin(const CallInfo& call, const PreparedGeneration& request, const ServedModel& model,
                     const RequestLogOptions& options);

}  // namespace dovetail::server
