#include "plan/device_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_replace.h"
#include "tests/plan/small_profile.h"

namespace dovetail::plan {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const auto profile = ParseDeviceProfile(text, "p.json");
  return profile.ok() ? "" : std::string(profile.status().message());
}
std::string With(const std::string& from, const std::string& to) {
  const std::string text = ToJson(SmallProfile());
  EXPECT_THAT(text, HasSubstr(from));
  return absl::StrReplaceAll(text, {{from, to}});
}

TEST(DeviceProfiles, AreReadAsTheyWereWritten) {
  const std::string text = ToJson(SmallProfile());
  const auto profile = ParseDeviceProfile(text, "p.json");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(ToJson(*profile), text);
  EXPECT_EQ(profile->products[0].points[1].rows, 101);
  EXPECT_EQ(profile->attention[1].kv, DType::kF32);
  EXPECT_TRUE(profile->states[0].delta);
  EXPECT_DOUBLE_EQ(profile->steps.choice_s, 1e-9);
  EXPECT_EQ(profile->steps.linear_layer_s, 0) << "not measured";
  DeviceProfile linear = SmallProfile();
  linear.steps.linear_layer_s = 2e-6;
  const auto read = ParseDeviceProfile(ToJson(linear), "p.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_DOUBLE_EQ(read->steps.linear_layer_s, 2e-6);
}

TEST(DeviceProfiles, OfTheFirstVersionHaveNoRatesOfCaches) {
  const auto first =
      ParseDeviceProfile(With("\"dovetail_device_profile\": 3", "\"dovetail_device_profile\": 1"), "p.json");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->CachedShare(1), 0);
}

TEST(DeviceProfiles, WeightsThatFitIntoCachesAreReadFromThem) {
  DeviceProfile profile = SmallProfile();
  profile.cache_bytes = 8e6;
  profile.products[0].cached_points = {{1, 0.5e-9}, {5, 3e-9}};
  const std::string text = ToJson(profile);
  const auto read = ParseDeviceProfile(text, "p.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ToJson(*read), text);
  EXPECT_EQ(read->CachedShare(1e6), 1);
  EXPECT_EQ(read->CachedShare(4e6), 1);
  EXPECT_DOUBLE_EQ(read->CachedShare(6e6), 0.5);
  EXPECT_EQ(read->CachedShare(8e6), 0);
  EXPECT_EQ(read->CachedShare(1e9), 0);
  const auto seconds = [&](double rows, double cached) { return *read->ProductSeconds("bf16", rows, 1000, cached); };
  EXPECT_NEAR(seconds(1, 0), 1e-6, 1e-15);
  EXPECT_NEAR(seconds(1, 1), 0.5e-6, 1e-15);
  EXPECT_NEAR(seconds(1, 0.5), 0.75e-6, 1e-15);
  EXPECT_NEAR(seconds(5, 1), 1.4e-6, 1e-15) << "never slower than from memory";
  EXPECT_NEAR(seconds(51, 1), 6e-6, 1e-15) << "arithmetic decides";
  profile.products[0].cached_points[0].rows = 2;
  EXPECT_THAT(ErrorOf(ToJson(profile)), HasSubstr("products[0]: cached_points[0]: rows: 2 is not 1"));
}

TEST(DeviceProfiles, AttentionOver8BitsIsOneOfItsOwn) {
  DeviceProfile profile = SmallProfile();
  profile.attention.push_back({DType::kBF16, 64, 1, 3e9, 2e9, KvStorage::kInt8});
  const std::string text = ToJson(profile);
  EXPECT_THAT(text, HasSubstr("\"kv\": \"int8\""));
  const auto read = ParseDeviceProfile(text, "p.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ToJson(*read), text);
  EXPECT_EQ(read->Attention(DType::kBF16, 64, 1)->decode_bytes_per_s, 1e9);
  EXPECT_EQ(read->Attention(DType::kBF16, 64, 1, KvStorage::kInt8)->decode_bytes_per_s, 3e9);
  EXPECT_THAT(std::string(read->Attention(DType::kBF16, 64, 1, KvStorage::kE4M3).status().message()),
              HasSubstr("small: its profile has no attention over fp8_e4m3 K and V; where a CPU has them, `dovetail "
                        "bench device` measures it"));
}

TEST(DeviceProfiles, ABadOneIsRefusedByLineOrField) {
  EXPECT_THAT(ErrorOf("{\n \"dovetail_device_profile\": 1,\n \"name\": }"), HasSubstr("p.json: is not JSON: "));
  EXPECT_THAT(ErrorOf("{\n \"dovetail_device_profile\": 1,\n \"name\": }"), HasSubstr("line 3"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("dovetail_device_profile: has to be the profile's version"));
  EXPECT_THAT(ErrorOf(With("\"dovetail_device_profile\": 3", "\"dovetail_device_profile\": 4")),
              HasSubstr("version 4 is not 1..3"));
  EXPECT_THAT(ErrorOf(With("\"dovetail_device_profile\": 3", "\"dovetail_device_profile\": 0")),
              HasSubstr("version 0 is not 1..3"));
  EXPECT_THAT(ErrorOf(With("\"memory_gb\": 1.0", "\"memory_gb\": -1.0")), HasSubstr("p.json: memory_gb: -1.0 is no"));
  EXPECT_THAT(ErrorOf(With("\"memory_gb\": 1.0", "\"memory_gb\": \"1\"")), HasSubstr("memory_gb: \"1\" is no number"));
  EXPECT_THAT(ErrorOf(With("\"s_per_weight\": 1e-09", "\"s_per_weight\": 0")),
              HasSubstr("p.json: products[0]: points[0]: s_per_weight: 0 is no number above 0"));
  EXPECT_THAT(ErrorOf(With("\"rows\": 101", "\"rows\": 1")),
              HasSubstr("products[0]: points[1]: rows: 1 does not come after 1"));
  EXPECT_THAT(ErrorOf(With("\"rows\": 101", "\"rows\": 1.5")), HasSubstr("rows: 1.5 is no whole number"));
  EXPECT_THAT(ErrorOf(With("\"kv\": \"float32\"", "\"kv\": \"int4\"")),
              HasSubstr("attention[1]: kv: 'int4' is none of float32, float16, bfloat16, fp8_e4m3, int8"));
  EXPECT_THAT(ErrorOf(With("\"lane\": \"shm\"", "\"lanes\": \"shm\"")), HasSubstr("links[0]: has no lane"));
  EXPECT_THAT(ErrorOf(With("\"lane\": \"shm\"", "\"speed\": 1, \"lane\": \"shm\"")),
              HasSubstr("links[0]: there is no field speed"));
  EXPECT_THAT(ErrorOf(With("2026-11-26", "yesterday")), HasSubstr("dated: 'yesterday' is no day"));
}

TEST(DeviceProfiles, ProductsLieOnLinesBetweenTheMeasuredRows) {
  const DeviceProfile profile = SmallProfile();  // 1 ns a weight at 1 row, 11 ns at 101
  const auto seconds = [&](double rows) { return profile.ProductSeconds("bf16", rows, 1000).value(); };
  EXPECT_NEAR(seconds(1), 1e-6, 1e-15);
  EXPECT_NEAR(seconds(51), 6e-6, 1e-15);
  EXPECT_NEAR(seconds(101), 11e-6, 1e-15);
  EXPECT_NEAR(seconds(202), 22e-6, 1e-15) << "beyond the last point it grows with the rows";
  EXPECT_THAT(std::string(profile.ProductSeconds("fp4", 1, 1).status().message()),
              HasSubstr("small: its profile has no products of fp4 weights; it has bf16"));
}

TEST(DeviceProfiles, WeightsThatAGpuWasNotMeasuredWithHave16BitsThere) {
  DeviceProfile profile = SmallProfile();
  EXPECT_FALSE(profile.on_gpu());
  EXPECT_EQ(profile.BytesPerWeight("u4-affine").status().code(), absl::StatusCode::kNotFound);
  profile.device = "GPU sm_90 of 132 multiprocessors";
  EXPECT_TRUE(profile.on_gpu());
  EXPECT_EQ(*profile.BytesPerWeight("u4-affine"), 2);
  EXPECT_EQ(*profile.ProductSeconds("u4-affine", 1, 1000), *profile.ProductSeconds("bf16", 1, 1000));
  profile.products[0].weights = "f32";
  EXPECT_EQ(profile.BytesPerWeight("u4-affine").status().code(), absl::StatusCode::kNotFound);
}

TEST(DeviceProfiles, TheNearestMeasuredShapeStandsForOthers) {
  const DeviceProfile profile = SmallProfile();
  EXPECT_EQ(profile.Attention(DType::kBF16, 80, 3)->head_dim, 64);
  EXPECT_THAT(std::string(profile.Attention(DType::kF16, 64, 1).status().message()),
              HasSubstr("no attention over float16 K and V"));
  EXPECT_EQ(profile.State(16, true, false)->dim, 64);
  EXPECT_THAT(std::string(profile.State(16, false, true).status().message()),
              HasSubstr("no linear states with plain updates and a decay for each channel"));
  EXPECT_THAT(std::string(profile.Link("rc").status().message()), HasSubstr("no link 'rc'; it has shm"));
}

}  // namespace
}  // namespace dovetail::plan
