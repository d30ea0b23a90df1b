#include "server/cli/kv_capacity.h"

#include <gtest/gtest.h>

#include <memory>

#include "base/status.h"

// On a GPU, emulated or real.

namespace dovetail::cli {
namespace {

using kernels::cuda::CudaDevice;

constexpr size_t kBytes = size_t{64} << 20;

class KvCapacity : public ::testing::Test {
 protected:
  void SetUp() override {
    auto library = kernels::cuda::CudaLibrary::Open();
    if (!library.ok()) GTEST_SKIP() << "needs a GPU";
    auto device = CudaDevice::Create(*std::move(library), {.index = 0, .host_threads = 1});
    if (!device.ok()) GTEST_SKIP() << "needs a GPU";
    device_ = *std::move(device);
  }

  std::unique_ptr<CudaDevice> device_;
};

// A pair that joins again has made its cache before, and given it back.
TEST_F(KvCapacity, AutoCountsWhatTheProcessKeepsForItsNextBuffers) {
  auto buffer = device_->Allocate(kBytes);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  const auto held = KvBytesOf({}, *device_);
  ASSERT_TRUE(held.ok()) << held.status();
  buffer->reset();
  const auto kept = KvBytesOf({}, *device_);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_GE(*kept, *held + kBytes / 2);
}

// Other processes may have such memory open, so it becomes no KV.
TEST_F(KvCapacity, AutoDoesNotCountWhatWasSharedWithOtherProcesses) {
  auto buffer = device_->AllocateShared(kBytes);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  const auto held = KvBytesOf({}, *device_);
  ASSERT_TRUE(held.ok()) << held.status();
  buffer->reset();
  const auto kept = KvBytesOf({}, *device_);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_LT(*kept, *held + kBytes / 2);
}

}  // namespace
}  // namespace dovetail::cli
