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

void RequestAccount::AddPrompt(int64_t tokens, int64_t max_tokens, int choices) {
  Prompt prompt;
  prompt.tokens = tokens;
  prompt.max_tokens = max_tokens;
  prompt.choice_tokens.resize(choices);
  prompt.last_token.resize(choices, absl::InfiniteFuture());
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

// Of several prompts: their tokens together, the longest wait, the first token of all; the time between tokens is that
// of the choice with most.
LogFields RequestAccount::FieldsOf(const std::vector<RequestEnd>& ends) const {
  std::string finish;
  int64_t prompt_tokens = 0, cached = 0, output = 0, queued_us = 0, most = 1;
  absl::Time first = absl::InfiniteFuture();
  absl::Duration between = absl::ZeroDuration();
  for (size_t p = 0; p < prompts_.size(); ++p) {
    const std::string end = NameOf(ends[p]);
    if (finish.find(end) == std::string::npos) absl::StrAppend(&finish, finish.empty() ? "" : ",", end);
    const Prompt& prompt = prompts_[p];
    prompt_tokens += prompt.tokens;
    cached += prompt.cached_tokens;
    queued_us = std::max(queued_us, prompt.queued_us);
    first = std::min(first, prompt.first_token);
    for (size_t c = 0; c < prompt.choice_tokens.size(); ++c) {
      output += prompt.choice_tokens[c];
      if (prompt.choice_tokens[c] <= most) continue;
      most = prompt.choice_tokens[c];
      between = (prompt.last_token[c] - prompt.first_token) / static_cast<double>(most - 1);
    }
  }
  LogFields fields = {{"finish", finish},
                      {"prompt_tokens", prompt_tokens},
                      {"cached_tokens", cached},
                      {"output_tokens", output},
                      {"queue_ms", Milliseconds(absl::Microseconds(queued_us))}};
  if (first != absl::InfiniteFuture()) fields.push_back({"ttft_ms", Milliseconds(first - call_.arrived)});
  if (most > 1) fields.push_back({"itl_ms", Milliseconds(between)});
  return fields;
}

void RequestAccount::Finish(const std::string& status, const std::vector<RequestEnd>& ends, absl::Time now) {
  for (size_t p = 0; p < prompts_.size(); ++p)
    if (prompts_[p].submitted != absl::InfiniteFuture()) metrics_.RequestFinished(RecordOf(prompts_[p], ends[p], now));
  LogCallEnd(LogLevel::kInfo, call_, status, now, FieldsOf(ends));
}

}  // namespace dovetail::server
