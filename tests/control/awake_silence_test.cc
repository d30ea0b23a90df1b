#include "control/awake_silence.h"

#include <gtest/gtest.h>

namespace dovetail::control {
namespace {

constexpr absl::Duration kBetween = absl::Milliseconds(50);
const absl::Time kStart = absl::UnixEpoch();

TEST(AwakeSilence, IsTheTimeSinceThePeerWasHeard) {
  AwakeSilence silence(kBetween, kStart, kStart);
  absl::Time now = kStart;
  for (int look = 1; look <= 100; ++look) EXPECT_EQ(silence.Look(kStart, now += kBetween), look * kBetween);
  EXPECT_LE(silence.Look(now, now + kBetween), 2 * kBetween) << "heard";
  EXPECT_LE(silence.Look(now, now + 2 * kBetween), 3 * kBetween);
}

TEST(AwakeSilence, DoesNotCountTimeThatNobodyHad) {
  AwakeSilence silence(kBetween, kStart, kStart);
  EXPECT_EQ(silence.Look(kStart, kStart + kBetween), kBetween);
  EXPECT_EQ(silence.Look(kStart, kStart + absl::Seconds(60)), 3 * kBetween);
  EXPECT_EQ(silence.Look(kStart, kStart + absl::Seconds(60) + kBetween), 4 * kBetween);
}

}  // namespace
}  // namespace dovetail::control
