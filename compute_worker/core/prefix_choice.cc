#include "compute_worker/core/prefix_choice.h"

#include <algorithm>

#include "base/dtype.h"

namespace dovetail::compute {

bool MayGather(const proto::AttentionTable& table, Position gather_begin, Position ctx_len) {
  return std::all_of(table.views.begin(), table.views.end(), [&](const proto::SoftmaxSpec& spec) {
    if (spec.linear()) return true;  // states cross, which are not gathered
    const Position visible = spec.window > 0 ? std::max(gather_begin, ctx_len - spec.window + 1) : gather_begin;
    const int64_t row =
        int64_t{spec.kv_heads} * (spec.key_dim + spec.value_dim) * static_cast<int64_t>(SizeOf(spec.kv));
    return (ctx_len - visible) * row <= kMostGatheredBytes;
  });
}

}  // namespace dovetail::compute
