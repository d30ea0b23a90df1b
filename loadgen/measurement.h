#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loadgen/request.h"

// The arithmetic of `vllm bench serve`, on the records of a run. Latencies are in milliseconds in what is reported and
// in seconds in records.
// Threads: pure.

namespace dovetail::loadgen {

enum class Metric : uint8_t { kTtft, kTpot, kItl, kE2el };
inline constexpr std::array<Metric, 4> kMetrics = {Metric::kTtft, Metric::kTpot, Metric::kItl, Metric::kE2el};
const char* NameOf(Metric metric);  // "ttft"

// Upper limits in milliseconds; a limit that is not set always holds.
struct Goodput {
  std::optional<double> ttft_ms, tpot_ms, e2el_ms;

  bool any() const { return ttft_ms.has_value() || tpot_ms.has_value() || e2el_ms.has_value(); }
  bool Holds(const RequestRecord& record) const;  // of a request that succeeded; one token has a TPOT of 0
};

struct Distribution {
  int64_t count = 0;
  double mean_ms = 0, median_ms = 0, std_ms = 0;  // std of the values as the whole population
  std::vector<double> percentiles_ms;             // of the percentiles asked for, linear between ranks
};

struct Measurement {
  double duration_s = 0;
  int64_t completed = 0, failed = 0;
  int64_t good = 0, good_output_tokens = 0;                 // requests that met every limit, and their tokens
  int64_t total_input_tokens = 0, total_output_tokens = 0;  // of requests that succeeded
  double request_throughput = 0, request_goodput = 0;       // per second of duration_s
  double output_throughput = 0, total_token_throughput = 0;
  double max_output_tokens_per_s = 0;   // chunks in the fullest second since the first request
  int64_t max_concurrent_requests = 0;  // that touched the same second
  std::array<Distribution, 4> of;       // by Metric
  const Distribution& Of(Metric metric) const { return of[static_cast<size_t>(metric)]; }
};

// `duration_s`: from the start of the run to its last answer. Failed requests count as failed and in nothing else.
// TPOT is over requests of more than one token, ITL over all gaps between chunks.
Measurement Measure(std::span<const RequestRecord> records, double duration_s, std::span<const double> percentiles,
                    const Goodput& goodput);

// The stretch of a run in which the load neither builds up nor drains: from the first end of a request to the last
// start of one. nullopt where it is empty, as when all are sent at once.
struct SteadyWindow {
  double begin_s = 0, end_s = 0;
  double seconds() const { return end_s - begin_s; }
};
std::optional<SteadyWindow> FindSteadyWindow(std::span<const RequestRecord> records);

// Of that stretch: latencies of the requests that began in it, however late they ended; input tokens of the first
// tokens that came in it; output tokens that came in it, those of a request spread evenly over its chunks; requests
// that ended in it.
Measurement MeasureSteady(std::span<const RequestRecord> records, const SteadyWindow& window,
                          std::span<const double> percentiles, const Goodput& goodput);

// How late the client itself was with sending.
struct Lateness {
  double mean_ms = 0, p99_ms = 0, max_ms = 0;
};
Lateness LatenessOf(std::span<const RequestRecord> records);

}  // namespace dovetail::loadgen
