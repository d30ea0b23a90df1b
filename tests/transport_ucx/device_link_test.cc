#include "transport/ucx/device_link.h"

#include "gmock/gmock.h"

namespace dovetail::transport::ucx {
namespace {

using ::testing::HasSubstr;

TEST(DeviceLinks, ABuildWithoutThemSaysWhatWouldHaveThem) {
  const absl::Status built = DeviceLinksBuilt();
  if (built.ok()) GTEST_SKIP() << "this build has UCX's device API";
  EXPECT_TRUE(absl::IsFailedPrecondition(built));
  EXPECT_THAT(std::string(built.message()), HasSubstr("-DDOVETAIL_UCX_ROOT=FOLDER"));
  const auto links = MakeDeviceLinks([](void*, unsigned) -> absl::StatusOr<void*> { return nullptr; });
  EXPECT_EQ(links.status(), built);
}

TEST(DeviceLinks, AMachineWithoutAGpuSaysSo) {
  if (!DeviceLinksBuilt().ok()) GTEST_SKIP() << "this build has no device API of UCX";
  const auto links = MakeDeviceLinks([](void*, unsigned) -> absl::StatusOr<void*> { return nullptr; });
  if (links.ok()) GTEST_SKIP() << "needs a machine without a GPU";
  EXPECT_FALSE(std::string(links.status().message()).empty());
}

}  // namespace
}  // namespace dovetail::transport::ucx
