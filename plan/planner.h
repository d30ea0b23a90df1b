#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "plan/catalogue.h"
#include "plan/cost.h"
#include "plan/device_profile.h"
#include "plan/model_work.h"
#include "plan/simulation.h"
#include "scheduler/core/scheduler.h"

// Which layout of machines serves a load cheapest: every layout is simulated (simulation.h) and charged (cost.h).
// Deterministic, no I/O.
// Threads: plain values and pure functions.

namespace dovetail::plan {

// What `share` of the requests must keep to. A limit that is not set always holds. Seconds.
struct Slo {
  std::optional<double> ttft_s, tpot_s, e2el_s;
  double share = 0.99;

  bool Holds(const RequestTimes& times) const;  // of a request that ended
};

struct PlanDevice {
  DeviceProfile profile;
  int64_t most = 1;  // that a layout may have
};

struct PlanInput {
  ModelWork work;
  std::vector<PlanDevice> devices;
  std::vector<Machines> hosts;             // charged with every layout
  std::vector<SimulatedRequest> requests;  // by time
  Slo slo;
  std::optional<double> budget;  // $/h
  Catalogue catalogue;
  PriceOf price = PriceOf::kLow;  // that layouts are compared by
  double utilization = 1;         // share of the hours that are under this load
  std::string lane = "shm";       // between workers: of the profiles, the slower of both
  std::optional<LinkRates> link;  // in place of a lane
  double memory_share = 0.9;      // of a device's, for weights and K and V
  int max_num_seqs = 256;
  int max_num_batched_tokens = 0;  // 0: what a server on the compute device takes by default
  scheduler::ItlBudget prefill_itl_budget;
  std::vector<std::vector<Machines>> only;  // these layouts and no others; empty: all that the devices allow
};

// What a layout is run with.
struct Setting {
  int micro_batches = 1;
  scheduler::PlacementPolicy placement = scheduler::PlacementPolicy::kRequest;
  int prefill_ranks = 1;
};

// Seconds and rates of a load, over its requests that ended.
struct Outcome {
  struct Percentiles {
    double p50 = 0, p90 = 0, p99 = 0, mean = 0;
  };
  Percentiles ttft, tpot, e2el;  // TPOT: of requests of more than one token
  Throughput throughput;
  double good_share = 0;  // of all requests
  bool stopped = false;   // once too many requests had missed the SLO: the rest was not simulated
  uint64_t steps = 0;
  double step_s = 0;  // mean
  StepParts parts;    // of all steps
  double compute_busy = 0, attention_busy = 0, most_kv_usage = 0, waiting_for_kv = 0;
  uint64_t preemptions = 0;
};

struct LayoutPlan {
  Layout layout;  // with the hosts
  bool split = false;
  Setting setting;
  double usd_low = 0, usd_high = 0;  // an hour
  std::string impossible;            // why it cannot serve this load at all; empty: it can
  Outcome outcome;
  bool meets = false;  // the SLO
  TokenCost low, high;
  std::string binds;  // what most of the time goes to, or "KV capacity"
  // The largest multiple of the load at which it still meets the SLO, and its output tokens/s there; 0: not looked for.
  double most_load = 0, most_output_tokens_s = 0;
};

struct BreakEven {
  double ratio_low = 0, ratio_high = 0;    // below which the split pays, at low and at high prices
  double prices_low = 0, prices_high = 0;  // the ratio that the prices have
};

struct Plan {
  std::vector<LayoutPlan> tried;  // by price
  std::optional<size_t> best, best_whole, best_split;
  std::optional<BreakEven> break_even;  // of best_split against best_whole
  int64_t left_out = 0;                 // layouts that cost more than one of their kind that meets the SLO
  int64_t over_budget = 0;
};

inline constexpr int64_t kMostLayouts = 2000;
inline constexpr double kMostLoad = 64;  // that is looked for

// kInvalidArgument: no device, no request, or more than kMostLayouts. kNotFound: a device without a price, or a profile
// that lacks what the model needs. Errors of Simulate but kFailedPrecondition, which makes a layout impossible.
absl::StatusOr<Plan> MakePlan(const PlanInput& input);

}  // namespace dovetail::plan
