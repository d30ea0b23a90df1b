// Trace contexts, OTLP bodies, steps by second, and an exporter whose collector is not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/trace_context.h"
#include "server/metrics/request_trace.h"
#include "tracing/otlp_exporter.h"

namespace dovetail::tracing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr const char* kTraceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(Traceparent, IsReadAsW3cWritesIt) {
  const auto context = ParseTraceparent(kTraceparent);
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(TraceIdText(*context), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(SpanIdText(context->span), "00f067aa0ba902b7");
  EXPECT_TRUE(context->sampled);
  EXPECT_FALSE(ParseTraceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")->sampled);
  EXPECT_TRUE(ParseTraceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff")->sampled);
  EXPECT_TRUE(ParseTraceparent("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later").has_value());
}

TEST(Traceparent, AnythingElseIsNone) {
  const std::string good = kTraceparent;
  for (size_t size = 0; size < good.size(); ++size) EXPECT_FALSE(ParseTraceparent(good.substr(0, size))) << size;
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = 'G';
    EXPECT_FALSE(ParseTraceparent(bad)) << at;
  }
  for (const char* bad : {"00-00000000000000000000000000000000-00f067aa0ba902b7-01",
                          "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
                          "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                          "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
                          "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
                          "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more"})
    EXPECT_FALSE(ParseTraceparent(bad)) << bad;
}

class NoSink final : public SpanSink {
  void Add(Span) override {}
  void AddStep(const StepPart&) override {}
};

TEST(Sampling, TheParentsFlagDecidesAndElseTheRate) {
  const auto sink = std::make_shared<NoSink>();
  const std::string sampled = kTraceparent;
  const std::string not_sampled = sampled.substr(0, sampled.size() - 1) + "0";
  for (const double rate : {0.0, 1.0}) {
    const server::RequestTrace trace = server::BeginTrace({sink, rate}, sampled);
    EXPECT_NE(trace.sink, nullptr);
    EXPECT_EQ(TraceIdText(trace.context), "4bf92f3577b34da6a3ce929d0e0e4736");
    EXPECT_EQ(SpanIdText(trace.parent), "00f067aa0ba902b7");
    EXPECT_NE(trace.context.span, trace.parent);
    EXPECT_EQ(server::BeginTrace({sink, rate}, not_sampled).sink, nullptr);
    EXPECT_EQ(server::BeginTrace({sink, rate}, std::nullopt).sink != nullptr, rate == 1.0);
    EXPECT_EQ(server::BeginTrace({nullptr, rate}, sampled).sink, nullptr);
  }
  const std::string broken = "00-broken";
  EXPECT_EQ(server::BeginTrace({sink, 1}, broken).parent, 0u) << "a header that is none begins a trace";
  int taken = 0;
  for (int i = 0; i < 4000; ++i) taken += server::BeginTrace({sink, 0.25}, std::nullopt).sink != nullptr;
  EXPECT_NEAR(taken, 1000, 150);
}

TEST(OtlpJson, WritesIdsInHexadecimalAndNanosecondsAsText) {
  Span span{.parent = *ParseTraceparent(kTraceparent), .id = 0xab, .name = "prefill"};
  span.begin = absl::FromUnixNanos(1'700'000'000'123'456'789);
  span.end = span.begin + absl::Milliseconds(2);
  span.attributes = {{"tokens", int64_t{1} << 60}, {"rate", 0.5}, {"text", std::string("\xff bad")}};
  span.error = "lost";
  Span first = span;
  first.parent.span = 0;
  first.id = 0;
  first.of_server = true;
  first.error.clear();
  const auto json = nlohmann::json::parse(OtlpJson({"service", "instance", "1.0"}, {span, first}, absl::Hours(1)));
  const auto& resource = json["resourceSpans"][0];
  EXPECT_EQ(resource["resource"]["attributes"][0]["key"], "service.name");
  EXPECT_EQ(resource["resource"]["attributes"][0]["value"]["stringValue"], "service");
  const auto& spans = resource["scopeSpans"][0]["spans"];
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0]["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(spans[0]["spanId"], "00000000000000ab");
  EXPECT_EQ(spans[0]["parentSpanId"], "00f067aa0ba902b7");
  EXPECT_EQ(spans[0]["kind"], 1);
  EXPECT_EQ(spans[0]["startTimeUnixNano"], "1700003600123456789");
  EXPECT_EQ(spans[0]["endTimeUnixNano"], "1700003600125456789");
  EXPECT_EQ(spans[0]["attributes"][0]["value"]["intValue"], "1152921504606846976");
  EXPECT_EQ(spans[0]["attributes"][1]["value"]["doubleValue"], 0.5);
  EXPECT_EQ(spans[0]["status"]["code"], 2);
  EXPECT_EQ(spans[0]["status"]["message"], "lost");
  EXPECT_FALSE(spans[1].contains("parentSpanId"));
  EXPECT_FALSE(spans[1].contains("status"));
  EXPECT_EQ(spans[1]["kind"], 2);
  EXPECT_NE(spans[1]["spanId"], "0000000000000000");
}

TEST(StepSeconds, PartsOfASecondAreOneSpan) {
  StepSeconds steps;
  const absl::Time begin = absl::UnixEpoch();
  const TraceContext one{1, 2, 3, true}, other{1, 2, 4, true};
  for (int i = 0; i < 25; ++i) {
    const absl::Time at = begin + absl::Milliseconds(100) * i;
    steps.Add(
        {.parent = one, .name = "decode", .begin = at, .end = at + absl::Milliseconds(90), .tokens = 1, .dense_us = 7});
    if (i < 3)
      steps.Add({.parent = other, .name = "decode", .begin = at, .end = at + absl::Milliseconds(5), .tokens = 2});
  }
  std::vector<Span> spans;
  steps.Take(begin + absl::Milliseconds(2500), /*all=*/false, spans);
  ASSERT_THAT(spans, SizeIs(3)) << "two whole seconds of the one, and the other's, which is over";
  EXPECT_EQ(std::get<int64_t>(spans[0].attributes[0].value), 10);
  EXPECT_EQ(spans[0].end - spans[0].begin, absl::Milliseconds(990));
  EXPECT_EQ(std::get<int64_t>(spans[0].attributes[2].value), 70);
  EXPECT_EQ(spans[1].begin, begin + absl::Seconds(1));
  EXPECT_EQ(std::get<int64_t>(spans[2].attributes[1].value), 6);
  EXPECT_EQ(spans[2].parent, other);
  spans.clear();
  steps.Take(begin + absl::Milliseconds(2500), /*all=*/true, spans);
  ASSERT_THAT(spans, SizeIs(1));
  EXPECT_EQ(std::get<int64_t>(spans[0].attributes[0].value), 5);
  spans.clear();
  steps.Take(absl::InfiniteFuture(), /*all=*/true, spans);
  EXPECT_THAT(spans, IsEmpty());
}

TEST(OtlpEndpoint, TakesUrlsAndSaysWhatIsWrongWithOthers) {
  const auto plain = ParseEndpoint("http://collector:4318");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->Text(), "http://collector:4318/v1/traces");
  const auto whole = ParseEndpoint("https://[::1]:4319/here");
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->Text(), "https://[::1]:4319/here");
  for (const char* bad : {"", "collector:4318", "grpc://collector:4317", "http://", "http://:4318", "http://a:0",
                          "http://a:99999", "http://a:port", "http://user@host", "http://a/b c"}) {
    const auto status = ParseEndpoint(bad).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--otlp-traces-endpoint")) << bad;
  }
}

// Nothing listens there. A thread that records never waits, and nothing is kept beyond the limits.
TEST(OtlpExporter, WithoutACollectorSpansAreDroppedAndCountedAndTheEndIsBounded) {
  const absl::Time begun = SystemClock().Now();
  uint64_t dropped = 0;
  constexpr int kSpans = 50'000;
  {
    OtlpExporter exporter(*ParseEndpoint("http://127.0.0.1:1"), {"service", "instance", "1"});
    for (int i = 0; i < kSpans; ++i) {
      exporter.Add({.parent = {1, 2, 3, true}, .name = "x", .attributes = {}});
      exporter.AddStep({.parent = {1, 2, 3, true}, .name = "y"});
    }
    dropped = exporter.dropped();
    EXPECT_EQ(exporter.sent(), 0u);
  }
  EXPECT_GE(dropped, 2 * kSpans - 4 * OtlpExporter::kMaxQueued);
  EXPECT_LT(SystemClock().Now() - begun, absl::Seconds(20));
}

}  // namespace
}  // namespace dovetail::tracing
