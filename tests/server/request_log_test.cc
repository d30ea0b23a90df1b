// What the log and /metrics say of requests: over HTTP and over gRPC alike.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_split.h"
#include "base/log.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/generation_service.h"
#include "server/metrics/throughput_log.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// The process's log while it lives, as JSON.
class Logged {
 public:
  explicit Logged(LogLevel level = LogLevel::kInfo) : file_(std::tmpfile()) {
    LogOptions options{.level = level, .format = LogFormat::kJson, .process = "test"};
    options.file = fileno(file_);
    writer_ = std::make_unique<LogWriter>(options);
  }
  ~Logged() {
    writer_.reset();
    LogWriter({.level = LogLevel::kInfo});  // text to stderr, as before
    std::fclose(file_);
  }

  std::string text() {
    FlushLog(absl::Seconds(10));
    std::string text(static_cast<size_t>(lseek(fileno(file_), 0, SEEK_END)), '\0');
    EXPECT_EQ(pread(fileno(file_), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    return text;
  }
  std::vector<Json> Lines(const std::string& message) {
    std::vector<Json> found;
    std::string all = text();
    for (size_t at = 0, end; (end = all.find('\n', at)) != std::string::npos; at = end + 1) {
      const auto json = ParseJson(all.substr(at, end - at));
      EXPECT_TRUE(json.ok()) << all.substr(at, end - at);
      if (json.ok() && (*json)["message"] == message) found.push_back(*json);
    }
    return found;
  }

 private:
  std::FILE* const file_;
  std::unique_ptr<LogWriter> writer_;
};

TEST(RequestLog, AGenerationsEndSaysWhatItWasAndHowLongItsPartsTook) {
  Logged logged;
  {
    HttpServerOptions options;
    options.api_keys = {{"secret-key", "alice"}};
    TestServer test({.step_interval = absl::Milliseconds(2)}, options);
    test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"never told","max_tokens":8,"n":2})",
                      "X-Request-Id: mine-1\r\nX-Api-Key: secret-key\r\n"));
  }
  const auto lines = logged.Lines("request ended");
  ASSERT_THAT(lines, SizeIs(1));
  const Json& line = lines[0];
  EXPECT_EQ(line["request_id"], "mine-1");
  EXPECT_EQ(line["tenant"], "alice");
  EXPECT_EQ(line["route"], "/v1/completions");
  EXPECT_EQ(line["status"], "200");
  EXPECT_EQ(line["finish"], "length");
  EXPECT_EQ(line["prompt_tokens"], 11);
  EXPECT_EQ(line["cached_tokens"], 5) << "the fake engine's: half of the prompt";
  EXPECT_EQ(line["output_tokens"], 16);
  EXPECT_GE(line["itl_ms"].get<double>(), 1.5);
  EXPECT_GE(line["total_ms"].get<double>(), line["ttft_ms"].get<double>() + 7 * line["itl_ms"].get<double>() - 1);
  EXPECT_TRUE(line["queue_ms"].is_number());
  EXPECT_THAT(logged.text(), Not(HasSubstr("never told")));
  EXPECT_THAT(logged.text(), Not(HasSubstr("secret-key")));
}

TEST(RequestLog, AFieldThatIsNotKnownIsSaidOnceToHaveBeenIgnored) {
  Logged logged;
  {
    TestServer test;
    const auto ask = [&](const char* path, const std::string& fields) {
      test.AskJson(Post(path, absl::StrCat(R"({"max_tokens":1,)", fields, "}")));
    };
    ask("/v1/completions", R"("prompt":"a","frobnicate":1,"user":"u","repeat_penalty":1.1,"mirostat":0,"absent":null)");
    ask("/v1/completions", R"("prompt":"a","frobnicate":2)");
    ask("/v1/chat/completions", R"("messages":[{"role":"user","content":"a"}],"verbosity":"low","of_tomorrow":{})");
    ask("/completion", R"("prompt":"a","id_slot":1,"cache_prompt":true,"top_l":3)");
  }
  const auto told = [&](const std::string& path, const std::string& name) {
    return logged
        .Lines(absl::StrCat(path, ": the field \"", name, "\" is not known and was ignored (this is said once)"))
        .size();
  };
  EXPECT_EQ(told("/v1/completions", "frobnicate"), 1u);
  EXPECT_EQ(told("/v1/chat/completions", "of_tomorrow"), 1u);
  EXPECT_EQ(told("/completion", "top_l"), 1u);
  const std::vector<std::string> lines = absl::StrSplit(logged.text(), "is not known");
  EXPECT_EQ(lines.size(), 4u) << logged.text();
}

TEST(RequestLog, RefusalsAndClientsThatLeaveHaveALineAndProbesNone) {
  Logged logged;
  {
    TestServer test({.manual = true});
    test.Ask(Get("/nothing", "X-Request-Id: no-route\r\n"));
    test.Ask(Get("/health", "X-Request-Id: probe\r\n"));
    test.Ask(Post("/v1/completions", "{", "X-Request-Id: no-json\r\n"));
    test.Ask("GARBAGE\r\n\r\n");
    RawClient gone(test.port());
    gone.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":8,"stream":true})",
                   "X-Request-Id: left\r\n"));
    ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
    gone.Close();
    ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.cancelled == 1; }));
  }
  std::map<std::string, Json> by_id;
  int malformed = 0;
  for (const Json& line : logged.Lines("request ended")) {
    by_id[line["request_id"]] = line;
    malformed += line["status"] == "400" && line["route"] == "none";
  }
  EXPECT_EQ(by_id["no-route"]["status"], "404");
  EXPECT_EQ(by_id["no-json"]["status"], "400");
  EXPECT_EQ(by_id["no-json"]["route"], "/v1/completions");
  EXPECT_EQ(by_id["left"]["status"], "499");
  EXPECT_EQ(by_id["left"]["finish"], "abort");
  EXPECT_EQ(by_id["left"]["output_tokens"], 0);
  EXPECT_EQ(malformed, 1);
  EXPECT_FALSE(by_id.contains("probe"));
}

TEST(RequestLog, PromptsAreLoggedOnlyWhereBothFlagsAskForThem) {
  for (const bool begins : {false, true})
    for (const LogLevel level : {LogLevel::kInfo, LogLevel::kDebug}) {
      Logged logged(level);
      {
        HttpServerOptions options;
        options.log.begins = begins;
        options.log.max_prompt_length = 10;
        TestServer test({}, options);
        test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"abcdefghijklmnop","temperature":0.5})",
                          "X-Request-Id: mine\r\n"));
      }
      const auto began = logged.Lines("request begins");
      ASSERT_THAT(began, SizeIs(begins ? 1 : 0));
      if (begins) {
        EXPECT_EQ(began[0]["temperature"], 0.5);
      }
      const auto prompts = logged.Lines("prompt");
      ASSERT_THAT(prompts, SizeIs(begins && level == LogLevel::kDebug ? 1 : 0));
      if (prompts.empty()) {
        EXPECT_THAT(logged.text(), Not(HasSubstr("abcdef")));
      } else {
        EXPECT_EQ(prompts[0]["prompt"], "<bos>abcde");
        EXPECT_EQ(prompts[0]["request_id"], "mine");
      }
    }
}

TEST(ThroughputLog, HasALineEveryTenSecondsWhileThereIsWork) {
  Logged logged;
  ThroughputLog throughput;
  absl::Time now = absl::UnixEpoch();
  scheduler::SchedulerStats stats;
  const auto look = [&](int seconds, int running, uint64_t prompt, uint64_t output) {
    stats.running_sequences = running;
    stats.prompt_tokens += prompt;
    stats.generation_tokens += output;
    stats.prefix_queries += prompt;
    stats.prefix_hits += prompt / 4;
    for (int i = 0; i < seconds; ++i) throughput.Look(stats, now += absl::Seconds(1));
  };
  look(30, 0, 0, 0);
  EXPECT_THAT(logged.Lines("throughput"), SizeIs(0));
  stats.waiting_requests = 2;
  stats.kv_usage = 0.125;
  look(10, 3, 4000, 1205);
  auto lines = logged.Lines("throughput");
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0]["prompt_tokens_per_s"], 400);
  EXPECT_EQ(lines[0]["output_tokens_per_s"], 120.5);
  EXPECT_EQ(lines[0]["running"], 3);
  EXPECT_EQ(lines[0]["waiting"], 2);
  EXPECT_EQ(lines[0]["kv_used_percent"], 12.5);
  EXPECT_EQ(lines[0]["prefix_hit_percent"], 25);
  stats.waiting_requests = 0;
  look(25, 0, 0, 10);  // the last tokens, then nothing
  EXPECT_THAT(logged.Lines("throughput"), SizeIs(2));
  stats = {};  // of another scheduler
  look(10, 1, 0, 50);
  lines = logged.Lines("throughput");
  ASSERT_THAT(lines, SizeIs(3));
  EXPECT_EQ(lines[2]["output_tokens_per_s"], 0) << "less than before is another count, not a rate";
}

namespace pb = vllm::grpc::engine;

TEST(GrpcRequests, CountInTheMetricsAndTheLogAsThoseOfHttpDo) {
  Logged logged;
  const auto metrics = std::make_shared<ServerMetrics>(ServerMetrics::Info{.model_name = "bytes", .max_model_len = 64});
  FakeEngine engine;
  {
    GrpcServerOptions options;
    options.listen = "127.0.0.1:0";
    auto server = GrpcServer::Start(options, TestModel(), &engine, std::make_shared<Intake>(1, WorkLimits{}), metrics);
    ASSERT_TRUE(server.ok()) << server.status();
    const auto stub = pb::VllmEngine::NewStub(
        grpc::CreateChannel("127.0.0.1:" + std::to_string((*server)->port()), grpc::InsecureChannelCredentials()));
    const auto ask = [&](const std::string& id, int max_tokens) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
      pb::GenerateRequest request;
      request.set_request_id(id);
      request.set_text("abcd");
      request.set_stream(true);
      request.mutable_sampling_params()->set_max_tokens(max_tokens);
      const auto reader = stub->Generate(&context, request);
      pb::GenerateResponse message;
      while (reader->Read(&message)) {
      }
      return reader->Finish();
    };
    EXPECT_TRUE(ask("good", 6).ok());
    EXPECT_EQ(ask("bad", 1 << 30).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    grpc::ClientContext context;
    pb::GetModelInfoResponse reply;
    EXPECT_TRUE(stub->GetModelInfo(&context, {}, &reply).ok());
  }
  const std::string text = metrics->Text();
  for (const char* line :
       {"dovetail:prompt_tokens_total{model_name=\"bytes\"} 5\n",
        "dovetail:generation_tokens_total{model_name=\"bytes\"} 6\n",
        "vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"bytes\"} 1\n",
        "vllm:e2e_request_latency_seconds_count{engine=\"0\",model_name=\"bytes\"} 1\n",
        "vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"bytes\"} 1\n",
        "vllm:inter_token_latency_seconds_count{engine=\"0\",model_name=\"bytes\"} 5\n",
        "dovetail:tenant_generation_tokens_total{model_name=\"bytes\",tenant=\"anonymous\"} 6\n",
        "dovetail:grpc_responses_total{code=\"OK\",method=\"Generate\"} 1\n",
        "dovetail:grpc_responses_total{code=\"INVALID_ARGUMENT\",method=\"Generate\"} 1\n",
        "dovetail:grpc_responses_total{code=\"OK\",method=\"GetModelInfo\"} 1\n"})
    EXPECT_TRUE(text.find(line) != std::string::npos) << line;
  const auto lines = logged.Lines("request ended");
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(lines[0]["request_id"], "good");
  EXPECT_EQ(lines[0]["route"], "/vllm.grpc.engine.VllmEngine/Generate");
  EXPECT_EQ(lines[0]["status"], "OK");
  EXPECT_EQ(lines[0]["finish"], "length");
  EXPECT_EQ(lines[0]["output_tokens"], 6);
  EXPECT_EQ(lines[1]["request_id"], "bad");
  EXPECT_EQ(lines[1]["status"], "INVALID_ARGUMENT");
}

// Dashboards of vLLM look for these.
TEST(Metrics, HaveTheNamesOfVllmsNewerDashboards) {
  TestServer test;
  test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})"));
  test.Ask(Get("/nothing"));
  test.Ask("BREW /coffee HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string text = test.Ask(Get("/metrics")).body;
  for (const char* line :
       {"http_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"2xx\"} 1\n",
        "http_requests_total{handler=\"none\",method=\"GET\",status=\"4xx\"} 1\n",
        "http_requests_total{handler=\"none\",method=\"other\",status=\"4xx\"} 1\n",
        "vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"bytes\",reason=\"capacity\"} 0\n",
        "vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"bytes\",reason=\"deferred\"} 0\n",
        "dovetail:log_lines_dropped_total 0\n"})
    EXPECT_TRUE(text.find(line) != std::string::npos) << line;
  const auto value = [&](const std::string& name) {
    const size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  };
  EXPECT_GT(value("process_resident_memory_bytes"), 1 << 20);
  EXPECT_GT(value("process_virtual_memory_bytes"), value("process_resident_memory_bytes"));
  EXPECT_GT(value("process_open_fds"), 3);
  EXPECT_GE(value("process_max_fds"), value("process_open_fds"));
  EXPECT_GE(value("process_cpu_seconds_total"), 0);
  const double age = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) - value("process_start_time_seconds");
  EXPECT_GT(age, -2);
  EXPECT_LT(age, 3600);
}

}  // namespace
}  // namespace dovetail::server::test
