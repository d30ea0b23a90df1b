#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "proto/attention_spec.h"
#include "scheduler/core/prefill_cost.h"
#include "scheduler/core/prefill_volume.h"

// What one long prompt would take over several ranks, by each exchange: those that are built, and those that are not,
// to compare with. All times are predictions.
// Threads: pure.

namespace dovetail::scheduler {

struct PrefillTableInput {
  proto::AttentionTable attention;
  int64_t hidden = 0;
  int64_t new_tokens = 0, earlier_tokens = 0;
  int ranks = 1;
  int max_step_tokens = 2048;            // of a rank in a step of the exchanges that are built
  int rank_tokens = 1024;                // at least, of a rank
  uint32_t scratch_blocks = UINT32_MAX;  // of a compute worker
  double token_s = 0;                    // seconds: dense and linear layers of a token, on a rank
  double flop_s = 0;                     // softmax attention, on a rank
  double plane_flop_s = 0;               // on the attention workers together
  double link_byte_s = 0;                // of one direction of a link
  double link_latency_s = 0;             // of a message
};

struct PrefillTableRow {
  std::string softmax, linear;  // exchanges of both kinds of layer; empty: the model has none of that kind
  bool built = false;           // --prefill-exchange can ask for it, or auto choose it
  bool possible = true;
  std::string why_not;           // if not possible
  int64_t rank_bytes = 0;        // received by the rank that receives most, all layers
  int64_t total_bytes = 0;       // received by all ranks; of exchanges over attention workers, both ways
  proto::PrefixTraffic traffic;  // of those that are built: total_bytes, as `prefill_exchange_bytes_total` counts them
  double seconds = 0;
  PrefillBound bound = PrefillBound::kDense;
  double speedup = 0;     // over one rank that attends to everything itself and exchanges nothing
  double efficiency = 0;  // of that, for each rank
};

// Fastest first within what is possible; what is not possible last. `input` has new_tokens >= 1, ranks >= 1, positive
// rates.
std::vector<PrefillTableRow> MakePrefillTable(const PrefillTableInput& input);

}  // namespace dovetail::scheduler
