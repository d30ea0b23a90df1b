#include "examples/spatio_temporal/rank_run.h"
#include "examples/spatio_temporal/run_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/examples/double_model.h"

namespace dovetail::spatio_temporal {
namespace {

using ::testing::HasSubstr;

RunOptions Options(const Config& config, Way way, int ranks) {
  RunOptions options;
  options.config = config;
  options.way = way;
  options.ranks = ranks;
  options.chunk_bytes = 8192;  // several pieces, some of them in the middle of a row
  return options;
}

std::string DigestOf(const RunOptions& options) {
  const auto reports = RunThreads(options);
  EXPECT_TRUE(reports.ok()) << reports.status();
  if (!reports.ok()) return std::string(reports.status().message());
  const auto summary = Summarize(options, *reports);
  EXPECT_TRUE(summary.ok()) << summary.status();
  return summary.ok() ? summary->digest : std::string(summary.status().message());
}

// Sizes that no number of ranks but one divides, and more than one segment of 64 along either axis.
const Config kUneven{.frames = 71, .positions = 67, .channels = 40, .heads = 5, .pairs = 2, .steps = 1, .seed = 3};

TEST(SpatioTemporal, HasTheSameBitsOnAnyNumberOfRanksEitherWay) {
  for (const Config& config : {*Preset("tiny"), kUneven}) {
    const std::string one = DigestOf(Options(config, Way::kDsp, 1));
    EXPECT_EQ(one.size(), 64u);
    for (const Way way : {Way::kDsp, Way::kUlysses}) {
      for (int ranks = 1; ranks <= 4; ++ranks) {
        SCOPED_TRACE(absl::StrCat(config.DebugString(), " ", std::string(NameOf(way)), " ", ranks));
        EXPECT_EQ(DigestOf(Options(config, way, ranks)), one);
      }
    }
    Config other = config;
    other.seed += 1;
    EXPECT_NE(DigestOf(Options(other, Way::kDsp, 2)), one);
  }
}

TEST(SpatioTemporal, SendsTwoFMOverPByRankAndPairWithSwitchesAndEightWithUlysses) {
  const Config config{.frames = 12, .positions = 24, .channels = 48, .heads = 12, .pairs = 2, .steps = 2};
  const int64_t m = 12 * 24 * 48 * 2;
  for (const int p : {2, 3, 4}) {
    for (const auto& [way, times] : {std::pair(Way::kDsp, 2), std::pair(Way::kUlysses, 8)}) {
      const auto reports = RunThreads(Options(config, way, p));
      ASSERT_TRUE(reports.ok()) << reports.status();
      for (const RankReport& report : *reports)
        EXPECT_EQ(report.bytes_sent, config.pairs * config.steps * times * (p - 1) * m / p / p)
            << std::string(NameOf(way)) << ", " << p << " ranks, rank " << report.rank;
      EXPECT_EQ(*FormulaBytesOfPair(config, way, p), times * (p - 1) * m / p);
    }
  }
  // Uneven: 71 frames and 67 positions on 2 ranks are 35 + 36 and 33 + 34, of which 35 x 33 + 36 x 34 rows stay.
  EXPECT_EQ(*FormulaBytesOfPair(kUneven, Way::kDsp, 2), 2 * (71 * 67 - 35 * 33 - 36 * 34) * 40 * 2);
  const auto reports = RunThreads(Options(kUneven, Way::kDsp, 2));
  ASSERT_TRUE(reports.ok());
  EXPECT_EQ((*reports)[0].bytes_sent, kUneven.pairs * (35 * 34 + 33 * 36) * 40 * 2);
}

TEST(SpatioTemporal, AgreesWithTheModelInDoublePrecision) {
  const Config config{.frames = 5, .positions = 66, .channels = 32, .heads = 4, .pairs = 2};
  const auto device = kernels::CreateCpuDevice({.threads = 1});
  ASSERT_TRUE(device.ok());
  const auto stream = (*device)->CreateStream();
  const auto weights = Weights::Random(config, &stream->pool());
  ASSERT_TRUE(weights.ok());
  const auto run = RankRun::Create(config, *weights, Way::kDsp, 0, 1, **device, nullptr);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(HiddenOf((*run)->hidden()), RandomHidden(config));
  for (int pair = 0; pair < config.pairs; ++pair) ASSERT_TRUE((*run)->Pair(StepId(0), pair).ok());
  const Doubles reference = ReferenceHidden(config);
  EXPECT_LT(Distance(HiddenOf((*run)->hidden()), reference), 0.012) << "measured: 0.006";
  EXPECT_GT(Distance(RandomHidden(config), reference), 0.5) << "the blocks do something";
}

TEST(SpatioTemporal, WithSwitchesAloneHiddenComesBackAsItWas) {
  Config config = kUneven;
  config.exchange_only = true;
  const RunOptions options = Options(config, Way::kDsp, 3);
  const auto reports = RunThreads(options);
  ASSERT_TRUE(reports.ok()) << reports.status();
  std::vector<BF16> frame(config.positions * config.channels);
  for (int64_t s = 0; s < config.positions; ++s) RandomRow(config, 0, s, frame.data() + s * config.channels);
  EXPECT_EQ((*reports)[0].frames[0], Sha256(std::as_bytes(std::span(frame))));
  EXPECT_EQ(Summarize(options, *reports)->pair_bytes, *FormulaBytesOfPair(config, Way::kDsp, 3));
  EXPECT_EQ(DigestOf(options), DigestOf(Options(config, Way::kDsp, 1)));
}

TEST(SpatioTemporal, SaysWhichNumberDoesNotFit) {
  const auto refusal = [](const RunOptions& options) { return std::string(RunThreads(options).status().message()); };
  const Config tiny = *Preset("tiny");
  EXPECT_THAT(refusal(Options(tiny, Way::kDsp, 7)), HasSubstr("7 ranks: at most 6, so that each has some frames"));
  EXPECT_THAT(refusal(Options(tiny, Way::kUlysses, 5)),
              HasSubstr("5 ranks: at most 4, so that each has some frames and some heads"));
  EXPECT_THAT(refusal(Options(tiny, Way::kDsp, 17)), HasSubstr("--ranks 17 is outside 1..16"));
  Config odd = tiny;
  odd.heads = 5;
  EXPECT_THAT(refusal(Options(odd, Way::kDsp, 1)), HasSubstr("channels 48 and heads 5"));
  odd = tiny;
  odd.frames = 0;
  EXPECT_THAT(refusal(Options(odd, Way::kDsp, 1)), HasSubstr("frames 0 is outside 1..4096"));
  EXPECT_THAT(std::string(Preset("huge").status().message()), HasSubstr("none of tiny, small, 64x4096, 128x9216"));
  EXPECT_THAT(std::string(ParseWay("ring").status().message()), HasSubstr("way ring"));
}

TEST(RunOptions, SurviveTheWayToARanksProcess) {
  RunOptions options = Options(kUneven, Way::kUlysses, 3);
  options.transport = "tcp";
  options.threads = 2;
  options.config.exchange_only = true;
  options.output = "a \"b\" c";
  const auto back = OptionsFromJson(ToJson(options));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(ToJson(*back), ToJson(options));
  EXPECT_FALSE(OptionsFromJson("{}").ok());
  EXPECT_FALSE(OptionsFromJson("go").ok());
}

}  // namespace
}  // namespace dovetail::spatio_temporal
