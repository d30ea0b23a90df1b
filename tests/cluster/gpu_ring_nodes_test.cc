#include <gtest/gtest.h>

#include <string>

#include "tests/cluster/gpu_rank_nodes.h"

// Ranks of a ring on GPUs, and their ends. Runs on a GPU, and on the emulated one (emulated_gpu).

namespace dovetail::test {
namespace {

class GpuRingNodes : public GpuRankNodes {
 protected:
  GpuRingNodes() : GpuRankNodes(proto::PrefixExchange::kRing, &scheduler::SchedulerStats::prefix_ring_bytes) {}
};

TEST_P(GpuRingNodes, ARankDiesAndTheOthersHaveTheLogitsOfACpu) { ExpectThatTheOthersRepeatTheGroup(); }

TEST_P(GpuRingNodes, SeveralPromptsAndCachedPrefixes) { ExpectLogitsOfSeveralPromptsAndCachedPrefixes(); }

INSTANTIATE_TEST_SUITE_P(
    All, GpuRingNodes,
    ::testing::Values(
        GpuRanksCase{"FromGpuToGpu", "llama", 0, true}, GpuRanksCase{"ThroughPinnedMemory", "llama", 0, false},
        GpuRanksCase{.name = "ByName", .architecture = "llama", .rows_on_device = false, .offering = 3},
        GpuRanksCase{.name = "OneIsOutOfReach", .architecture = "llama", .rows_on_device = false, .offering = 2},
        // A rank asks attention workers, and hands on all the same.
        GpuRanksCase{"WithoutRoom", "llama", 0, false, false}, GpuRanksCase{"WithWindows", "gemma3", 90, true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
