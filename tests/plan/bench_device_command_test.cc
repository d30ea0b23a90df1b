#include "server/cli/bench_device_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "plan/device_profile.h"

namespace dovetail::cli {
namespace {

using ::testing::HasSubstr;

TEST(BenchDevice, NamesAreThoseOfPriceTables) {
  for (const char* bad : {"", "a.b", "a:2", "a,b", "a=1", "a b"}) {
    BenchDeviceFlags flags;
    flags.name = bad;
    EXPECT_THAT(std::string(RunBenchDevice(flags).message()), HasSubstr("--name: '")) << bad;
  }
}

TEST(BenchDevice, DevicesAreNamedAsEverywhere) {
  BenchDeviceFlags flags;
  flags.name = "a";
  flags.device = "gpu";
  EXPECT_THAT(std::string(RunBenchDevice(flags).message()), HasSubstr("--device: 'gpu' is neither cpu nor cuda:N"));
  flags.device = "cuda:4096";
  EXPECT_THAT(std::string(RunBenchDevice(flags).message()), HasSubstr("--device cuda:4096: "));
}

TEST(BenchDevice, WritesAProfileThatCanBeRead) {
  const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) / "bench_device_test.json";
  BenchDeviceFlags flags;
  flags.name = "one-core";
  flags.threads = 1;
  flags.point_seconds = 0.001;
  flags.out = file.string();
  const absl::Status status = RunBenchDevice(flags);
  ASSERT_TRUE(status.ok()) << status;
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  const auto profile = plan::ParseDeviceProfile(text.str(), "profile");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->name, "one-core");
  EXPECT_EQ(profile->threads, 1);
  EXPECT_EQ(profile->attention.size(), 3u * 4 * 3 + 2 * 2 * 3) << "types, dimensions, groups; and those in 8 bits";
  for (const KvStorage storage : {KvStorage::kAsSent, KvStorage::kE4M3, KvStorage::kInt8}) {
    const auto rates = profile->Attention(DType::kBF16, 128, 8, storage);
    ASSERT_TRUE(rates.ok()) << rates.status();
    EXPECT_EQ(rates->group, 8);
    EXPECT_GT(rates->decode_bytes_per_s, 0);
  }
  EXPECT_TRUE(profile->Link("shm").ok() && profile->Link("tcp").ok());
  EXPECT_GT(profile->memory_gb, 0);
  EXPECT_FALSE(std::filesystem::exists(file.string() + ".part"));
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace dovetail::cli
