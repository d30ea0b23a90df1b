#include "base/crash_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// As GTest::gmock_main; besides, a test that crashes says where.
int main(int argc, char** argv) {
  dovetail::ReportCrashes(argv[0]);
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
