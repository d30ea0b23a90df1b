#include "server/cli/bench_serve_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "tests/loadgen/script_server.h"
#include "tests/support/test_data.h"

// The command as a user has it, against servers of this process.

namespace dovetail::cli {
namespace {

using loadgen::test::ScriptServer;
using loadgen::test::TextChunk;
using loadgen::test::UsageChunk;
using loadgen::test::Visit;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Parse(std::vector<std::string> arguments, BenchServeFlags& flags) {
  CLI::App app;
  AddBenchServeFlags(app, flags);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "";
}

std::string ErrorOf(const std::vector<std::string>& arguments) {
  BenchServeFlags flags;
  if (const std::string error = Parse(arguments, flags); !error.empty()) return error;
  return std::string(ReadBenchServeFlags(flags).status().message());
}

TEST(BenchServeFlags, DefaultsAreThoseOfVllm) {
  BenchServeFlags flags;
  ASSERT_EQ(Parse({}, flags), "");
  const auto options = ReadBenchServeFlags(flags);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->url.Text(), "http://127.0.0.1:8000");
  EXPECT_EQ(options->api.endpoint, "/v1/completions");
  EXPECT_TRUE(options->api.ignore_eos) << "random prompts";
  EXPECT_EQ(options->dataset.num_prompts, 1000);
  EXPECT_EQ(options->dataset.random_input_len, 1024);
  EXPECT_EQ(options->dataset.random_output_len, 128);
  EXPECT_TRUE(std::isinf(options->arrivals.request_rate));
  EXPECT_EQ(options->arrivals.burstiness, 1);
  EXPECT_EQ(options->percentiles, std::vector<double>{99});
}

TEST(BenchServeFlags, AreSpelledAsVllms) {
  BenchServeFlags flags;
  ASSERT_EQ(Parse({"--backend",
                   "openai-chat",
                   "--base-url",
                   "https://h/p",
                   "--goodput",
                   "ttft:200",
                   "tpot:50",
                   "--metadata",
                   "a=1",
                   "b=x=y",
                   "--request-rate",
                   "2.5",
                   "--burstiness",
                   "inf",
                   "--input-len",
                   "10",
                   "--output-len",
                   "20",
                   "--random-range-ratio",
                   "{\"input\": 0.1, \"output\": 0.2}",
                   "--temperature",
                   "0",
                   "--top-k",
                   "5",
                   "--extra-body",
                   "{\"seed\": 1}",
                   "--percentile-metrics",
                   "ttft,e2el",
                   "--metric-percentiles",
                   "50,99.9",
                   "--header",
                   "X-A=b"},
                  flags),
            "");
  const auto options = ReadBenchServeFlags(flags);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->url.Text(), "https://h:443/p");
  EXPECT_EQ(options->api.endpoint, "/v1/chat/completions");
  EXPECT_EQ(options->goodput.ttft_ms, 200);
  EXPECT_EQ(options->goodput.tpot_ms, 50);
  EXPECT_EQ(options->metadata[1].second, "x=y");
  EXPECT_EQ(options->arrivals.request_rate, 2.5);
  EXPECT_EQ(options->dataset.random_input_len, 10);
  EXPECT_EQ(options->dataset.random_output_len, 20);
  EXPECT_EQ(options->dataset.random_output_range, 0.2);
  EXPECT_EQ(options->api.extra_body, json::parse(R"({"temperature": 0.0, "top_k": 5, "seed": 1})"));
  EXPECT_EQ(options->metrics.size(), 2u);
  EXPECT_EQ(options->percentiles, (std::vector<double>{50, 99.9}));
}

TEST(BenchServeFlags, WhatIsWrongIsNamed) {
  EXPECT_THAT(ErrorOf({"--num-prompts", "100000000"}), HasSubstr("--num-prompts: 100000000 is outside 1..1000000"));
  EXPECT_THAT(ErrorOf({"--request-rate", "nan"}), HasSubstr("--request-rate: 'nan'"));
  EXPECT_THAT(ErrorOf({"--request-rate", "-2"}), HasSubstr("--request-rate: -2"));
  EXPECT_THAT(ErrorOf({"--burstiness", "0"}), HasSubstr("--burstiness"));
  EXPECT_THAT(ErrorOf({"--goodput", "itl:5"}), HasSubstr("--goodput: there is no limit 'itl'"));
  EXPECT_THAT(ErrorOf({"--goodput", "ttft:nan"}), HasSubstr("--goodput: 'ttft:nan'"));
  EXPECT_THAT(ErrorOf({"--metric-percentiles", "101"}), HasSubstr("--metric-percentiles: '101'"));
  EXPECT_THAT(ErrorOf({"--percentile-metrics", "speed"}), HasSubstr("--percentile-metrics: 'speed'"));
  EXPECT_THAT(ErrorOf({"--extra-body", "[1]"}), HasSubstr("--extra-body"));
  EXPECT_THAT(ErrorOf({"--temperature", "warm"}), HasSubstr("--temperature: 'warm'"));
  EXPECT_THAT(ErrorOf({"--base-url", "localhost"}), HasSubstr("--base-url: 'localhost'"));
  EXPECT_THAT(ErrorOf({"--header", "novalue"}), HasSubstr("--header: 'novalue' is not KEY=VALUE"));
  EXPECT_THAT(ErrorOf({"--sweep-rates", "1,2"}), HasSubstr("--sweep-rates: needs --goodput"));
  EXPECT_THAT(ErrorOf({"--self-timed"}), HasSubstr("--self-timed: only"));
  EXPECT_THAT(ErrorOf({"--dataset-name", "sharegpt"}), HasSubstr("--dataset-path"));
  EXPECT_THAT(ErrorOf({"--random-range-ratio", "1.5"}), HasSubstr("--random-range-ratio: 1.5"));
}

// Serves /v1/models and completions of the tokens asked for, a chunk each, at once. Every `fails`-th request gets a
// 500.
class Server {
 public:
  bool tokenizes = true;
  int max_model_len = 4096;
  std::optional<std::string> models;  // what /v1/models says; empty: 404
  int fails = 0;
  std::vector<json> bodies;
  std::mutex mutex;
  ScriptServer server{[this](Visit& visit) { Serve(visit); }};

  BenchServeFlags Flags(int num_prompts) {
    BenchServeFlags flags;
    flags.port = server.port();
    flags.dataset.num_prompts = num_prompts;
    flags.dataset.random_input_len = 20;
    flags.dataset.random_output_len = 5;
    flags.disable_tqdm = true;
    return flags;
  }

 private:
  void Serve(Visit& visit) {
    if (absl::StartsWith(visit.head(), "GET /v1/models") && models.has_value())
      return visit.Answer(models->empty() ? 404 : 200, models->empty() ? R"({"detail": "Not Found"})" : *models);
    if (absl::StartsWith(visit.head(), "GET /v1/models"))
      return visit.Answer(200, json{{"data", {{{"id", "org/m"}, {"max_model_len", max_model_len}}}}}.dump());
    const json body = json::parse(visit.body());
    const std::string prompt = body["prompt"];
    const int64_t tokens =
        2 + static_cast<int64_t>(std::vector<std::string>(absl::StrSplit(prompt, ' ', absl::SkipEmpty())).size());
    if (absl::StartsWith(visit.head(), "POST /tokenize")) {
      if (!tokenizes) return visit.Answer(404, R"({"detail": "Not Found"})");
      return visit.Answer(200, json{{"count", tokens}}.dump());
    }
    if (!body.value("stream", false)) return visit.Answer(200, json{{"usage", {{"prompt_tokens", tokens}}}}.dump());
    size_t number = 0;
    {
      std::lock_guard lock(mutex);
      bodies.push_back(body);
      number = bodies.size();
    }
    if (fails > 0 && number % static_cast<size_t>(fails) == 0)
      return visit.Answer(500, R"({"error": {"message": "lost"}})");
    visit.BeginStream();
    for (int64_t i = 0; i < body["max_tokens"]; ++i) visit.Event(TextChunk(" a"));
    visit.Event(UsageChunk(tokens, body["max_tokens"]));
    visit.Event("[DONE]");
    visit.EndStream();
  }
};

struct Output {
  absl::Status status;
  std::string text;
};

Output RunCommand(const BenchServeFlags& flags) {
  ::testing::internal::CaptureStdout();
  Output output;
  output.status = RunBenchServe(flags);
  output.text = ::testing::internal::GetCapturedStdout();
  return output;
}

TEST(BenchServe, MeasuresAServerAndSavesWhatItSays) {
  Server server;
  BenchServeFlags flags = server.Flags(6);
  const auto folder = ::dovetail::test::TempFolder();
  flags.save_result = flags.save_detailed = true;
  flags.result_dir = (folder / "new").string();
  flags.result_filename = "r.json";
  flags.goodput = {"ttft:100000"};
  flags.max_concurrency = 2;
  flags.steady_state = true;
  const Output output = RunCommand(flags);
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.text, AllOf(HasSubstr("Successful requests:                     6"), HasSubstr("P99 TTFT (ms):"),
                                 HasSubstr("Steady state")));
  const json result = json::parse(::dovetail::test::ReadFile(folder / "new" / "r.json"));
  EXPECT_EQ(result["model_id"], "org/m");
  EXPECT_EQ(result["completed"], 6);
  EXPECT_EQ(result["total_input_tokens"], 120) << "measured out by /tokenize, special tokens included";
  EXPECT_EQ(result["total_output_tokens"], 30);
  EXPECT_EQ(result["lengths_by"], "the server's /tokenize");
  EXPECT_EQ(result["request_goodput"], result["request_throughput"]);
  EXPECT_EQ(result["itls"].size(), 6u);
  EXPECT_EQ(result["itls"][0].size(), 4u);
  ASSERT_EQ(server.bodies.size(), 6u);
  EXPECT_EQ(server.bodies[0]["model"], "org/m");
  EXPECT_EQ(server.bodies[0]["ignore_eos"], true);
  flags.append_result = true;
  ASSERT_TRUE(RunCommand(flags).status.ok());
  const std::vector<std::string> lines = absl::StrSplit(::dovetail::test::ReadFile(folder / "new" / "r.json"), '\n');
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(json::parse(lines[1])["completed"], 6);
}

TEST(BenchServe, WithoutATokenizerPromptsAreMeasuredByUsage) {
  Server server;
  server.tokenizes = false;
  const Output output = RunCommand(server.Flags(2));
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.text, HasSubstr("Total input tokens:                      44"));  // 20 words and 2 each
}

TEST(BenchServe, PartOfTheRequestsMayFail) {
  Server server;
  server.fails = 3;
  BenchServeFlags flags = server.Flags(6);
  flags.max_concurrency = 1;
  const Output output = RunCommand(flags);
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.text, AllOf(HasSubstr("Successful requests:                     4"),
                                 HasSubstr("Failed requests:                         2"),
                                 HasSubstr("Error 1: HTTP 500 Said: lost")));
}

TEST(BenchServe, WhenAllFailTheCommandFails) {
  Server server;
  server.fails = 1;
  EXPECT_THAT(std::string(RunCommand(server.Flags(2)).status.message()),
              HasSubstr("no request succeeded; the first: HTTP 500"));
}

TEST(BenchServe, LengthsBeyondTheModelAreRefusedBeforeAnythingIsSent) {
  Server server;
  server.max_model_len = 24;
  EXPECT_THAT(std::string(RunCommand(server.Flags(2)).status.message()),
              HasSubstr("request 0: --random-input-len 20 and --random-output-len 5 are more than the 24 tokens"));
  EXPECT_TRUE(server.bodies.empty());
}

TEST(BenchServe, AModelThatIsNotServedIsNamed) {
  Server server;
  BenchServeFlags flags = server.Flags(1);
  flags.model = "other";
  EXPECT_THAT(std::string(RunCommand(flags).status.message()),
              HasSubstr("'other' is not served; /v1/models lists org/m"));
  flags.model = "some/path";
  flags.served_model_name = "org/m";
  EXPECT_TRUE(RunCommand(flags).status.ok());
}

TEST(BenchServe, NoServerIsAnErrorThatNamesIt) {
  int port = 0;
  {
    port = ScriptServer([](Visit&) {}).port();
  }
  BenchServeFlags flags;
  flags.port = port;
  EXPECT_THAT(std::string(RunCommand(flags).status.message()),
              HasSubstr(absl::StrCat("127.0.0.1:", port, ": cannot connect")));
  for (const char* model : {"", "org/m"}) {
    flags.model = model;
    const std::string said(RunCommand(flags).status.message());
    EXPECT_THAT(said, HasSubstr("; --base-url, or --host and --port, say where the server is")) << model;
    EXPECT_THAT(said, Not(HasSubstr("--model"))) << "it is not the model that is missing";
  }
}

TEST(BenchServe, AServerThatDoesNotListItsModelsIsAskedForTheOneThatIsGiven) {
  Server server;
  for (const std::string& models : {std::string(), std::string(R"({"data": []})")}) {
    server.models = models;
    BenchServeFlags flags = server.Flags(1);
    const std::string said(RunCommand(flags).status.message());
    EXPECT_EQ(said, absl::StrCat("--model is not given, and the server names none: /v1/models: ",
                                 models.empty() ? "HTTP 404: Not Found" : "lists no model"));
    flags.model = "org/m";
    EXPECT_TRUE(RunCommand(flags).status.ok());
    EXPECT_EQ(server.bodies.back()["model"], "org/m");
  }
}

TEST(BenchServe, ASweepStopsWhereTheObjectiveNoLongerHolds) {
  Server server;
  BenchServeFlags flags = server.Flags(4);
  flags.sweep_rates = "50,100,200";
  flags.goodput = {"ttft:0"};  // nothing meets it
  Output output = RunCommand(flags);
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_EQ(server.bodies.size(), 4u) << "one rate only";
  EXPECT_THAT(output.text, HasSubstr("the knee lies below"));
  server.bodies.clear();
  flags.goodput = {"ttft:100000"};
  output = RunCommand(flags);
  EXPECT_EQ(server.bodies.size(), 12u);
  EXPECT_THAT(output.text, HasSubstr("up to 200.000 requests/s, the highest rate that was tried"));
}

}  // namespace
}  // namespace dovetail::cli
