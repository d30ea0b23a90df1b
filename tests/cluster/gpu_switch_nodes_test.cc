#include <gtest/gtest.h>

#include <string>

#include "tests/cluster/gpu_rank_nodes.h"

// Ranks on GPUs that exchange tokens for heads, and their ends: also where the ranks do not divide the KV heads, and
// where their attention lies behind a cached prefix. Runs on a GPU, and on the emulated one (emulated_gpu).

namespace dovetail::test {
namespace {

class GpuSwitchNodes : public GpuRankNodes {
 protected:
  GpuSwitchNodes() : GpuRankNodes(proto::PrefixExchange::kSwitch, &scheduler::SchedulerStats::prefix_switch_bytes) {}
};

TEST_P(GpuSwitchNodes, ARankDiesAndTheOthersHaveTheLogitsOfACpu) { ExpectThatTheOthersRepeatTheGroup(); }

// Rank 0 gathers the beginning of the segment for the others, too.
TEST_P(GpuSwitchNodes, GroupsThatBeginInsideOfASegment) { ExpectLogitsBehindPartOfASegment(); }

TEST_P(GpuSwitchNodes, SeveralPromptsAndCachedPrefixes) { ExpectLogitsOfSeveralPromptsAndCachedPrefixes(); }

INSTANTIATE_TEST_SUITE_P(All, GpuSwitchNodes,
                         ::testing::Values(GpuRanksCase{"FromGpuToGpu", "llama", 0, true, true, 3, 8, 4},
                                           GpuRanksCase{"ThroughPinnedMemory", "llama", 0, false, true, 3, 8, 4},
                                           GpuRanksCase{.name = "ByName",
                                                        .architecture = "llama",
                                                        .rows_on_device = false,
                                                        .heads = 8,
                                                        .kv_heads = 4,
                                                        .offering = 3},
                                           GpuRanksCase{"WithWindows", "gemma3", 90, true, true, 3, 6, 3},
                                           GpuRanksCase{"OfTwo", "llama", 0, true, true, 2, 4, 2},
                                           GpuRanksCase{"OfFourThroughPinnedMemory", "gemma3", 20, false, true, 4, 8,
                                                        4}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
