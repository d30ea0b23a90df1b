#include "server/cli/spares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dovetail::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pointee;

const Spares::Arguments kGpu = {"attention-worker", "--spare", "--device", "cuda:0"};
const Spares::Arguments kCpu = {"attention-worker", "--spare", "--device", "cpu"};

// Two workers on a GPU and one on the CPU, with two spares for each place.
class SparesTest : public ::testing::Test {
 protected:
  SparesTest() {
    spares_.AddWorker("attention-1", kGpu);
    spares_.AddWorker("attention-2", kCpu);
    spares_.AddWorker("attention-3", kGpu);
  }
  Spares spares_{2};
};

TEST_F(SparesTest, AreAsManyForEachPlaceAsWereAskedFor) {
  EXPECT_THAT(spares_.names(), ElementsAre("spare-1", "spare-2", "spare-3", "spare-4"));
  EXPECT_THAT(spares_.ArgumentsOf("spare-2"), Pointee(kGpu));
  EXPECT_THAT(spares_.ArgumentsOf("spare-3"), Pointee(kCpu));
  EXPECT_EQ(spares_.ArgumentsOf("attention-1"), nullptr);
  Spares none(0);
  none.AddWorker("attention-1", kGpu);
  EXPECT_THAT(none.names(), IsEmpty());
}

TEST_F(SparesTest, AreTakenOnceEachByWorkersOfTheirPlaceAsSoonAsTheyAreReady) {
  EXPECT_EQ(spares_.Take("attention-1"), std::nullopt);
  spares_.Ready("spare-3");
  EXPECT_EQ(spares_.Take("attention-1"), std::nullopt) << "it is on the CPU";
  spares_.Ready("spare-1");
  spares_.Ready("spare-2");
  EXPECT_EQ(spares_.Take("attention-3"), "spare-1");
  EXPECT_EQ(spares_.Take("attention-1"), "spare-2");
  EXPECT_EQ(spares_.Take("attention-1"), std::nullopt);
  spares_.Ready("spare-1");  // the next of that name
  EXPECT_EQ(spares_.Take("attention-1"), "spare-1");
  EXPECT_EQ(spares_.Take("spare-1"), std::nullopt);
  EXPECT_EQ(spares_.Take("compute-1"), std::nullopt);
}

TEST_F(SparesTest, ThatEndedAreNotTaken) {
  spares_.Ready("spare-1");
  spares_.NotReady("spare-1");
  spares_.NotReady("attention-1");
  EXPECT_EQ(spares_.Take("attention-1"), std::nullopt);
}

TEST_F(SparesTest, AreNotNeededOnceNoWorkerOfTheirPlaceIsLeft) {
  spares_.Ready("spare-1");
  EXPECT_THAT(spares_.RemoveWorker("attention-1"), IsEmpty());
  EXPECT_EQ(spares_.Take("attention-1"), std::nullopt) << "it stays away";
  EXPECT_THAT(spares_.RemoveWorker("attention-3"), ElementsAre("spare-1", "spare-2"));
  EXPECT_THAT(spares_.RemoveWorker("attention-3"), IsEmpty());
  EXPECT_THAT(spares_.names(), ElementsAre("spare-3", "spare-4"));
  EXPECT_EQ(spares_.ArgumentsOf("spare-1"), nullptr);
  spares_.Ready("spare-1");  // its line came late
  EXPECT_EQ(spares_.Take("attention-3"), std::nullopt);
}

}  // namespace
}  // namespace dovetail::cli
