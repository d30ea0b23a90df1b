#include "loadgen/arrivals.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace dovetail::loadgen {

absl::Status ArrivalOptions::Validate() const {
  if (std::isnan(request_rate) || request_rate <= 0)
    return InvalidArgument("--request-rate: ", request_rate, " is not a rate; give requests per second, or inf");
  if (std::isnan(burstiness) || burstiness <= 0)
    return InvalidArgument("--burstiness: ", burstiness, " is not positive; 1 is a Poisson process");
  if (ramp_up == RampUp::kNone) {
    if (ramp_up_start_rps != 0 || ramp_up_end_rps != 0)
      return InvalidArgument("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy");
    return absl::OkStatus();
  }
  if (std::isfinite(request_rate))
    return InvalidArgument("--request-rate: --ramp-up-strategy sets the rate; leave one of the two out");
  if (!(ramp_up_start_rps >= 0) || !(ramp_up_end_rps > 0) || !std::isfinite(ramp_up_end_rps))
    return InvalidArgument("--ramp-up-strategy: needs --ramp-up-start-rps of at least 0 and a positive",
                           " --ramp-up-end-rps");
  if (ramp_up_start_rps > ramp_up_end_rps)
    return InvalidArgument("--ramp-up-start-rps: ", ramp_up_start_rps, " is more than --ramp-up-end-rps ",
                           ramp_up_end_rps);
  if (ramp_up_start_rps == 0)
    return InvalidArgument("--ramp-up-start-rps: a ramp from 0 never sends its first request; begin with more than 0");
  return absl::OkStatus();
}

double RateAt(const ArrivalOptions& options, int64_t index, int64_t count) {
  if (options.ramp_up == RampUp::kNone) return options.request_rate;
  const double progress = static_cast<double>(index) / static_cast<double>(std::max<int64_t>(count - 1, 1));
  const double start = options.ramp_up_start_rps, end = options.ramp_up_end_rps;
  if (options.ramp_up == RampUp::kLinear) return start + (end - start) * progress;
  return start * std::pow(end / start, progress);
}

std::vector<double> ArrivalTimes(const ArrivalOptions& options, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<double> times(static_cast<size_t>(count));
  double now = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double rate = RateAt(options, i, count);
    if (std::isinf(options.burstiness)) {
      now += 1 / rate;
    } else if (std::isfinite(rate)) {
      now += std::gamma_distribution<double>(options.burstiness, 1 / (rate * options.burstiness))(random);
    }
    times[static_cast<size_t>(i)] = now;
  }
  if (options.ramp_up == RampUp::kNone && now > 0) {
    const double scale = static_cast<double>(count) / options.request_rate / now;
    for (double& time : times) time *= scale;
  }
  return times;
}

}  // namespace dovetail::loadgen
