#include <charconv>
#include <string_view>

#include "base/crash_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/hang_report.h"

namespace {

// --time_limit=SECONDS, which ctest gives (dovetail_test); 0: it is not there.
int TimeLimit(int argc, char** argv) {
  constexpr std::string_view kFlag = "--time_limit=";
  int seconds = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(kFlag))
      std::from_chars(argument.data() + kFlag.size(), argument.data() + argument.size(), seconds);
  }
  return seconds;
}

}  // namespace

// As GTest::gmock_main; besides, a test that crashes or does not end says where.
int main(int argc, char** argv) {
  dovetail::ReportCrashes(argv[0]);
  if (const int seconds = TimeLimit(argc, argv); seconds > 0) dovetail::test::ReportHang(std::chrono::seconds(seconds));
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
