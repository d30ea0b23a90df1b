#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/prefill_exchange.h"

// How a part of a prompt was planned, what was predicted of it, and what became of it.
// Threads: plain values and pure functions.

namespace dovetail::scheduler {

// What most of a predicted time is.
enum class PrefillBound : uint8_t { kDense, kAttention, kPlane, kLink };
const char* NameOf(PrefillBound bound);

// A step with one prompt, or a prefill group.
struct PrefillForecast {
  int ranks = 0;       // compute workers; 0: there is none yet
  int64_t tokens = 0;  // new ones
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  proto::LinearExchange linear = proto::LinearExchange::kStates;
  double predicted_s = 0;  // 0: the rates were not known
  double next_best_s = 0;  // predicted of the best other way, for as many tokens; 0: there was none
  double measured_s = 0;
  PrefillBound bound = PrefillBound::kDense;

  proto::PrefillWay way() const { return {exchange, linear}; }
};

// "4096 tokens on 2 ranks by plane: predicted 1.20 s, took 1.31 s; most of it is dense layers".
std::string Describe(const PrefillForecast& forecast);

// Of all forecasts that were measured: seconds.
struct PrefillTimes {
  double predicted_s = 0, measured_s = 0;
  double next_best_s = 0;  // of those that had another way, as predicted
  double had_other_s = 0;  // measured of the same ones
};
// By proto::IndexOf their way.
using PrefillTimesByWay = std::array<PrefillTimes, proto::kPrefillWays>;

}  // namespace dovetail::scheduler
