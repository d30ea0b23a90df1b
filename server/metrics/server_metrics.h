#pragma once
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/engine.h"
#include "server/metrics/http_stats.h"

namespace dovetail::server {

enum class RequestEnd { kStop, kLength, kAbort, kError };
const char* NameOf(RequestEnd end);  // "stop", "length", "abort", "error"

// What is known of a finished generation request (one per prompt), for histograms. Times are durations since it
// arrived.
struct RequestRecord {
  std::string tenant;
  RequestEnd end = RequestEnd::kStop;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t generation_tokens = 0;
  int64_t largest_choice = 0;  // tokens of the longest choice
  int choices = 1;
  int64_t max_tokens = 0;
  absl::Duration submitted;  // parsed, tokenised and handed to the engine
  absl::Duration queued;     // then waited for a place
  absl::Duration first_token = absl::InfiniteDuration();
  absl::Duration ended;
};

// Counters, gauges and histograms in Prometheus' text format: native names ("dovetail:...") and, for routers and
// dashboards that know vLLM, the same values under vLLM's names ("vllm:...", labels model_name and engine="0").
//
// Conservation: prompt and generation token counters equal the sums over the per-request histograms, and what `usage`
// says, for requests that ended well, were aborted, or failed.
// Threads: thread-safe.
class ServerMetrics {
 public:
  struct Info {
    std::string model_name;
    int max_model_len = 0;
    int block_size = 0;       // tokens
    int64_t block_count = 0;  // of that many tokens each, over all layers; 0: not known
    std::string version;
  };
  explicit ServerMetrics(const Info& info);
  ~ServerMetrics();

  void HttpResponse(const std::string& route, const std::string& method, int status);
  void GrpcResponse(const std::string& method, const std::string& code);
  void PromptAccepted(int64_t prompt_tokens);  // handed to the engine
  void FirstToken(absl::Duration since_arrival);
  void Tokens(int count, absl::Duration since_last);  // since_last: infinite for a choice's first
  void RequestFinished(const RequestRecord& record);
  void SlowReaderCancelled();

  // Takes over the engine's numbers. `samples` are steps since the last call.
  void Update(const engine::EngineStats& stats, const std::vector<engine::StepSample>& samples);
  void UpdateHttp(const HttpStats& stats);
  // Requests that wait for an engine's place, and those that wait for their grammar before.
  void UpdateWaiting(int for_a_place, int for_a_grammar);

  std::string Text() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::server
