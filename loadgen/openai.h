#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "http_client/http_client.h"
#include "loadgen/event_stream.h"
#include "loadgen/prompt_writer.h"
#include "loadgen/request.h"

// The OpenAI APIs as a client: what is sent, and what the chunks of an answer say.

namespace dovetail::loadgen {

enum class Backend : uint8_t { kOpenai, kOpenaiChat };  // completions, chat completions

struct ApiOptions {
  Backend backend = Backend::kOpenai;
  std::string endpoint;  // "/v1/completions"
  std::string model;     // as the server calls it
  bool ignore_eos = false;
  std::optional<int> logprobs;
  nlohmann::json extra_body = nlohmann::json::object();  // sampling parameters and --extra-body; wins over all else
  std::vector<std::pair<std::string, std::string>> headers;
};

// The streamed request, with usage asked for.
// Threads: pure.
http_client::HttpRequest MakeRequest(const ApiOptions& options, const PlannedRequest& planned);

// Reads one streamed answer into a RequestRecord. Times are seconds on the caller's clock, given with each piece. TTFT
// ends at the first chunk that has choices, each later one of them is an inter-token latency; tokens are those of
// usage. The latency of a completion ends with its last chunk of choices, of a chat with its last chunk of any kind (as
// vLLM's). An answer succeeds when a chunk with choices came and the stream ended properly: with [DONE], or after a
// finish_reason.
// Threads: thread-compatible.
class AnswerReader {
 public:
  // `tokenizer` counts tokens where usage is missing; may be null; outlives this.
  AnswerReader(Backend backend, const PlannedRequest& planned, LocalTokenCounter* tokenizer);

  void Begin(double planned_s, double now_s);
  void OnStatus(int status, const std::string& reason);
  // An error means that nothing more of this answer can be read.
  absl::Status OnBody(std::string_view bytes, double now_s);
  // The answer ended, or failed. The record is complete.
  void OnEnd(const absl::Status& status);

  const RequestRecord& record() const { return record_; }
  RequestRecord TakeRecord() { return std::move(record_); }
  int64_t chunks() const { return chunks_; }

 private:
  void OnEvent(std::string_view data, double now_s);
  void OnChoices(const nlohmann::json& choices, double now_s);
  void OnUsage(const nlohmann::json& usage);
  void CountTokens();
  void DoubtUsage();
  std::string FailureOf(const absl::Status& status) const;

  const Backend backend_;
  const int64_t asked_tokens_;
  LocalTokenCounter* const tokenizer_;
  RequestRecord record_;
  EventStream events_;
  double latest_s_ = 0;
  int status_ = 0;
  std::string reason_, error_body_, stream_error_;
  int64_t chunks_ = 0, chunks_with_text_ = 0;  // with choices; of those, with text
  std::optional<int64_t> usage_input_, usage_output_;
  bool done_ = false, finished_ = false;
};

// The message of an error body: error.message of OpenAI's, message, detail, else the body itself, shortened.
std::string ErrorText(const std::string& body);

}  // namespace dovetail::loadgen
