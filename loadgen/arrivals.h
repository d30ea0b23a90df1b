#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace dovetail::loadgen {

enum class RampUp : uint8_t { kNone, kLinear, kExponential };

// When requests are sent, in vLLM's terms.
struct ArrivalOptions {
  double request_rate = 0;  // requests/s; infinity: all at once
  double burstiness = 1;    // shape of the gamma distribution of gaps; 1: Poisson; infinity: equal gaps
  RampUp ramp_up = RampUp::kNone;
  double ramp_up_start_rps = 0;
  double ramp_up_end_rps = 0;

  // kInvalidArgument names the flag: a rate or a burstiness that is NaN, zero or negative, --ramp-up-* that do not fit
  // together or stand next to --request-rate.
  absl::Status Validate() const;
};

// The rate that request `index` of `count` is sent at.
double RateAt(const ArrivalOptions& options, int64_t index, int64_t count);

// Seconds from the start of the run at which each of `count` requests is sent, ascending. Gaps are drawn from a gamma
// distribution of shape b and scale 1 / (rate b). Without a ramp they are scaled so that the last request is sent at
// count / rate, which takes the 1-2 % out that the sum of random gaps would be off.
// Threads: pure; the same for one seed.
std::vector<double> ArrivalTimes(const ArrivalOptions& options, int64_t count, uint64_t seed);

}  // namespace dovetail::loadgen
