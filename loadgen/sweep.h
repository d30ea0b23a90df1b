#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

// Rising request rates up to the knee: the highest rate at which a service level objective still holds.
// Threads: pure.

namespace dovetail::loadgen {

struct SweepOptions {
  std::vector<double> rates;  // requests/s, ascending
  double attainment = 0.9;    // the share of requests that have to meet the SLO
  int refine = 0;             // rates tried between the last that held and the first that did not, by halving

  // kInvalidArgument names the flag.
  absl::Status Validate() const;
};

// "1,2,4" or "1:64", which doubles from 1 to 64.
absl::StatusOr<std::vector<double>> ParseRates(const std::string& text);

struct SweepPoint {
  double rate = 0;
  double attained = 0;  // share of all requests, failed ones included, that met the SLO
};

// The rate to try after `points` (in the order they were tried); nullopt: the sweep has ended. It stops at the first
// rate that does not hold and then halves the distance to the last one that did, `refine` times.
std::optional<double> NextRate(const SweepOptions& options, const std::vector<SweepPoint>& points);

// What the sweep found: the highest rate that held and the lowest that did not, each where there is one.
struct Knee {
  std::optional<double> holds, fails;
};
Knee FindKnee(const SweepOptions& options, const std::vector<SweepPoint>& points);

}  // namespace dovetail::loadgen
