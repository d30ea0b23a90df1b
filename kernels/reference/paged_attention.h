#pragma once
#include <vector>

#include "kernels/paged_attention.h"

namespace dovetail::kernels::reference {

// Softmax attention of one (row, query head) in double precision by plain loops: what the op is
// for, without segments, tiles or merges. sink: an extra logit without a value, or null. Returns o
// [value_dim], zeros if the row sees nothing.
// Threads: pure.
std::vector<double> AttentionRow(const AttentionShape& shape, const AttentionItem& item, int row, int head,
                                 const float* sink);

}  // namespace dovetail::kernels::reference
