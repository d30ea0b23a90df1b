#include "server/cli/numa_places.h"

#include <gtest/gtest.h>

namespace dovetail::cli {
namespace {

// Nodes 0 and 2 are usable; 1 has no memory, 3 no core for this process.
const engine::HostFacts kTwoNodes{.cores = 24,
                                  .nodes = {{0, 16, 1 << 30}, {1, 4, 0}, {2, 8, 1 << 30}, {3, 0, 1 << 30}}};
const engine::HostFacts kOneNode{.cores = 16, .nodes = {{0, 16, 1 << 30}}};

TEST(NumaPlaces, AsManyWorkersAsNodesTakeTheseInTurn) {
  const NumaPlaces two(kTwoNodes, 2);
  EXPECT_EQ(two.NodeOf(0), 0);
  EXPECT_EQ(two.NodeOf(1), 2);
  EXPECT_EQ(two.Text(), "attention workers on the CPU are bound to the NUMA nodes 0, 2");
  const NumaPlaces three(kTwoNodes, 3);
  EXPECT_EQ(three.NodeOf(2), 0);
  EXPECT_EQ(three.Text(), "attention workers on the CPU are bound to the NUMA nodes 0, 2, in turn");
}

TEST(NumaPlaces, AWorkerHasNoMoreThreadsThanItsNodeHasCoresForIt) {
  const NumaPlaces three(kTwoNodes, 3);
  EXPECT_EQ(three.ThreadsOn(0, 11), 8);  // two of the three share its 16 cores
  EXPECT_EQ(three.ThreadsOn(2, 11), 8);
  EXPECT_EQ(three.ThreadsOn(2, 5), 5);
  EXPECT_EQ(NumaPlaces(kTwoNodes, 40).ThreadsOn(2, 5), 1);
}

TEST(NumaPlaces, FewerWorkersThanNodesAreNotBoundAndWhatWouldHelpIsSaid) {
  const NumaPlaces one(kTwoNodes, 1);
  EXPECT_EQ(one.NodeOf(0), std::nullopt);
  EXPECT_EQ(one.Text(),
            "this machine has 2 NUMA nodes, and attention on the CPU has 1 worker, which reads from all of them: "
            "--attention-workers 2 gives each node one that reads its own memory");
}

TEST(NumaPlaces, NothingIsBoundOrSaidOnAMachineOfOneNodeOrWithoutWorkersOnTheCpu) {
  EXPECT_EQ(NumaPlaces(kOneNode, 4).NodeOf(3), std::nullopt);
  EXPECT_EQ(NumaPlaces(kOneNode, 4).Text(), "");
  EXPECT_EQ(NumaPlaces(kTwoNodes, 0).Text(), "");
  EXPECT_EQ(NumaPlaces({}, 2).NodeOf(0), std::nullopt);
}

}  // namespace
}  // namespace dovetail::cli
