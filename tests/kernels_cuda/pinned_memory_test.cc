#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "tests/kernels_cuda/fake_gpu.h"

namespace dovetail::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kOutOfMemory = 2;
bool g_pinned_memory = true;

std::shared_ptr<const CudaLibrary> Library() {
  Backend backend = testing::FakeBackend();
  backend.error_text = [](int) { return "out of memory"; };
  backend.is_out_of_memory = [](int error) { return error == kOutOfMemory; };
  backend.allocate_pinned = [](int, size_t bytes, void** memory) {
    if (!g_pinned_memory) return kOutOfMemory;
    return *memory = std::calloc(1, bytes), 0;
  };
  static const Backend kept = backend;
  return std::make_shared<CudaLibrary>(&kept);
}

TEST(PinnedMemory, ThatIsNotToBeHadIsSaidWhenTheDeviceIsOpened) {
  g_pinned_memory = true;
  EXPECT_TRUE(CudaDevice::Create(Library(), {}).ok());
  g_pinned_memory = false;
  const auto refused = CudaDevice::Create(Library(), {});
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("cuda:0: 4 MiB of pinned host memory: out of memory"),
                    HasSubstr("free memory of the host"), HasSubstr("ulimit -l")));
}

TEST(PinnedMemory, ThatEndsLaterIsNamedWithWhatHelps) {
  g_pinned_memory = true;
  const auto device = CudaDevice::Create(Library(), {});
  ASSERT_TRUE(device.ok()) << device.status();
  g_pinned_memory = false;
  const auto refused = (*device)->AllocatePinned(size_t{64} << 20);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("cuda:0: 64 MiB of pinned host memory: out of memory; "));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
