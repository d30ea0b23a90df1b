#include "server/metrics/request_account.h"

#include <algorithm>
#include <cmath>

namespace dovetail::server {
namespace {

// To a microsecond: what is behind it is noise, and makes lines long.
double Milliseconds(absl::Duration duration) {
  return std::round(absl::ToDoubleMicroseconds(std::max(duration, absl::ZeroDuration()))) / 1000;
}

}  // namespace

void LogCallEnd(LogLevel level, const CallInfo& call, const std::string& status, absl::Time now, LogFields more) {
  if (!LogsAt(level)) return;
  LogFields fields = {{"request_id", call.id}};
  if (!call.tenant.empty()) fields.push_back({"tenant", call.tenant});
  fields.push_back({"route", call.route});
  fields.push_back({"status", status});
  for (LogField& field : more) fields.push_back(std::move(field));
  fields.push_back({"total_ms", Milliseconds(now - call.arrived)});
  LogLine(level, "request ended", std::move(fields));
}

void RequestAccount::AddPrompt(const requests::GenerationRequest& request) {
  if (prompts_.empty()) {
    max_tokens_ = request.max_tokens;
    choices_ = request.choices;
    temperature_ = request.sampling.temperature;
    top_p_ = request.sampling.top_p;
  }
  Prompt prompt;
  prompt.tokens = static_cast<int64_t>(request.prompt.size());
  prompt.max_tokens = request.max_tokens;
  prompt.choice_tokens.resize(request.choices);
  prompt.last_token.resize(request.choices, absl::InfiniteFuture());
  prompts_.push_back(std::move(prompt));
}

void RequestAccount::Submitted(int prompt, absl::Time now) {
  if (prompts_[prompt].submitted != absl::InfiniteFuture()) return;
  prompts_[prompt].submitted = now;
  metrics_.PromptAccepted(prompts_[prompt].tokens);
}

void RequestAccount::Updated(int prompt, int64_t cached_tokens, int64_t queued_us, absl::Time now) {
  Submitted(prompt, now);
  prompts_[prompt].cached_tokens = cached_tokens;
  prompts_[prompt].queued_us = queued_us;
}

void RequestAccount::Tokens(int number, int choice, int count, absl::Time now) {
  if (count == 0) return;
  Prompt& prompt = prompts_[number];
  if (prompt.first_token == absl::InfiniteFuture()) {
    prompt.first_token = now;
    metrics_.FirstToken(now - call_.arrived);
  }
  absl::Time& last = prompt.last_token[choice];
  metrics_.Tokens(count, last == absl::InfiniteFuture() ? absl::InfiniteDuration() : now - last);
  last = now;
  prompt.choice_tokens[choice] += count;
}

RequestRecord RequestAccount::RecordOf(const Prompt& prompt, RequestEnd end, absl::Time now) const {
  RequestRecord record;
  record.tenant = call_.tenant;
  record.end = end;
  record.prompt_tokens = prompt.tokens;
  record.cached_tokens = prompt.cached_tokens;
  for (const int64_t tokens : prompt.choice_tokens) {
    record.generation_tokens += tokens;
    record.largest_choice = std::max(record.largest_choice, tokens);
  }
  record.choices = static_cast<int>(prompt.choice_tokens.size());
  record.max_tokens = prompt.max_tokens;
  record.submitted = prompt.submitted - call_.arrived;
  record.queued = absl::Microseconds(prompt.queued_us);
  if (prompt.first_token != absl::InfiniteFuture()) record.first_token = prompt.first_token - call_.arrived;
  record.ended = now - call_.arrived;
  return record;
}

RequestAccount::Sums RequestAccount::SumsOf(const std::vector<RequestEnd>& ends) const {
  Sums sums;
  for (size_t p = 0; p < prompts_.size(); ++p) {
    const std::string end = NameOf(ends[p]);
    if (sums.finish.find(end) == std::string::npos) absl::StrAppend(&sums.finish, sums.finish.empty() ? "" : ",", end);
    const Prompt& prompt = prompts_[p];
    sums.prompt_tokens += prompt.tokens;
    sums.cached_tokens += prompt.cached_tokens;
    sums.queued_us = std::max(sums.queued_us, prompt.queued_us);
    sums.submitted = std::min(sums.submitted, prompt.submitted);
    sums.first_token = std::min(sums.first_token, prompt.first_token);
    for (size_t c = 0; c < prompt.choice_tokens.size(); ++c) {
      sums.output_tokens += prompt.choice_tokens[c];
      if (prompt.choice_tokens[c] <= sums.largest_choice) continue;
      sums.largest_choice = prompt.choice_tokens[c];
      sums.between_tokens = (prompt.last_token[c] - prompt.first_token) / static_cast<double>(sums.largest_choice - 1);
    }
  }
  return sums;
}

LogFields RequestAccount::FieldsOf(const Sums& sums) const {
  LogFields fields = {{"finish", sums.finish},
                      {"prompt_tokens", sums.prompt_tokens},
                      {"cached_tokens", sums.cached_tokens},
                      {"output_tokens", sums.output_tokens},
                      {"queue_ms", Milliseconds(absl::Microseconds(sums.queued_us))}};
  if (sums.first_token != absl::InfiniteFuture())
    fields.push_back({"ttft_ms", Milliseconds(sums.first_token - call_.arrived)});
  if (sums.largest_choice > 1) fields.push_back({"itl_ms", Milliseconds(sums.between_tokens)});
  if (call_.trace.sink != nullptr) fields.push_back({"trace_id", TraceIdText(call_.trace.context)});
  return fields;
}

// The name and the attributes that vLLM gives its span of a request.
void RequestAccount::RecordSpan(const Sums& sums, const std::string& status, const std::vector<RequestEnd>& ends,
                                absl::Time now) const {
  if (call_.trace.sink == nullptr) return;
  Span span{.parent = call_.trace.context, .id = call_.trace.context.span, .name = "llm_request", .of_server = true};
  span.parent.span = call_.trace.parent;
  span.begin = call_.arrived;
  span.end = now;
  span.attributes = {{"gen_ai.request.id", call_.id},
                     {"gen_ai.request.max_tokens", max_tokens_},
                     {"gen_ai.request.n", int64_t{choices_}},
                     {"gen_ai.request.temperature", double{temperature_}},
                     {"gen_ai.request.top_p", double{top_p_}},
                     {"gen_ai.usage.prompt_tokens", sums.prompt_tokens},
                     {"gen_ai.usage.completion_tokens", sums.output_tokens},
                     {"gen_ai.latency.time_in_queue", static_cast<double>(sums.queued_us) * 1e-6},
                     {"gen_ai.latency.e2e", absl::ToDoubleSeconds(now - call_.arrived)},
                     {"dovetail.cached_tokens", sums.cached_tokens},
                     {"dovetail.finish", sums.finish},
                     {"dovetail.tenant", call_.tenant},
                     {"dovetail.status", status},
                     {"url.path", call_.route}};
  if (sums.first_token != absl::InfiniteFuture()) {
    const absl::Time admitted = sums.submitted + absl::Microseconds(sums.queued_us);
    span.attributes.push_back(
        {"gen_ai.latency.time_to_first_token", absl::ToDoubleSeconds(sums.first_token - call_.arrived)});
    span.attributes.push_back(
        {"gen_ai.latency.time_in_model_prefill", absl::ToDoubleSeconds(sums.first_token - admitted)});
    span.attributes.push_back({"gen_ai.latency.time_in_model_decode", absl::ToDoubleSeconds(now - sums.first_token)});
  }
  if (std::find(ends.begin(), ends.end(), RequestEnd::kError) != ends.end())
    span.error = absl::StrCat("the request ended with an error; status ", status);
  call_.trace.sink->Add(std::move(span));
}

void RequestAccount::Finish(const std::string& status, const std::vector<RequestEnd>& ends, absl::Time now) {
  for (size_t p = 0; p < prompts_.size(); ++p)
    if (prompts_[p].submitted != absl::InfiniteFuture()) metrics_.RequestFinished(RecordOf(prompts_[p], ends[p], now));
  const Sums sums = SumsOf(ends);
  LogCallEnd(LogLevel::kInfo, call_, status, now, FieldsOf(sums));
  RecordSpan(sums, status, ends, now);
}

}  // namespace dovetail::server
