#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/statistics.h"
#include "loadgen/arrivals.h"
#include "loadgen/measurement.h"
#include "loadgen/report.h"
#include "loadgen/sweep.h"

// Arrivals, metrics, reports and sweeps: known values in, known values out.

namespace dovetail::loadgen {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

RequestRecord Record(double start, double ttft, std::vector<double> itl, int64_t output_len, int64_t input_len = 10) {
  RequestRecord record;
  record.success = true;
  record.planned_s = record.start_s = start;
  record.ttft_s = ttft;
  record.latency_s = ttft;
  for (const double gap : itl) record.latency_s += gap;
  record.itl_s = std::move(itl);
  record.output_len = output_len;
  record.input_len = input_len;
  return record;
}

RequestRecord Failed(double start, const std::string& error) {
  RequestRecord record;
  record.start_s = start;
  record.error = error;
  return record;
}

std::string ErrorOf(const ArrivalOptions& options) { return std::string(options.Validate().message()); }

TEST(Arrivals, WithoutARateAllAreSentAtOnce) {
  EXPECT_THAT(ArrivalTimes({.request_rate = INFINITY}, 3, 1), ElementsAre(0, 0, 0));
}

TEST(Arrivals, TheLastIsSentAtCountOverRate) {
  for (const double burstiness : {0.3, 1.0, 7.0})
    for (const uint64_t seed : {1, 2, 3}) {
      const auto times = ArrivalTimes({.request_rate = 4, .burstiness = burstiness}, 1000, seed);
      EXPECT_NEAR(times.back(), 250, 1e-9) << "burstiness " << burstiness << ", seed " << seed;
      EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
    }
}

TEST(Arrivals, GapsHaveTheVariationOfTheirGammaDistribution) {
  for (const double burstiness : {0.25, 1.0, 4.0}) {
    const auto times = ArrivalTimes({.request_rate = 2, .burstiness = burstiness}, 20000, 7);
    std::vector<double> gaps;
    for (size_t i = 1; i < times.size(); ++i) gaps.push_back(times[i] - times[i - 1]);
    // The coefficient of variation of a gamma distribution of shape b is 1 / sqrt(b).
    EXPECT_NEAR(StandardDeviation(gaps) / Mean(gaps), 1 / std::sqrt(burstiness), 0.05 / std::sqrt(burstiness));
  }
}

TEST(Arrivals, InfiniteBurstinessGivesEqualGaps) {
  EXPECT_THAT(ArrivalTimes({.request_rate = 4, .burstiness = INFINITY}, 4, 1), ElementsAre(0.25, 0.5, 0.75, 1));
}

TEST(Arrivals, ARampRisesFromItsFirstRateToItsLast) {
  ArrivalOptions ramp{.request_rate = INFINITY,
                      .burstiness = INFINITY,
                      .ramp_up = RampUp::kLinear,
                      .ramp_up_start_rps = 1,
                      .ramp_up_end_rps = 3};
  EXPECT_DOUBLE_EQ(RateAt(ramp, 0, 3), 1);
  EXPECT_DOUBLE_EQ(RateAt(ramp, 1, 3), 2);
  EXPECT_DOUBLE_EQ(RateAt(ramp, 2, 3), 3);
  EXPECT_THAT(ArrivalTimes(ramp, 3, 1), ElementsAre(1, 1.5, 1.5 + 1.0 / 3)) << "not scaled";
  ramp.ramp_up = RampUp::kExponential;
  ramp.ramp_up_end_rps = 4;
  EXPECT_DOUBLE_EQ(RateAt(ramp, 1, 3), 2);
}

TEST(Arrivals, WhatDoesNotFitIsRefusedByTheFlagsName) {
  EXPECT_THAT(ErrorOf({.request_rate = NAN}), HasSubstr("--request-rate"));
  EXPECT_THAT(ErrorOf({.request_rate = 0}), HasSubstr("--request-rate: 0 is not a rate"));
  EXPECT_THAT(ErrorOf({.request_rate = -1}), HasSubstr("--request-rate"));
  EXPECT_THAT(ErrorOf({.request_rate = 1, .burstiness = NAN}), HasSubstr("--burstiness"));
  EXPECT_THAT(ErrorOf({.request_rate = 1, .burstiness = 0}), HasSubstr("--burstiness"));
  EXPECT_THAT(ErrorOf({.request_rate = 1, .ramp_up = RampUp::kLinear, .ramp_up_start_rps = 1, .ramp_up_end_rps = 2}),
              HasSubstr("--request-rate: --ramp-up-strategy sets the rate"));
  EXPECT_THAT(ErrorOf({.request_rate = INFINITY, .ramp_up = RampUp::kLinear, .ramp_up_end_rps = 2}),
              HasSubstr("--ramp-up-start-rps"));
  EXPECT_THAT(ErrorOf({.request_rate = INFINITY, .ramp_up_end_rps = 2}), HasSubstr("need --ramp-up-strategy"));
  EXPECT_EQ(ErrorOf({.request_rate = INFINITY}), "");
}

TEST(Metrics, AreVllmsOverKnownRecords) {
  const std::vector<RequestRecord> records = {Record(0, 0.1, {0.02, 0.04}, 4), Record(0.5, 0.3, {}, 1),
                                              Failed(0.6, "gone"), Record(1.2, 0.2, {0.06}, 2, 30)};
  const std::vector<double> percentiles = {50, 90};
  const Measurement m = Measure(records, 4, percentiles, {.ttft_ms = 250, .tpot_ms = 50});
  EXPECT_EQ(m.completed, 3);
  EXPECT_EQ(m.failed, 1);
  EXPECT_EQ(m.total_input_tokens, 50);
  EXPECT_EQ(m.total_output_tokens, 7);
  EXPECT_DOUBLE_EQ(m.request_throughput, 0.75);
  EXPECT_DOUBLE_EQ(m.output_throughput, 1.75);
  EXPECT_DOUBLE_EQ(m.total_token_throughput, 57.0 / 4);
  // TTFT 100, 300, 200 ms.
  EXPECT_NEAR(m.Of(Metric::kTtft).mean_ms, 200, 1e-9);
  EXPECT_NEAR(m.Of(Metric::kTtft).median_ms, 200, 1e-9);
  EXPECT_NEAR(m.Of(Metric::kTtft).std_ms, std::sqrt(20000.0 / 3), 1e-9);  // of the population
  EXPECT_NEAR(m.Of(Metric::kTtft).percentiles_ms[1], 280, 1e-9);          // between 200 and 300
  // TPOT over the two requests of more than one token: 0.06 s / 3 and 0.06 s / 1.
  EXPECT_EQ(m.Of(Metric::kTpot).count, 2);
  EXPECT_NEAR(m.Of(Metric::kTpot).mean_ms, 40, 1e-9);
  // ITL over all gaps: 20, 40, 60 ms.
  EXPECT_NEAR(m.Of(Metric::kItl).mean_ms, 40, 1e-9);
  EXPECT_EQ(m.Of(Metric::kItl).count, 3);
  EXPECT_NEAR(m.Of(Metric::kE2el).mean_ms, (160 + 300 + 260) / 3.0, 1e-9);
  // Only the first has both TTFT <= 250 ms and TPOT <= 50 ms.
  EXPECT_EQ(m.good, 1);
  EXPECT_EQ(m.good_output_tokens, 4);
  EXPECT_DOUBLE_EQ(m.request_goodput, 0.25);
  // Chunks in [0, 1): the three of the first and the one of the second; both touch that second.
  EXPECT_EQ(m.max_output_tokens_per_s, 4);
  EXPECT_EQ(m.max_concurrent_requests, 2);
}

TEST(Metrics, OneTokenMeetsAnyTpotAndALimitIsMetExactly) {
  Goodput goodput;
  goodput.tpot_ms = 0;
  EXPECT_TRUE(goodput.Holds(Record(0, 0.3, {}, 1)));
  goodput = {};
  goodput.ttft_ms = 250;
  EXPECT_TRUE(goodput.Holds(Record(0, 0.25, {0.1}, 2)));
  EXPECT_FALSE(goodput.Holds(Record(0, 0.2501, {0.1}, 2)));
}

TEST(Metrics, TheSteadyStateLiesBetweenTheFirstEndAndTheLastStart) {
  // Ends at 1, 2, 3 and 4; starts at 0, 0, 1 and 2.
  const std::vector<RequestRecord> records = {Record(0, 0.5, {0.5}, 2), Record(0, 0.5, {1.5}, 2),
                                              Record(1, 0.5, {0.5, 1}, 6), Record(2, 1, {1}, 2)};
  const auto window = FindSteadyWindow(records);
  ASSERT_TRUE(window.has_value());
  EXPECT_DOUBLE_EQ(window->begin_s, 1);
  EXPECT_DOUBLE_EQ(window->end_s, 2);
  const Measurement m = MeasureSteady(records, *window, std::vector<double>{50}, {});
  EXPECT_DOUBLE_EQ(m.duration_s, 1);
  // In [1, 2]: the last chunk of the first two (one token each), two chunks of the third (two tokens each).
  EXPECT_DOUBLE_EQ(m.output_throughput, 6);
  EXPECT_EQ(m.completed, 2);
  EXPECT_EQ(m.Of(Metric::kTtft).count, 2) << "of those that began in it";
  EXPECT_NEAR(m.Of(Metric::kTtft).mean_ms, 750, 1e-9);
  EXPECT_FALSE(FindSteadyWindow(std::vector<RequestRecord>{Record(0, 1, {}, 1), Record(0, 2, {}, 1)}).has_value());
  EXPECT_FALSE(FindSteadyWindow({}).has_value());
}

RunDescription Asked() {
  RunDescription asked;
  asked.date = "20261125-201500";
  asked.backend = "openai";
  asked.model_id = "org/model";
  asked.num_prompts = 4;
  asked.arrivals = {.request_rate = INFINITY};
  asked.metrics = {kMetrics.begin(), kMetrics.end()};
  asked.percentiles = {99};
  asked.lengths_by = "words";
  return asked;
}

TEST(Report, HasTheKeysOfVllm) {
  LoadResult result;
  result.records = {Record(0, 0.1, {0.02}, 2)};
  result.duration_s = 2;
  RunDescription asked = Asked();
  asked.metadata = {{"tp", "2"}};
  const auto json = JsonOf(MakeReport(asked, result), /*detailed=*/false);
  for (const char* key : {"date",
                          "endpoint_type",
                          "backend",
                          "label",
                          "model_id",
                          "tokenizer_id",
                          "num_prompts",
                          "tp",
                          "request_rate",
                          "burstiness",
                          "max_concurrency",
                          "duration",
                          "completed",
                          "failed",
                          "total_input_tokens",
                          "total_output_tokens",
                          "request_throughput",
                          "request_goodput",
                          "output_throughput",
                          "total_token_throughput",
                          "max_output_tokens_per_s",
                          "max_concurrent_requests"})
    EXPECT_TRUE(json.contains(key)) << key;
  for (const char* statistic : {"mean", "median", "std", "p99"})
    for (const char* metric : {"ttft", "tpot", "itl", "e2el"})
      EXPECT_TRUE(json.contains(absl::StrCat(statistic, "_", metric, "_ms"))) << statistic << " " << metric;
  EXPECT_EQ(json["request_rate"], "inf");
  EXPECT_TRUE(json["request_goodput"].is_null());
  EXPECT_TRUE(json["max_concurrency"].is_null());
  EXPECT_NEAR(json["mean_ttft_ms"].get<double>(), 100, 1e-9);
  EXPECT_FALSE(json.contains("ttfts"));
  const auto detailed = JsonOf(MakeReport(asked, result), /*detailed=*/true);
  for (const char* key : {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"})
    EXPECT_EQ(detailed[key].size(), 1u) << key;
}

TEST(Report, WithoutASuccessThereIsNoZeroLatency) {
  LoadResult result;
  result.records = {Failed(0, "HTTP 503"), Failed(0, "HTTP 503")};
  result.duration_s = 1;
  const RunReport report = MakeReport(Asked(), result);
  const auto json = JsonOf(report, false);
  EXPECT_EQ(json["failed"], 2);
  EXPECT_TRUE(json["mean_ttft_ms"].is_null());
  EXPECT_TRUE(json["p99_e2el_ms"].is_null());
  EXPECT_THAT(TextOf(report), HasSubstr("WARNING: no request succeeded"));
  EXPECT_THAT(TextOf(report), HasSubstr("Error 1: HTTP 503"));
}

TEST(Report, SaysWhatMakesNumbersOtherThanTheySeem) {
  LoadResult result;
  for (int i = 0; i < 4; ++i) result.records.push_back(Record(i, 0.1, {0.02}, 2));
  result.records[0].counted_by = RequestRecord::CountedBy::kChunks;
  result.records[1].usage_doubt = "completion_tokens is 9, but 4 were the most that was asked for";
  result.records[2].planned_s = 1.5;  // sent half a second late
  result.duration_s = 4;
  result.stopped = true;
  result.not_sent = 6;
  const RunReport report = MakeReport(Asked(), result);
  const std::string text = TextOf(report);
  EXPECT_THAT(text, HasSubstr("1 answers had no usage, and there is no --tokenizer"));
  EXPECT_THAT(text, HasSubstr("1 answers have a usage that cannot be true; the first: completion_tokens is 9"));
  EXPECT_THAT(text, HasSubstr("this client was late itself"));
  EXPECT_THAT(text, HasSubstr("the run was stopped: 6 requests were not sent"));
  EXPECT_NEAR(JsonOf(report, false)["client_lateness_ms"]["max"].get<double>(), 500, 1e-9);
}

TEST(Report, FilesAreNamedAsVllmNamesThem) {
  RunDescription asked = Asked();
  EXPECT_EQ(ResultFileName(asked), "openai-infqps-model-20261125-201500.json");
  asked.arrivals.request_rate = 4;
  asked.max_concurrency = 8;
  asked.label = "mine";
  EXPECT_EQ(ResultFileName(asked), "mine-4.0qps-concurrency8-model-20261125-201500.json");
  asked.arrivals = {.request_rate = INFINITY, .ramp_up = RampUp::kLinear, .ramp_up_start_rps = 1, .ramp_up_end_rps = 9};
  EXPECT_EQ(ResultFileName(asked), "mine-ramp-up-linear-1qps-9qps-concurrency8-model-20261125-201500.json");
  EXPECT_EQ(PercentileWord(99), "p99");
  EXPECT_EQ(PercentileWord(99.9), "p99.9");
  EXPECT_EQ(PythonFloat(0.5), "0.5");
}

std::vector<double> Tried(SweepOptions options, const std::function<double(double)>& attained) {
  std::vector<SweepPoint> points;
  std::vector<double> rates;
  while (const auto rate = NextRate(options, points)) {
    rates.push_back(*rate);
    points.push_back({*rate, attained(*rate)});
  }
  return rates;
}

TEST(Sweep, StopsAtTheFirstRateThatDoesNotHoldAndRefines) {
  const auto knee_at_5 = [](double rate) { return rate <= 5 ? 0.95 : 0.4; };
  EXPECT_THAT(Tried({.rates = {1, 2, 4, 8, 16}, .attainment = 0.9}, knee_at_5), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(Tried({.rates = {1, 2, 4, 8, 16}, .attainment = 0.9, .refine = 2}, knee_at_5),
              ElementsAre(1, 2, 4, 8, 6, 5));
  EXPECT_THAT(Tried({.rates = {8, 16}, .attainment = 0.9, .refine = 2}, knee_at_5), ElementsAre(8))
      << "there is nothing below to refine towards";
  EXPECT_THAT(Tried({.rates = {1, 2}, .attainment = 0.9, .refine = 2}, knee_at_5), ElementsAre(1, 2));
}

TEST(Sweep, FindsTheKnee) {
  const Knee knee = FindKnee({.rates = {1, 2, 4}, .attainment = 0.9}, {{1, 1}, {2, 0.9}, {4, 0.1}, {3, 0.2}});
  EXPECT_EQ(knee.holds, 2);
  EXPECT_EQ(knee.fails, 3);
}

TEST(Sweep, ReadsRates) {
  EXPECT_THAT(*ParseRates("1,2.5,4"), ElementsAre(1, 2.5, 4));
  EXPECT_THAT(*ParseRates("1:10"), ElementsAre(1, 2, 4, 8));
  for (const char* bad : {"", "1,nan", "0:4", "a", "1,-2", "inf"})
    EXPECT_THAT(std::string(ParseRates(bad).status().message()), HasSubstr("--sweep-rates")) << bad;
  EXPECT_THAT(std::string(SweepOptions{.rates = {2, 1}}.Validate().message()), HasSubstr("does not rise"));
}

}  // namespace
}  // namespace dovetail::loadgen
