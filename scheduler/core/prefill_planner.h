#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "proto/placement.h"
#include "proto/prefill_exchange.h"
#include "proto/step_plan.h"
#include "scheduler/core/prefill_cost.h"
#include "scheduler/core/prefill_forecast.h"
#include "scheduler/core/rate_estimator.h"

// Chooses how a prompt is prefilled: by which compute workers, with which cuts, and how they see earlier tokens. It
// predicts times from rates that it has learnt from steps, and learns how far its predictions are off.

namespace dovetail::scheduler {

struct PrefillPlannerOptions {
  // Nothing: the one that is predicted to be fastest. See proto::ExchangeOf.
  std::optional<proto::PrefixExchange> exchange;
  std::optional<proto::LinearExchange> linear;  // of a group in a model with linear layers
  bool choose_ranks = true;                     // else as many as there may be
  int max_step_tokens = 2048;                   // of a rank
  int rank_tokens = 1024;  // of a prompt that is divided: so many for each rank, or there are fewer ranks (RanksFor)
};

// That hold a part of a sequence, each once, in the order of the shards.
absl::InlinedVector<WorkerId, 4> AttentionWorkersOf(const proto::Placement& placement);

// A prompt whose tokens from ctx_len on are to be computed.
struct PromptToPlan {
  Position ctx_len = 0, end = 0;
  std::span<const WorkerId> attention_workers;  // where it lies
  Position divided = 0;  // tokens that were to be computed when its first group began; 0: it had none
  int most_tokens = 0;   // of a rank in a step, if that is less than max_step_tokens; 0: it is not
  // The compute worker in whose pair it lies whole. Steps there, of no group, are attended where it lies.
  std::optional<WorkerId> pair = std::nullopt;
};

// A compute worker that is free, and what it has of the prompt.
struct FreeRank {
  WorkerId worker;
  HeldTokens held;
};

// Of a step: the tokens, and where its group begins; where the tokens do if it is no rank's.
struct RankTokens {
  Position base = 0, begin = 0, end = 0;
  Position given_back_to = 0;  // PromptStep::given_back: the group's end; 0: nothing is
};

struct PrefillChoice {
  std::vector<Position> cuts;     // where the ranks' parts begin, and the end; two: an ordinary step
  std::vector<size_t> free_rank;  // by rank: which of the free ones it is; rising
  PrefillForecast forecast;       // of this step or group
  bool gives_back = false;        // StepPlan::gives_back
  // Of a rank.
  RankTokens tokens(int rank) const {
    return {cuts.front(), cuts[static_cast<size_t>(rank)], cuts[static_cast<size_t>(rank) + 1],
            gives_back ? cuts.back() : 0};
  }
  int ranks() const { return static_cast<int>(cuts.size()) - 1; }
};

// What it keeps of a worker goes with Forget...; the rest is of fixed size.
// Threads: thread-compatible; deterministic.
class PrefillPlanner {
 public:
  // `table` outlives it.
  PrefillPlanner(const proto::AttentionTable& table, const PrefillPlannerOptions& options)
      : table_(table), options_(options) {}

  // The next step or group of `prompt`, over the fastest of `free`, at most `most_ranks` of them.
  //   Requires: a token to be computed, free.size() >= most_ranks >= 1
  //   Sizes:    a prompt has as few groups as can take it, of about equal sizes (EndOfGroup); or one more, where a step
  //             is too small for a rank's fair part of a group and smaller groups are predicted to be faster
  PrefillChoice Choose(const PromptToPlan& prompt, std::span<const FreeRank> free, int most_ranks) const;

  // How many of `most_ranks` may take the next part of it: 1 if it is not to be divided.
  int RanksFor(const PromptToPlan& prompt, int most_ranks) const {
    return RanksFrom(prompt, prompt.ctx_len, most_ranks);
  }

  // The exchange of a step that is planned already: `tokens` from ctx_len on, on this compute worker.
  PrefillForecast ChooseExchange(const PromptToPlan& prompt, const FreeRank& rank, int tokens) const;

  // Seconds that the compute worker needs for tokens [begin, end) of a prompt if it does nothing else and has the
  // tokens before them; 0: its rates are not known. `in_pair`: the prompt lies in its pair.
  double SecondsAlone(WorkerId worker, Position begin, Position end, bool in_pair) const;

  // What a compute worker has of a prompt after such a step.
  HeldTokens HeldAfter(const PromptToPlan& prompt, const FreeRank& rank, const RankTokens& tokens,
                       proto::PrefixExchange exchange) const;

  // A step went well: rates of its compute worker, and of the attention workers where its one prompt lies (no prompt,
  // or several: empty).
  // follows_a_rank: it has waited for other ranks, so its waiting says nothing about a link.
  // shortened: it had few tokens for the sake of streams, so its dense layers say little about what a token costs.
  void Learn(WorkerId compute_worker, std::span<const WorkerId> attention_workers, const proto::StepResult& result,
             bool follows_a_rank, bool shortened = false);
  // What was predicted took so long.
  void LearnTime(const PrefillForecast& measured);
  // The same, of parts of several prompts in one step: it is nothing to report.
  void LearnCorrection(int ranks, const proto::PrefillWay& by, double predicted_s, double measured_s);
  void ForgetComputeWorker(WorkerId worker);
  void ForgetAttentionWorker(WorkerId worker) { plane_.erase(worker); }

  // Whether the two reach each other: only then may they be ranks of a group that exchanges directly, unless that is
  // forced. At first no two do.
  void Link(WorkerId one, WorkerId other, bool linked);

  const PrefillForecast& last() const { return last_; }  // of LearnTime
  const PrefillTimesByWay& times() const { return times_; }

  // For reports: the medians of all workers.
  ComputeRates compute_rates() const;
  PlaneRates plane_rates() const;
  std::optional<double> link_byte_s() const;  // between compute workers

 private:
  struct Compute {
    RateEstimator token, flop;
    uint64_t learnt = 0;                   // learnt_ when it was measured last
    uint32_t scratch_blocks = UINT32_MAX;  // unknown
    bool gives_rows = false, passes_on_rows = false, switches_heads = false, gives_states = false;
  };
  struct Plane {
    RateEstimator flop, byte;
  };
  struct Correction {
    RateEstimator ratio;    // measured over predicted
    uint64_t measured = 0;  // measured_ when it was noted last
  };
  struct Way {
    int ranks = 1;
    proto::PrefillWay by;
    auto operator<=>(const Way&) const = default;
  };
  // What does not change while ways are compared.
  struct Ranks {
    std::vector<FreeRank> free;  // in the order in which they become ranks: that of the choice's `free_rank`
    std::vector<size_t> index;   // of Choose's `free`
    std::vector<ComputeRates> rates;
  };

  std::vector<proto::PrefillWay> Ways(std::span<const FreeRank> ranks) const;
  bool MayGive(std::span<const FreeRank> ranks, bool Compute::*what) const;
  std::optional<ComputeRates> RatesOf(WorkerId worker, bool in_pair = false) const;
  PlaneRates RatesOf(std::span<const WorkerId> attention_workers) const;
  std::optional<double> LinkRateOf(std::span<const FreeRank> before, WorkerId rank) const;
  double CorrectionOf(const Way& way) const;
  double SecondsOfToken(const ComputeRates& rates, const PlaneRates& plane, proto::PrefixExchange exchange,
                        double seen) const;
  Ranks FastestOf(std::span<const FreeRank> free, int count, std::span<const ComputeRates> rates) const;
  int RanksFrom(const PromptToPlan& prompt, Position base, int most_ranks) const;
  int StepTokensOf(const PromptToPlan& prompt) const;
  std::vector<Position> CutsOf(const PromptToPlan& prompt, Position base, const Way& way,
                               std::span<const ComputeRates> rates, const PlaneRates& plane, int more_groups = 0) const;
  bool GivesBack(const PromptToPlan& prompt, std::span<const FreeRank> ranks, std::span<const Position> cuts,
                 const proto::PrefillWay& by) const;
  PromptStep StepOf(const PromptToPlan& prompt, const FreeRank& rank, const RankTokens& tokens,
                    proto::PrefixExchange exchange) const;
  // Seconds until all tokens before `horizon` are computed; the first step or group in `first`. What is left is divided
  // into so many groups more than it needs.
  double TimeTo(Position horizon, const PromptToPlan& prompt, Ranks ranks, const Way& way, int more_groups,
                PrefillChoice& first) const;
  double BestTimeTo(Position horizon, const PromptToPlan& prompt, const Ranks& ranks, const Way& way,
                    PrefillChoice& first) const;
  PrefillChoice WithoutRates(const PromptToPlan& prompt, std::span<const FreeRank> free) const;
  int MostRanks() const;
  static proto::PrefillWay WayOf(const Way& way, int ranks);

  const proto::AttentionTable& table_;
  const PrefillPlannerOptions options_;
  std::map<WorkerId, Compute> compute_;
  std::map<WorkerId, Plane> plane_;
  std::set<std::pair<WorkerId, WorkerId>> linked_;                     // the lower one first
  std::map<std::pair<WorkerId, WorkerId>, RateEstimator> link_bytes_;  // of each byte from one to the other
  std::map<Way, Correction> corrections_;
  uint64_t learnt_ = 0;    // steps
  uint64_t measured_ = 0;  // predictions
  PrefillForecast last_;
  PrefillTimesByWay times_{};
};

}  // namespace dovetail::scheduler
