#include "compute_worker/core/prefix_choice.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/segment_tree.h"

namespace dovetail::compute {

PrefixBytes PrefixBytes::Of(const proto::AttentionTable& table, Position gather_begin, Position ctx_len, int q_len) {
  PrefixBytes bytes;
  for (const LayerGroup group : table.op_group) {
    const proto::SoftmaxSpec& spec = table.softmax(group);
    const int64_t element = SizeOf(spec.kv);
    const Position visible = spec.window > 0 ? std::max(gather_begin, ctx_len - spec.window + 1) : gather_begin;
    const int64_t rows = std::max<Position>(0, ctx_len - visible);
    const int64_t gathered = rows * spec.kv_heads * (spec.key_dim + spec.value_dim) * element;
    // As many subtrees for each row as for the first.
    const int64_t nodes = CountSubtrees(VisibleSegments(ctx_len, spec.window, 0, ctx_len));
    bytes.gather += gathered;
    bytes.most = std::max(bytes.most, gathered);
    bytes.ask += int64_t{q_len} * spec.query_heads * (spec.key_dim * element + nodes * 4 * (spec.value_dim + 2));
  }
  return bytes;
}

bool GathersPrefix(PrefixExchange exchange, const PrefixBytes& bytes) {
  if (bytes.most > kMostGatheredBytes) return false;
  switch (exchange) {
    case PrefixExchange::kAsk: return false;
    case PrefixExchange::kGather: return true;
    case PrefixExchange::kAuto: return bytes.gather <= bytes.ask;
  }
  return false;
}

}  // namespace dovetail::compute
