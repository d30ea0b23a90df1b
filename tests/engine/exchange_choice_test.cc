#include "engine/exchange_choice.h"

#include <memory>

#include "gmock/gmock.h"
#include "kernels/device.h"

namespace dovetail::engine {
namespace {

using ::testing::HasSubstr;

TEST(ChooseExchange, OnACpuLayersGoThroughTheHosts) {
  const std::unique_ptr<kernels::Device> device = *kernels::CreateCpuDevice({.threads = 1});
  for (const char* how : {"auto", "host"}) {
    const auto choice = ChooseExchange(how, "the compute worker", *device);
    ASSERT_TRUE(choice.ok());
    EXPECT_FALSE(*choice);
    EXPECT_TRUE(choice->on_cpu);
    EXPECT_FALSE(choice->required);
    EXPECT_THAT(choice->why_not, HasSubstr("the compute worker runs on cpu"));
  }
}

TEST(ChooseExchange, DeviceNeedsAGpu) {
  const std::unique_ptr<kernels::Device> device = *kernels::CreateCpuDevice({.threads = 1});
  const auto choice = ChooseExchange("device", "the compute worker", *device);
  EXPECT_TRUE(absl::IsFailedPrecondition(choice.status()));
  EXPECT_THAT(choice.status().message(), HasSubstr("--exchange device: cpu is no GPU; use auto or host"));
}

}  // namespace
}  // namespace dovetail::engine
