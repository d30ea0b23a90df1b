#include "server/cli/restart_pauses.h"

#include <gtest/gtest.h>

#include <vector>

namespace dovetail::cli {
namespace {

class RestartPausesTest : public ::testing::Test {
 protected:
  // A life of so long: how long to wait after it.
  absl::Duration Live(absl::Duration length) {
    pauses_.Started("worker", now_);
    now_ += length;
    const absl::Duration pause = pauses_.Ended("worker", now_);
    now_ += pause;
    return pause;
  }
  RestartPauses pauses_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(RestartPausesTest, GrowWhileItEndsSoonAfterItsStartAndAreBounded) {
  std::vector<absl::Duration> pauses;
  for (int i = 0; i < 9; ++i) pauses.push_back(Live(absl::Seconds(1)));
  EXPECT_EQ(pauses[0], absl::Milliseconds(200));
  EXPECT_EQ(pauses[1], absl::Milliseconds(200));
  EXPECT_EQ(pauses[2], absl::Milliseconds(400));
  EXPECT_EQ(pauses[3], absl::Milliseconds(800));
  EXPECT_EQ(pauses[8], RestartPauses::kLongest);
  EXPECT_FALSE(pauses_.StaysUp("worker"));
  EXPECT_EQ(pauses_.QuickEnds("worker"), 9);
}

TEST_F(RestartPausesTest, BeginAnewAfterALongLife) {
  for (int i = 0; i < 5; ++i) Live(absl::Seconds(1));
  EXPECT_EQ(Live(absl::Seconds(4)), RestartPauses::kFirst);
  EXPECT_TRUE(pauses_.StaysUp("worker"));
}

TEST_F(RestartPausesTest, AreOfOneProcessEach) {
  for (int i = 0; i < 5; ++i) Live(absl::Seconds(1));
  EXPECT_TRUE(pauses_.StaysUp("another"));
  EXPECT_EQ(pauses_.Ended("another", now_), RestartPauses::kFirst);
}

}  // namespace
}  // namespace dovetail::cli
