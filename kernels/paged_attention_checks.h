#pragma once
#include "kernels/paged_attention.h"

namespace dovetail::kernels {

// The checks of PagedAttention::Begin (its contract says what is refused), and the segments that any row of an item
// sees.
// Errors: kInvalidArgument names the field, of an item also its index.
// Threads: pure.
absl::Status CheckAttentionShape(const AttentionShape& shape);
absl::Status CheckAttentionItem(const AttentionShape& shape, const AttentionItem& item, int index);
SegmentRange SegmentsOfItem(const AttentionShape& shape, const AttentionItem& item);

}  // namespace dovetail::kernels
