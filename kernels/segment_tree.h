#pragma once
#include "base/segment_tree.h"

// The segment tree is also what both ends of the wire compute layouts from, so it lives in base/.
// Threads: pure.

namespace dovetail::kernels {
using dovetail::AreSiblings;
using dovetail::CountSubtrees;
using dovetail::FirstSubtree;
using dovetail::ForEachSubtree;
using dovetail::JoinLevel;
using dovetail::kMaxPositions;
using dovetail::kSegmentTokens;
using dovetail::MaxStackNodes;
using dovetail::SegmentNode;
using dovetail::SegmentRange;
using dovetail::SegmentsOf;
using dovetail::TokenSpan;
using dovetail::VisibleSegments;
using dovetail::VisibleTokens;
}  // namespace dovetail::kernels
