#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/prefill_exchange.h"
#include "proto/prefix_traffic.h"
#include "scheduler/core/prefill_forecast.h"

// What a part of a prompt costs: bytes and floating-point operations by the model's table, and seconds by measured
// rates.
// Threads: pure; deterministic; no allocation.

namespace dovetail::scheduler {

// Tokens [begin, end) of a prompt whose K and V a compute worker has. Empty: none.
struct HeldTokens {
  Position begin = 0, end = 0;
  bool empty() const { return begin >= end; }
  bool operator==(const HeldTokens&) const = default;
};

// A step of one prompt: tokens [ctx_len, ctx_len + tokens) on a compute worker.
struct PromptStep {
  Position ctx_len = 0;
  Position base = 0;  // where its group begins, with an exchange between ranks
  int64_t tokens = 0;
  Position group_end = 0;  // and where it ends; which rank of it this is, and of how many, with a head switch
  int rank = 0, ranks = 1;
  std::span<const Position> cuts;  // of all its ranks: where each begins, and group_end. Must be there with pass-q
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  HeldTokens held;
  uint32_t scratch_blocks = UINT32_MAX;  // of the compute worker: 64 tokens x a KV head x an op
  bool given_back = false;               // later ranks give back tokens up to group_end (StepPlan::gives_back)
  bool last = false;                     // nothing follows, for which K and V would be kept
  bool states = true;                    // linear layers run on the compute worker
  bool holds_state = false;              // and the state before the step is there
  bool chained = false;                  // or comes from the rank before
  bool switched = false;                 // ranks exchange tokens of linear layers for heads; of a group with a switch
  bool link_by_pair = false;             // rates of links are each of two ranks; else of all that comes to a rank
};

// What it makes of it. All layers together.
struct StepWork {
  int64_t tokens = 0;
  double here_flops = 0;   // softmax attention on the compute worker
  double asked_flops = 0;  // on attention workers
  proto::PrefixTraffic traffic;
  double over_one_link = 1;  // how much of traffic.direct_bytes comes over the link that carries most
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;  // kAsk where nothing could be gathered
  HeldTokens held;                                               // after it
};

// Whether the model has layers whose K and V could be gathered.
bool HasSoftmax(const proto::AttentionTable& table);

// As compute_worker/core does it, for a sequence that lies whole on one attention worker.
StepWork WorkOf(const proto::AttentionTable& table, const PromptStep& step);

// Seconds for a unit of work; nothing: not known.
struct ComputeRates {
  std::optional<double> token_s;                     // the dense layers, and linear attention, for one token
  std::optional<double> flop_s;                      // softmax attention
  std::optional<double> link_byte_s = std::nullopt;  // of what comes to it from other ranks
};
struct PlaneRates {
  std::optional<double> flop_s;  // softmax attention of prompts on the attention worker
  std::optional<double> byte_s;  // between it and a compute worker, as far as nothing hides it
};

struct Prediction {
  double seconds = 0;
  PrefillBound bound = PrefillBound::kDense;  // what most of the slowest rank's time, or of the attention worker's, is
};

// The time of ranks that run together, or of a step alone. `rates` are by rank, with token_s and flop_s. What else they
// do not say counts as: attention workers as fast as the compute workers, and links that cost nothing.
//   Model: a rank's own attention and what it asks for run at a time, what it gathers comes before it attends; the
//          attention worker answers all ranks one after the other, and so does its link. What ranks give each other
//          crosses while they compute, for those before are an op ahead. Of the links between ranks the one that
//          carries most counts (PromptStep::link_by_pair).
//          Ranks that switch heads wait for each other in every layer: each part is that of the rank for which it is
//          longest, and what crosses between them hides behind nothing but the attention workers' answers. With pass-q
//          the longest rank bounds the others, and what crosses hides behind nothing.
Prediction Predict(std::span<const StepWork> ranks, std::span<const ComputeRates> rates, const PlaneRates& plane);

}  // namespace dovetail::scheduler
