#pragma once
#include <cstdint>
#include <string>
#include <vector>

// One request of a load, before and after it was sent.
// Units: tokens are counts, times are seconds.
// Threads: plain values.

namespace dovetail::loadgen {

struct PlannedRequest {
  std::string prompt;      // text
  int64_t input_len = 0;   // tokens of the prompt, as far as they could be counted before; usage replaces it
  int64_t output_len = 1;  // asked for as max_tokens
  double at_s = 0;         // of a trace: when to send it, from the start of the run
  std::string id;          // becomes x-request-id
};

// What happened to it. Times of day are those of the clock that the run was given, from the start of the run.
struct RequestRecord {
  bool success = false;
  std::string error;  // one line; empty on success

  double planned_s = 0;       // when it was due: the arrival, or the moment a place under --max-concurrency became free
  double start_s = 0;         // when it was begun; vLLM's clock of a request begins here too
  double ttft_s = 0;          // from start_s to the first chunk with choices
  std::vector<double> itl_s;  // between chunks with choices
  double latency_s = 0;       // from start_s to the last chunk

  int64_t input_len = 0;
  int64_t output_len = 0;  // tokens: of usage, else as counted by CountedBy
  std::string text;

  enum class CountedBy : uint8_t { kUsage, kTokenizer, kChunks };
  CountedBy counted_by = CountedBy::kUsage;
  std::string usage_doubt;  // why usage cannot be true; empty: no doubt

  double end_s() const { return start_s + latency_s; }
  double lateness_s() const { return start_s > planned_s ? start_s - planned_s : 0; }
  // (latency - TTFT) / (tokens - 1); 0 with a single token.
  double tpot_s() const { return output_len > 1 ? (latency_s - ttft_s) / static_cast<double>(output_len - 1) : 0; }
};

}  // namespace dovetail::loadgen
