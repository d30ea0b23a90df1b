#include <cmath>
#include <numeric>

#include "examples/spatio_temporal/rank_run.h"
#include "examples/spatio_temporal/run_threads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gemm.h"

namespace dovetail::spatio_temporal {
namespace {

using ::testing::HasSubstr;
using Doubles = std::vector<double>;

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

// ---- against the same model in double, token by token ----

// [in][out]: a product with the identity is exact.
Doubles Transposed(const kernels::PackedWeights& weights, kernels::Stream& stream) {
  const int64_t in = weights.cols(), out = weights.rows();
  std::vector<float> identity(in * in), y(in * out);
  for (int64_t i = 0; i < in; ++i) identity[i * in + i] = 1;
  auto scratch = kernels::AlignedBuffer::Create(kernels::GemmScratchBytes(in, in));
  EXPECT_TRUE(scratch.ok());
  const kernels::GemmOutput output{.weights = &weights, .y = y.data(), .y_stride = out};
  EXPECT_TRUE(kernels::Gemm({identity.data(), in, in, {&output, 1}, scratch->bytes()}, stream).ok());
  return {y.begin(), y.end()};
}

Doubles Times(const Doubles& x, const Doubles& transposed, int64_t in) {  // [n][in] x [in][out]
  const int64_t n = x.size() / in, out = transposed.size() / in;
  Doubles y(n * out);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < in; ++i)
      for (int64_t o = 0; o < out; ++o) y[r * out + o] += x[r * in + i] * transposed[i * out + o];
  return y;
}

Doubles Normed(const Doubles& x, const std::vector<float>& weight) {
  const size_t c = weight.size();
  Doubles y(x.size());
  for (size_t row = 0; row < x.size(); row += c) {
    double squares = 0;
    for (size_t i = 0; i < c; ++i) squares += x[row + i] * x[row + i];
    for (size_t i = 0; i < c; ++i) y[row + i] = x[row + i] / std::sqrt(squares / c + 1e-6) * weight[i];
  }
  return y;
}

// One block; rows of one sequence are those with the same group_of(t, s).
void ReferenceBlock(const Config& config, const BlockWeights& weights, bool spatial, kernels::Stream& stream,
                    Doubles& x) {
  const int64_t c = config.channels, dim = config.head_dim(), rows = config.frames * config.positions;
  const Doubles normed = Normed(x, weights.attention_norm);
  const Doubles q = Times(normed, Transposed(weights.query, stream), c);
  const Doubles k = Times(normed, Transposed(weights.key, stream), c);
  const Doubles v = Times(normed, Transposed(weights.value, stream), c);
  Doubles o(x.size());
  const auto sequence_of = [&](int64_t row) { return spatial ? row / config.positions : row % config.positions; };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < config.heads; ++head) {
      double sum = 0;
      for (int64_t other = 0; other < rows; ++other) {
        if (sequence_of(other) != sequence_of(row)) continue;
        double score = 0;
        for (int64_t i = head * dim; i < (head + 1) * dim; ++i) score += q[row * c + i] * k[other * c + i];
        const double weight = std::exp(score / std::sqrt(static_cast<double>(dim)));
        sum += weight;
        for (int64_t i = head * dim; i < (head + 1) * dim; ++i) o[row * c + i] += weight * v[other * c + i];
      }
      for (int64_t i = head * dim; i < (head + 1) * dim; ++i) o[row * c + i] /= sum;
    }
  }
  const auto add = [&](const Doubles& more) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += more[i];
  };
  add(Times(o, Transposed(weights.out, stream), c));
  const Doubles again = Normed(x, weights.mlp_norm);
  Doubles gate = Times(again, Transposed(weights.gate, stream), c);
  const Doubles up = Times(again, Transposed(weights.up, stream), c);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    gate[i] = g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * up[i];
  }
  add(Times(gate, Transposed(weights.down, stream), config.mlp()));
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
  const auto values = [&] {
    const auto* elements = reinterpret_cast<const BF16*>((*run)->hidden().data());
    Doubles x(config.frames * config.positions * config.channels);
    for (size_t i = 0; i < x.size(); ++i) x[i] = ToFloat(elements[i]);
    return x;
  };
  Doubles reference = values();
  const Doubles before = reference;
  for (int pair = 0; pair < config.pairs; ++pair) {
    ReferenceBlock(config, weights->spatial[pair], true, *stream, reference);
    ReferenceBlock(config, weights->temporal[pair], false, *stream, reference);
    ASSERT_TRUE((*run)->Pair(StepId(0), pair).ok());
  }
  const auto distance = [](const Doubles& a, const Doubles& b) {
    double error = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      error += (a[i] - b[i]) * (a[i] - b[i]);
      size += b[i] * b[i];
    }
    return std::sqrt(error / size);
  };
  EXPECT_LT(distance(values(), reference), 0.012) << "measured: 0.006";
  EXPECT_GT(distance(before, reference), 0.5) << "the blocks do something";
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
