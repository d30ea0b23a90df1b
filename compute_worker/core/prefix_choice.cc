#include "compute_worker/core/prefix_choice.h"

#include "proto/prefix_traffic.h"

namespace dovetail::compute {

static_assert(kMostGatheredBytes == proto::kMostGatheredBytes);

bool MayGather(const proto::AttentionTable& table, Position gather_begin, Position ctx_len) {
  return proto::MayGather(table, gather_begin, ctx_len);
}

}  // namespace dovetail::compute
