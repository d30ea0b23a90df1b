#include "server/cli/serve_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "report/html.h"
#include "server/cli/bench_serve_command.h"
#include "tests/loadgen/script_server.h"
#include "tests/support/test_data.h"

namespace dovetail::cli {
namespace {

using loadgen::Metric;
using loadgen::test::ScriptServer;
using loadgen::test::TextChunk;
using loadgen::test::UsageChunk;
using loadgen::test::Visit;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ServeRun RunAt(double rate, double ttft, double tpot, int64_t completed = 10, int64_t failed = 0) {
  ServeRun run;
  run.rate = rate;
  run.measured.completed = completed;
  run.measured.failed = failed;
  run.measured.good = completed / 2;
  run.measured.output_throughput = 16 * rate;
  if (failed > 0) run.first_error = "HTTP 503: <full>";
  if (completed == 0) return run;
  const auto put = [&](Metric metric, double ms) {
    run.measured.of[static_cast<size_t>(metric)] = {completed, ms, ms, 0, {2 * ms}};
  };
  put(Metric::kTtft, ttft);
  put(Metric::kTpot, tpot);
  put(Metric::kE2el, ttft + 15 * tpot);
  run.server = loadgen::ServerTimes{0.01, 0.4, 1.5, 10};
  return run;
}

ServeReportInput Input(std::vector<ServeRun> runs) {
  ServeReportInput input;
  input.model = "org/m";
  input.server = "http://h:80";
  input.load = "random, 10 requests";
  input.swept = true;
  input.goodput.ttft_ms = 100;
  input.percentiles = {50, 99};
  input.knee = loadgen::Knee{2.0, 4.0};
  input.runs = std::move(runs);
  return input;
}

report::Figure FigureOf(const report::Report& report, const std::string& title) {
  for (const report::Figure& figure : report.figures)
    if (figure.title == title) return figure;
  ADD_FAILURE() << "no figure " << title;
  return {};
}

TEST(ServeReports, DrawWhatASweepMeasured) {
  const report::Report report = ServeReport(Input({RunAt(1, 40, 10), RunAt(2, 60, 11), RunAt(4, 300, 12)}));
  const report::Figure latency = FigureOf(report, "TTFT and TPOT against the rate of requests");
  ASSERT_EQ(latency.charts.size(), 2u);
  ASSERT_EQ(latency.charts[0].series.size(), 2u);
  EXPECT_EQ(latency.charts[0].series[0].points[2].x, 4);
  EXPECT_EQ(latency.charts[0].series[0].points[2].y, 300);
  EXPECT_EQ(latency.charts[0].series[1].name, "p99");
  EXPECT_EQ(latency.charts[0].series[1].points[2].y, 600);
  EXPECT_EQ(latency.charts[0].on_y[0].at, 100);
  EXPECT_EQ(latency.charts[1].series[0].points[1].y, 11);
  EXPECT_THAT(latency.says, HasSubstr("keep to the limits up to 2 requests per second, and fewer at 4."));
  EXPECT_EQ(latency.table.rows.size(), 3u);
  EXPECT_EQ(latency.table.rows[1][3], "60");
  EXPECT_EQ(latency.table.rows[1].back(), "50.0 %");
  EXPECT_EQ(report.facts[0].second, "2 req/s");
}

TEST(ServeReports, DivideAnAverageRequestByWhatTheServerSays) {
  const report::Figure figure = FigureOf(ServeReport(Input({RunAt(1, 40, 10)})), "Where each millisecond goes");
  ASSERT_EQ(figure.bars.size(), 1u);
  ASSERT_EQ(figure.bars[0].bars.size(), 1u);
  const auto& parts = figure.bars[0].bars[0].values;
  ASSERT_EQ(parts.size(), 4u);
  // Of 190 ms the server accounts for 1 + 40 + 150: it may count more than the client did, then the rest is not drawn.
  EXPECT_NEAR(parts[0], 1, 1e-9);
  EXPECT_NEAR(parts[1], 40, 1e-9);
  EXPECT_NEAR(parts[2], 150, 1e-9);
  EXPECT_NEAR(parts[3], -1, 1e-9);
  EXPECT_EQ(figure.table.rows[0].back(), "10");
}

TEST(ServeReports, WithoutTheServersTimesDivideByTheClientsAndSayWhy) {
  ServeRun run = RunAt(1, 40, 10);
  run.server = absl::UnavailableError("/metrics: HTTP 401: no key");
  const report::Figure figure = FigureOf(ServeReport(Input({run})), "Where each millisecond goes");
  EXPECT_EQ(figure.bars[0].bars[0].values, (std::vector<double>{40, 150}));
  EXPECT_THAT(figure.says, HasSubstr("/metrics: HTTP 401: no key"));
}

TEST(ServeReports, ALimitFarAboveWhatWasMeasuredDoesNotFlattenTheCurve) {
  ServeReportInput input = Input({RunAt(1, 40, 10)});
  input.goodput.ttft_ms = 60000;
  const report::PointChart chart = ServeReport(input).figures[0].charts[0];
  EXPECT_TRUE(chart.on_y.empty());
  EXPECT_EQ(chart.y.name, "ms (limit 60,000 ms: above)");
  EXPECT_FALSE(chart.y.logarithmic);
}

TEST(ServeReports, HaveFailedRunsInTheTableAndNotInThePicture) {
  const report::Report report = ServeReport(Input({RunAt(1, 40, 10, 9, 1), RunAt(8, 0, 0, 0, 10)}));
  const report::Figure& latency = report.figures[0];
  EXPECT_EQ(latency.charts[0].series[0].points.size(), 1u);
  EXPECT_EQ(latency.table.rows[1][2], "10");
  EXPECT_EQ(latency.table.rows[1][3], "-");
  EXPECT_THAT(report.notes,
              ::testing::Contains(HasSubstr("At 8 requests/s: 10 of 10 requests failed; the first: HTTP")));
  EXPECT_THAT(report::HtmlOf(report), AllOf(HasSubstr("HTTP 503: &lt;full&gt;"), Not(HasSubstr("<full>"))));
}

TEST(ServeReports, OfNothingSayWhatIsMissing) {
  for (const auto& runs : {std::vector<ServeRun>{}, std::vector<ServeRun>{RunAt(8, 0, 0, 0, 10)}}) {
    ServeReportInput input = Input(runs);
    input.knee.reset();
    const report::Report report = ServeReport(input);
    for (const report::Figure& figure : report.figures) EXPECT_NE(figure.missing, "") << figure.title;
    EXPECT_FALSE(report.notes.empty());
    EXPECT_THAT(report::HtmlOf(report), HasSubstr("What is not shown"));
  }
}

TEST(ServeReports, OfOneLoadSayThatItIsOnePoint) {
  ServeReportInput input = Input({RunAt(0, 40, 10)});
  input.swept = false;
  input.knee.reset();
  input.runs[0].rate.reset();
  input.runs[0].measured.request_throughput = 3.5;
  const report::Figure latency = ServeReport(input).figures[0];
  EXPECT_EQ(latency.charts[0].series[0].points[0].x, 3.5);
  EXPECT_THAT(latency.says, HasSubstr("--sweep-rates"));
  EXPECT_EQ(latency.table.rows[0][0], "3.5 (not set)");
}

// Answers at once; /metrics counts the requests, each with 1 ms of waiting, 2 of prefill and 3 of decoding.
class Server {
 public:
  int fails_from = 1'000'000;  // the number of the request
  ScriptServer server{[this](Visit& visit) { Serve(visit); }};

  BenchServeFlags Flags(const std::string& report) {
    BenchServeFlags flags;
    flags.port = server.port();
    flags.dataset.num_prompts = 4;
    flags.dataset.random_input_len = 20;
    flags.dataset.random_output_len = 5;
    flags.disable_tqdm = true;
    flags.report = report;
    return flags;
  }
  int asked() const { return asked_; }

 private:
  void Serve(Visit& visit) {
    if (absl::StartsWith(visit.head(), "GET /v1/models"))
      return visit.Answer(200, json{{"data", {{{"id", "org/m"}, {"max_model_len", 4096}}}}}.dump());
    if (absl::StartsWith(visit.head(), "GET /metrics")) return visit.Answer(200, Metrics(asked_));
    if (absl::StartsWith(visit.head(), "POST /tokenize"))
      return visit.Answer(200, json{{"count", 2 + std::count(visit.body().begin(), visit.body().end(), ' ')}}.dump());
    const json body = json::parse(visit.body());
    if (++asked_ >= fails_from) return visit.Answer(500, R"({"error": {"message": "lost"}})");
    visit.BeginStream();
    for (int64_t i = 0; i < body["max_tokens"]; ++i) visit.Event(TextChunk(" a"));
    visit.Event(UsageChunk(20, body["max_tokens"]));
    visit.Event("[DONE]");
    visit.EndStream();
  }
  static std::string Metrics(int requests) {
    const auto line = [&](const char* name, double seconds) {
      return absl::StrCat("vllm:request_", name, "_time_seconds_sum{engine=\"0\",model_name=\"a } b\"} ",
                          seconds * requests, "\n");
    };
    return absl::StrCat("# HELP x y\n", line("queue", 0.001), line("prefill", 0.002), line("decode", 0.003),
                        "vllm:request_decode_time_seconds_count{engine=\"0\"} ", requests, " 1700000000\n");
  }

  std::atomic<int> asked_ = 0;
};

struct Output {
  absl::Status status;
  std::string html;  // empty: there is no report
};
Output RunCommand(const BenchServeFlags& flags) {
  ::testing::internal::CaptureStdout();
  Output output{RunBenchServe(flags), ""};
  ::testing::internal::GetCapturedStdout();
  if (std::filesystem::is_regular_file(flags.report)) output.html = ::dovetail::test::ReadFile(flags.report);
  return output;
}

TEST(ServeReportCommand, WritesAReportOfASweepWithWhatTheServerSays) {
  Server server;
  const auto path = ::dovetail::test::TempFolder() / "out.html";
  BenchServeFlags flags = server.Flags(path.string());
  flags.sweep_rates = "100,200";
  flags.goodput = {"ttft:100000"};
  const Output output = RunCommand(flags);
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.html,
              AllOf(HasSubstr("<h1>org/m under load</h1>"), HasSubstr("waiting for a place: 1 ms"),
                    HasSubstr("prefill: 2 ms"), HasSubstr("decode: 3 ms"), HasSubstr("at least 200 req/s")));
}

TEST(ServeReportCommand, WritesWhatCameWhereRequestsFail) {
  Server server;
  server.fails_from = 5;  // all of the second rate
  const auto path = ::dovetail::test::TempFolder() / "out.html";
  BenchServeFlags flags = server.Flags(path.string());
  flags.sweep_rates = "100,200,400";
  flags.goodput = {"ttft:100000"};
  Output output = RunCommand(flags);
  EXPECT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.html,
              AllOf(HasSubstr("At 200 requests/s: 4 of 4 requests failed"), HasSubstr("and fewer at 200.")));
  flags.sweep_rates = "";
  flags.request_rate = "100";
  output = RunCommand(flags);
  EXPECT_THAT(std::string(output.status.message()), HasSubstr("no request succeeded"));
  EXPECT_THAT(output.html,
              AllOf(HasSubstr("4 of 4 requests failed"), HasSubstr("no request succeeded, so there is no")));
}

TEST(ServeReportCommand, APathThatCannotBeWrittenIsRefusedBeforeAnythingIsSent) {
  Server server;
  const auto folder = ::dovetail::test::TempFolder();
  for (const auto& path : {folder / "nowhere" / "out.html", folder}) {
    const Output output = RunCommand(server.Flags(path.string()));
    EXPECT_EQ(output.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(output.status.message()),
                HasSubstr("--report: " + path.string() + ": cannot be written: "));
  }
  EXPECT_EQ(server.asked(), 0);
  EXPECT_EQ(server.server.connections(), 0);
}

}  // namespace
}  // namespace dovetail::cli
