#pragma once
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/log.h"
#include "requests/generation.h"
#include "server/metrics/request_trace.h"
#include "server/metrics/server_metrics.h"

namespace dovetail::server {

// A call of one of a server's APIs, as its log names it.
struct CallInfo {
  std::string id;      // the client's, or ours
  std::string tenant;  // empty: not known
  std::string route;   // the path of an HTTP route, or the full name of a gRPC method
  absl::Time arrived;
  RequestTrace trace;
};

// The line of a call's end. `status`: the HTTP status, or the name of a gRPC code. `more` comes behind it.
// Threads: thread-safe.
void LogCallEnd(LogLevel level, const CallInfo& call, const std::string& status, absl::Time now, LogFields more = {});

// What /metrics and the log say of one generation request of a client, over all its prompts.
// Threads: thread-compatible.
class RequestAccount {
 public:
  // `metrics` outlives this.
  RequestAccount(ServerMetrics& metrics, CallInfo call) : metrics_(metrics), call_(std::move(call)) {}

  void AddPrompt(const requests::GenerationRequest& request);  // in the order of their numbers, from 0
  void Submitted(int prompt, absl::Time now);  // the engine took it; the first call counts, and an update says so, too
  void Updated(int prompt, int64_t cached_tokens, int64_t queued_us, absl::Time now);
  void Tokens(int prompt, int choice, int count, absl::Time now);  // output tokens that usage counts

  // Once: `ends` has one for each prompt. Counts the prompts that the engine took, logs the request, and
  // records its span if it is traced.
  void Finish(const std::string& status, const std::vector<RequestEnd>& ends, absl::Time now);

  const CallInfo& call() const { return call_; }

 private:
  struct Prompt {
    int64_t tokens = 0, max_tokens = 0, cached_tokens = 0, queued_us = 0;
    absl::Time submitted = absl::InfiniteFuture();  // not yet
    absl::Time first_token = absl::InfiniteFuture();
    std::vector<int64_t> choice_tokens;
    std::vector<absl::Time> last_token;  // by choice
  };

  // Of all prompts together: their tokens, the longest wait, the first token of all; the time between tokens is that of
  // the choice with most.
  struct Sums {
    std::string finish;
    int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0, queued_us = 0;
    absl::Time submitted = absl::InfiniteFuture(), first_token = absl::InfiniteFuture();
    int64_t largest_choice = 1;
    absl::Duration between_tokens = absl::ZeroDuration();  // if largest_choice > 1
  };

  RequestRecord RecordOf(const Prompt& prompt, RequestEnd end, absl::Time now) const;
  Sums SumsOf(const std::vector<RequestEnd>& ends) const;
  LogFields FieldsOf(const Sums& sums) const;
  void RecordSpan(const Sums& sums, const std::string& status, const std::vector<RequestEnd>& ends,
                  absl::Time now) const;

  ServerMetrics& metrics_;
  const CallInfo call_;
  std::vector<Prompt> prompts_;
  // Of the first prompt; the others have the same.
  int64_t max_tokens_ = 0;
  int choices_ = 0;
  float temperature_ = 1, top_p_ = 1;
};

}  // namespace dovetail::server
