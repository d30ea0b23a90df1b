#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "kernels/cpu/isa.h"
#include "kernels/device.h"
#include "kernels/kernel_table.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels {
namespace {

TEST(CpuDevice, UsesOneThreadPerUsableCoreUnlessTold) {
  const auto device = CreateCpuDevice({}).value();
  EXPECT_EQ(device->name(), "cpu");
  EXPECT_EQ(device->CreateStream()->pool().threads(), UsableCores());
  EXPECT_EQ(CreateCpuDevice({.threads = 3}).value()->CreateStream()->pool().threads(), 3);
}

TEST(CpuDevice, RefusesThreadCountsOutsideItsRange) {
  EXPECT_EQ(std::string(CreateCpuDevice({.threads = 257}).status().message()),
            "threads: 257 is outside 1..256; 0 takes one per usable core");
  EXPECT_EQ(CreateCpuDevice({.threads = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateCpuDevice({.spin_us = -1}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CpuDevice, NeverChoosesAnIsaAboveTheOneAllowed) {
  EXPECT_EQ(CreateCpuDevice({.threads = 1, .max_isa = Isa::kAvx2}).value()->CreateStream()->kernels().isa, Isa::kAvx2);
  EXPECT_EQ(CreateCpuDevice({.threads = 1}).value()->CreateStream()->kernels().isa, DetectIsa().value());
}

TEST(CpuDevice, GivesZeroedAlignedMemory) {
  const auto device = CreateCpuDevice({.threads = 1}).value();
  for (const size_t size : {size_t{1}, size_t{1000}, size_t{5} << 20}) {
    const auto buffer = device->Allocate(size).value();
    EXPECT_EQ(buffer->size_bytes(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
    for (size_t i = 0; i < size; ++i) ASSERT_EQ(buffer->data()[i], std::byte{0}) << i;
    buffer->data()[size - 1] = std::byte{1};
  }
  EXPECT_EQ(device->Allocate(0).value()->size_bytes(), 0u);
}

TEST(CpuDevice, RefusesMemoryTheMachineDoesNotHave) {
  const auto device = CreateCpuDevice({.threads = 1}).value();
  const absl::Status status = device->Allocate(std::numeric_limits<size_t>::max() / 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("does not fit into this machine's"));
}

}  // namespace
}  // namespace dovetail::kernels
