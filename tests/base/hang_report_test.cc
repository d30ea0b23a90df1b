#include "tests/support/hang_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

// tests/support/hang_report.h, in processes of their own.

namespace dovetail::test {
namespace {

[[gnu::noinline]] void WaitForWhatNeverComes() { std::promise<void>().get_future().wait(); }

TEST(HangReport, NamesTheFunctionsOfATestThatDoesNotEndAndFailsIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ReportHang(std::chrono::seconds(1));
        WaitForWhatNeverComes();
      },
      ::testing::ExitedWithCode(1), "has not ended after 1 s(.|\n)*WaitForWhatNeverComes");
}

}  // namespace
}  // namespace dovetail::test
