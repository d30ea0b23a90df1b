#include <filesystem>
#include <fstream>
#include <iterator>

#include "examples/spatio_temporal/gpu/gpu_rates.h"
#include "examples/spatio_temporal/gpu/run_gpus.h"
#include "examples/spatio_temporal/run_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "tests/examples/double_model.h"
#include "tests/kernels_cuda/cuda_fixture.h"
#include "tests/support/test_data.h"

namespace dovetail::spatio_temporal {
namespace {

using ::testing::HasSubstr;

// The ranks share one GPU: what they send has a shorter way, and everything else is as it is between two.
RunOptions Options(const Config& config, Way way, int ranks) {
  RunOptions options;
  options.config = config;
  options.way = way;
  options.ranks = ranks;
  options.devices.assign(ranks, "cuda:0");
  options.chunk_rows = 66;  // a frame of kConfig, so that there are several chunks
  return options;
}

// Two ranks have unlike numbers of frames, three of positions, too, and a frame has more than one KV block. Heads of 72
// are padded to 80.
const Config kConfig{.frames = 5, .positions = 66, .channels = 144, .heads = 2, .pairs = 2, .steps = 1, .seed = 3};

class SpatioTemporalGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = kernels::cuda::testing::OpenTestDevice();
    if (!device.ok()) GTEST_SKIP() << "needs a GPU: " << device.status().message();
    is_emulated_ = (*device)->info().name == std::string("CPU emulation");
    const auto gemm = kernels::cuda::CudaGemm::Create(**device);
    if (!gemm.ok()) GTEST_SKIP() << "needs cuBLASLt: " << gemm.status().message();
  }

  bool is_emulated_ = false;
};

std::string DigestOf(const RunOptions& options) {
  const auto reports = RunGpus(options);
  EXPECT_TRUE(reports.ok()) << reports.status();
  if (!reports.ok()) return std::string(reports.status().message());
  const auto summary = Summarize(options, *reports);
  EXPECT_TRUE(summary.ok()) << summary.status();
  return summary.ok() ? summary->digest : std::string(summary.status().message());
}

Doubles ResultOf(RunOptions options) {
  options.output = (test::TempFolder() / "hidden").string();
  EXPECT_NE(DigestOf(options), "");
  std::ifstream file(options.output, std::ios::binary);
  return HiddenOf(std::string(std::istreambuf_iterator<char>(file), {}));
}

// A product of so few rows is done by whichever of cuBLASLt's algorithms was the fastest when it was first asked for.
// On the emulation it is always the same sum.
TEST_F(SpatioTemporalGpu, WithOneSwitchAStageTheBitsAreThoseOfOneRank) {
  const Doubles one = ResultOf(Options(kConfig, Way::kDsp, 1));
  for (int ranks = 2; ranks <= 3; ++ranks) {
    const Doubles many = ResultOf(Options(kConfig, Way::kDsp, ranks));
    if (is_emulated_) {
      EXPECT_EQ(many, one) << ranks;
    } else {
      EXPECT_LT(Distance(many, one), 0.0106) << ranks;
    }
  }
}

TEST_F(SpatioTemporalGpu, AgreesWithTheModelInDoublePrecisionEitherWay) {
  const Doubles reference = ReferenceHidden(kConfig);
  for (const auto& [way, ranks] : {std::pair(Way::kDsp, 2), {Way::kUlysses, 2}})
    EXPECT_LT(Distance(ResultOf(Options(kConfig, way, ranks)), reference), 0.0106)
        << std::string(NameOf(way)) << ", " << ranks << " ranks; measured: 0.0053";
}

TEST_F(SpatioTemporalGpu, SendsTwoFMOverPByRankAndPairWithSwitchesAndEightWithUlysses) {
  const Config config{.frames = 6, .positions = 12, .channels = 48, .heads = 6, .pairs = 2, .steps = 2};
  const int64_t m = 6 * 12 * 48 * 2;
  for (const int p : {2, 3}) {
    for (const auto& [way, times] : {std::pair(Way::kDsp, 2), std::pair(Way::kUlysses, 8)}) {
      const auto reports = RunGpus(Options(config, way, p));
      ASSERT_TRUE(reports.ok()) << reports.status();
      for (const RankReport& report : *reports) {
        EXPECT_EQ(report.bytes_sent, config.pairs * config.steps * times * (p - 1) * m / p / p)
            << std::string(NameOf(way)) << ", " << p << " ranks, rank " << report.rank;
        EXPECT_EQ(report.pair_seconds.size(), 4u);
      }
    }
  }
}

TEST_F(SpatioTemporalGpu, WithSwitchesAloneHiddenComesBackAsItWas) {
  Config config = kConfig;
  config.exchange_only = true;
  EXPECT_EQ(ResultOf(Options(config, Way::kDsp, 3)), RandomHidden(config));
}

TEST_F(SpatioTemporalGpu, PredictsAPairFromTheTimesOfItsParts) {
  const Config config{.frames = 4, .positions = 32, .channels = 64, .heads = 4, .pairs = 1};
  RunOptions options = Options(config, Way::kDsp, 1);
  options.chunk_rows = 32;
  const auto rates = MeasureRates(options);
  ASSERT_TRUE(rates.ok()) << rates.status();
  const double blocks = 2 * (rates->project_seconds + rates->finish_seconds) * 128 / 32;
  const double attention = (rates->spatial_seconds + rates->temporal_seconds) * 128;
  EXPECT_GT(rates->project_seconds, 0);
  EXPECT_GT(rates->finish_seconds, 0);
  EXPECT_GT(rates->spatial_seconds, 0);
  EXPECT_GT(rates->temporal_seconds, 0);
  EXPECT_GT(rates->product_flops, 0);
  EXPECT_DOUBLE_EQ(rates->ComputeSeconds(config, 1), blocks + attention);
  EXPECT_DOUBLE_EQ(rates->ComputeSeconds(config, 4), (blocks + attention) / 4);
  GpuRates linked = *rates;
  linked.copy_bytes = 1000;
  linked.runs_bytes = 500;
  const double m = 4 * 32 * 64 * 2;
  EXPECT_DOUBLE_EQ(*linked.ExchangeSeconds(config, Way::kDsp, 2), 2 * 0.5 * m / 2 / 1000);
  EXPECT_DOUBLE_EQ(*linked.ExchangeSeconds(config, Way::kUlysses, 2), 8 * 0.5 * m / 2 / 500);
  EXPECT_EQ(*linked.ExchangeSeconds(config, Way::kUlysses, 1), 0);
  options.config.exchange_only = true;
  EXPECT_THAT(std::string(MeasureRates(options).status().message()), HasSubstr("leave --exchange-only out"));
}

TEST_F(SpatioTemporalGpu, SaysWhatDoesNotFitAndEndsAllRanks) {
  const auto refusal = [](const RunOptions& options) { return std::string(RunGpus(options).status().message()); };
  EXPECT_THAT(refusal(Options(*Preset("tiny"), Way::kDsp, 2)),
              HasSubstr("channels 48 and heads 4: on GPUs channels / heads is a multiple of 8"));
  EXPECT_THAT(refusal(Options(kConfig, Way::kUlysses, 3)), HasSubstr("3 ranks: at most 2"));
  RunOptions options = Options(kConfig, Way::kDsp, 2);
  options.devices.pop_back();
  EXPECT_THAT(refusal(options), HasSubstr("--devices names 1 GPUs for 2 ranks"));
  options = Options(kConfig, Way::kDsp, 2);
  options.devices[1] = "cuda:99";
  EXPECT_THAT(refusal(options), HasSubstr("99"));
  options.devices[1] = "tpu:0";
  EXPECT_THAT(refusal(options), HasSubstr("tpu:0"));
  options = Options(kConfig, Way::kDsp, 2);
  options.chunk_rows = 0;
  EXPECT_THAT(refusal(options), HasSubstr("--chunk-rows 0 is outside 1..32768"));
}

}  // namespace
}  // namespace dovetail::spatio_temporal
