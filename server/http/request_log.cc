#include "server/http/request_log.h"

#include "base/log.h"
#include "server/openai/prompt_text.h"

namespace dovetail::server {
namespace {

LogFields ParametersOf(const CallInfo& call, const PreparedGeneration& request) {
  const requests::GenerationRequest& first = request.requests.front();
  const proto::SamplingParams& sampling = first.sampling;
  int64_t tokens = 0;
  for (const auto& one : request.requests) tokens += static_cast<int64_t>(one.prompt.size());
  LogFields fields = {{"request_id", call.id},
                      {"tenant", call.tenant},
                      {"route", call.route},
                      {"prompts", static_cast<int64_t>(request.requests.size())},
                      {"prompt_tokens", tokens},
                      {"max_tokens", int64_t{first.max_tokens}},
                      {"n", int64_t{request.spec.n}},
                      {"stream", int64_t{request.spec.stream}},
                      {"temperature", double{sampling.temperature}},
                      {"top_p", double{sampling.top_p}},
                      {"top_k", int64_t{sampling.top_k}},
                      {"min_p", double{sampling.min_p}}};
  if (!request.spec.stop.empty()) fields.push_back({"stop_strings", static_cast<int64_t>(request.spec.stop.size())});
  if (first.prompt_logprobs >= 0) fields.push_back({"prompt_logprobs", int64_t{first.prompt_logprobs}});
  if (request.spec.logprobs >= 0) fields.push_back({"logprobs", int64_t{request.spec.logprobs}});
  return fields;
}

}  // namespace

void LogRequestBegin(const CallInfo& call, const PreparedGeneration& request, const ServedModel& model,
                     const RequestLogOptions& options) {
  if (!options.begins || !LogsAt(LogLevel::kInfo)) return;
  LogLine(LogLevel::kInfo, "request begins", ParametersOf(call, request));
  if (!LogsAt(LogLevel::kDebug)) return;
  for (size_t p = 0; p < request.requests.size(); ++p)
    LogLine(LogLevel::kDebug, "prompt",
            {{"request_id", call.id},
             {"number", static_cast<int64_t>(p)},
             {"prompt", PromptText(request.requests[p].prompt, model, options.max_prompt_length)}});
}

}  // namespace dovetail::server
