#pragma once
#include <cstdint>
#include <vector>

#include "proto/step_layout.h"

namespace dovetail::exchange {

// A sequence brings at most so many new tokens to linear states that cross between GPUs: attention workers take them
// token by token. Those of a prompt's part are computed on the compute worker, and states cross through the hosts.
inline constexpr int kMostStateTokens = 16;

// How q of a layer group's items and their answers lie in the slots between two GPUs (gpu_exchange.h). Both sides build
// it from the layout. K and V, and all of it where no sequence is divided by tokens, lie as proto::StepLayout says.
//   q:      shards of one sequence and head range share its rows, from the first that one of them answers on
//   answer: first o of the finished items, one after the other, in the wire type; then, from partials_at on, of each
//   other
//           item o [q_count, query_heads, value_dim] in f32, on a multiple of one row's; from ml_at on their m and l,
//           f32, [q_count, query_heads, 2], where m is the greatest score and l the sum of exp(score - m). A GPU puts
//           all that a row sees into one partial result, so these are fewer than the subtrees of frames.
// Threads: thread-compatible; values.
struct DividedPayloads {
  struct Item {
    int64_t query_at = 0;       // bytes to its first row of q
    bool shares_query = false;  // with an earlier item, which has all of its rows
    int64_t o_at = 0;           // bytes into the answer
    int64_t ml_at = 0;          // likewise, unless it is finished
  };
  std::vector<Item> items;  // as the layout's
  int64_t query_bytes = 0;
  int64_t partials_at = 0, ml_at = 0;
  int64_t answer_bytes = 0;
};

// Of linear states whose tokens come (proto::StateExchange::kTokens); those have no token shards.
// Threads: pure.
DividedPayloads DividedPayloadsOf(const proto::StepLayout& layout, const proto::SoftmaxSpec& spec);

}  // namespace dovetail::exchange
