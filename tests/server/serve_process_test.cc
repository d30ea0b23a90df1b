// The life of a `dovetail serve` process: clients that leave, full queues, tenants, signals, and what it leaves behind.
#include "tests/server/serve_process.h"

#include <gmock/gmock.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>

#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kModel[] = "models/stories260K/stories260K-f32.gguf";

class Serve : public testing::Test {
 protected:
  void SetUp() override {
    DOVETAIL_DATA_OR_SKIP(const auto model, kModel);
    model_ = model.string();
  }
  std::vector<std::string> With(std::vector<std::string> flags) const {
    flags.insert(flags.begin(), {model_, "--served-model-name", "stories"});
    return flags;
  }
  // A stream of 8 choices that is not read at first: 1 MB, more than what a connection holds back.
  static std::string LongStream() {
    return Post("/v1/completions",
                R"({"model":"stories","prompt":"Once","n":8,"max_tokens":490,"ignore_eos":true,"stream":true})");
  }
  std::string model_;
};

TEST_F(Serve, IdleConnectionsBeyondTheSoftLimitOfOpenFilesLeaveOthersAlone) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  if (before.rlim_max < 1024) GTEST_SKIP() << "the hard limit of open files is " << before.rlim_max;
  const rlimit few{128, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  ServeProcess server(With({}));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<RawClient> idle;
  for (int i = 0; i < 160; ++i) idle.emplace_back(server.port());
  EXPECT_EQ(server.Ask(Get("/health")).status, 200);
  rlimit raised;
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, nullptr, &raised), 0);
  EXPECT_EQ(raised.rlim_cur, before.rlim_max);
}

TEST_F(Serve, ProbesAndRequestsAreAnsweredWhenIdleConnectionsTakeAllDescriptors) {
  ServeProcess server(With({}), /*open_files=*/128);
  std::vector<RawClient> idle;
  for (int i = 0; i < 160; ++i) idle.emplace_back(server.port());
  for (const char* probe : {"/health", "/live", "/ready", "/metrics"}) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(server.Ask(Get(probe)).status, 200) << probe;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%s with 160 idle connections: %.3f s\n", probe, took.count());
    EXPECT_LT(took, std::chrono::seconds(5));  // before: 10 s, the time that a head may take
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // then they have been idle long enough
  server.AskJson(Post("/v1/completions", R"({"model":"stories","prompt":"Once","max_tokens":4})"));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  const std::string said = server.ErrorText();
  EXPECT_THAT(said, Not(HasSubstr("no connection can be accepted")));
  EXPECT_THAT(said, HasSubstr("connections, not the 4096 of --max-connections: 128 files may be open (ulimit -n)"));
}

TEST_F(Serve, TooFewDescriptorsForAConnectionAreNamedAtStart) {
  const CommandResult result = RunDovetail({"serve", model_, "--port", "0"}, /*terminal=*/false, /*open_files=*/40);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("at most 0 connections"));
}

double CpuSeconds(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(stat, line);
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::vector<std::string> words{std::istream_iterator<std::string>(fields), {}};
  return (std::stod(words[11]) + std::stod(words[12])) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// The limit of open files under which a process may open so many more: the limit is one of numbers, and some below it
// may be free.
rlim_t LimitThatLeaves(int free, pid_t pid) {
  std::set<int> taken;
  for (const auto& file : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd"))
    taken.insert(std::stoi(file.path().filename()));
  int limit = 0;
  while (free > 0 || taken.count(limit) > 0) free -= taken.count(limit++) == 0;
  return static_cast<rlim_t>(limit);
}

// Connections to a local port that its process has not closed.
int OpenConnections(int port) {
  std::ifstream table("/proc/net/tcp");
  int open = 0;
  std::string line;
  std::getline(table, line);  // the heading
  while (std::getline(table, line)) {
    unsigned local_port = 0, state = 0;
    if (std::sscanf(line.c_str(), "%*d: %*8X:%4X %*8X:%*4X %2X", &local_port, &state) != 2) continue;
    open += static_cast<int>(local_port) == port && (state == TCP_ESTABLISHED || state == TCP_CLOSE_WAIT);
  }
  return open;
}

// UndefinedBehaviorSanitizer asks the kernel through a pipe whether it may read an object's type, and takes an object
// for a wrong one where it gets no pipe. g++ says of AddressSanitizer only that it is on; the builds have both or none.
#if defined(__SANITIZE_ADDRESS__)
#define SKIP_IF_CHECKS_NEED_DESCRIPTORS() GTEST_SKIP() << "UndefinedBehaviorSanitizer needs descriptors of its own"
#else
#define SKIP_IF_CHECKS_NEED_DESCRIPTORS() static_cast<void>(0)
#endif

// From now on this server may open as many more files. It has answered before, and that connection is closed.
bool LeaveDescriptorsFor(ServeProcess& server, int connections) {
  EXPECT_EQ(server.Ask(Get("/health")).status, 200);
  while (OpenConnections(server.port()) > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const rlim_t limit = LimitThatLeaves(connections, server.pid());
  const rlimit few{limit, limit};
  return prlimit(server.pid(), RLIMIT_NOFILE, &few, nullptr) == 0;
}

TEST_F(Serve, TheConnectionThatTakesTheLastDescriptorStaysThoughItIsIdle) {
  SKIP_IF_CHECKS_NEED_DESCRIPTORS();
  ServeProcess server(With({}));
  ASSERT_TRUE(LeaveDescriptorsFor(server, 1));
  RawClient last(server.port());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it was accepted, and no other waits
  ASSERT_TRUE(last.Send(Get("/health")));
  EXPECT_EQ(last.Read().status, 200);
}

// What the rest of the process opened has used up what was kept back.
TEST_F(Serve, WithoutADescriptorLeftItWaitsAndTakesThoseOfIdleConnections) {
  SKIP_IF_CHECKS_NEED_DESCRIPTORS();
  ServeProcess server(With({}));
  ASSERT_TRUE(LeaveDescriptorsFor(server, 2));
  std::vector<RawClient> busy;
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back(server.port()).Send(LongStream());
    ASSERT_TRUE(busy.back().ReadUntil("data: "));
  }
  RawClient waiting(server.port());
  waiting.Send(Get("/health"));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until both streams wait for their readers
  const double before = CpuSeconds(server.pid());
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_LT(CpuSeconds(server.pid()) - before, 1) << "it spins";
  busy.clear();
  EXPECT_EQ(waiting.Read().status, 200);
  std::vector<RawClient> idle;
  for (int i = 0; i < 60; ++i) idle.emplace_back(server.port());  // one a second without this would be too late
  EXPECT_EQ(server.Ask(Get("/health")).status, 200);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_THAT(server.ErrorText(), HasSubstr("no connection can be accepted (Too many open files"));
}

// Of 150 bodies of 4 MiB, each of which misses its last byte.
TEST_F(Serve, UnfinishedBodiesTakeNoMoreMemoryThanTheyMay) {
  ServeProcess server(With({"--max-unfinished-body-bytes", "16MiB"}));
  const auto resident_kib = [&] {
    std::ifstream status("/proc/" + std::to_string(server.pid()) + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.rfind("VmRSS:", 0) == 0) return std::stol(line.substr(6));
    return -1L;
  };
  const long before = resident_kib();
  std::vector<RawClient> clients;
  const std::string body((4 << 20) - 1, ' ');
  for (int i = 0; i < 150; ++i) {
    clients.emplace_back(server.port())
        .Send("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 4194304\r\n\r\n");
    clients.back().Send(body);
  }
  const double held = server.Metric("dovetail:http_body_bytes");
  EXPECT_GT(held, 4 << 20);
  EXPECT_LE(held, 16 << 20);
  EXPECT_GE(server.Metric("dovetail:http_bodies_refused_total{model_name=\"stories\",reason=\"no_room\""), 146);
  const long grown = resident_kib() - before;
  std::printf("150 unfinished bodies of 4 MiB: %ld KiB\n", grown);
  EXPECT_LT(grown, 100 << 10);
}

// The bytes of a body are in the budget, the values that it is parsed into are not: their number is limited. Of the
// bodies that have as many as they may, strings take the most memory.
TEST_F(Serve, AParsedBodyTakesTensOfMegabytesAtMostAndOneAtATimeDoes) {
  ServeProcess server(With({}));
  const auto most_resident_kib = [&] {
    std::ifstream status("/proc/" + std::to_string(server.pid()) + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.rfind("VmHWM:", 0) == 0) return std::stol(line.substr(6));
    return -1L;
  };
  EXPECT_EQ(server.Ask(Post("/v1/completions", "{}")).status, 400);
  const long before = most_resident_kib();
  std::string body = R"({"prompt":[)";
  while (body.size() < (4 << 20) - 10) body += "\"\",";
  body += "1]}";
  std::vector<RawClient> clients;
  for (int i = 0; i < 8; ++i) clients.emplace_back(server.port()).Send(Post("/v1/completions", body));
  for (RawClient& client : clients) {
    const auto answer = client.Read();
    EXPECT_EQ(answer.status, 400);
    EXPECT_THAT(answer.body, HasSubstr("more than 500000 values"));
  }
  const long grown = most_resident_kib() - before;
  std::printf("8 bodies of 4 MiB and 1,400,000 values: %ld KiB\n", grown);
  EXPECT_LT(grown, 160 << 10);
}

TEST_F(Serve, AClientThatLeavesFreesItsKv) {
  ServeProcess server(With({}));
  Json prompts = Json::array();
  for (int i = 0; i < 128; ++i) prompts.push_back("Once upon a time");
  for (const bool stream : {true, false}) {
    RawClient client(server.port());
    client.Send(Post("/v1/completions", Dump({{"model", "stories"},
                                              {"prompt", prompts},
                                              {"n", 8},
                                              {"max_tokens", 500},
                                              {"ignore_eos", true},
                                              {"stream", stream}})));
    if (stream) {
      ASSERT_TRUE(client.ReadUntil("data: "));
    } else {
      while (server.Metric("dovetail:kv_blocks_in_use") == 0) {
      }
    }
    client.Reset();
    EXPECT_TRUE(server.WaitForMetric("dovetail:kv_blocks_in_use", 0));
    EXPECT_EQ(server.Metric("vllm:num_requests_running"), 0);
    EXPECT_EQ(server.Metric("vllm:num_requests_waiting"), 0);
    EXPECT_EQ(server.Metric("vllm:kv_cache_usage_perc"), 0);
  }
  EXPECT_EQ(server.Metric("vllm:request_success_total{engine=\"0\",finished_reason=\"abort\""), 256);
  EXPECT_LT(server.Metric("dovetail:generation_tokens_total"), 128 * 8 * 500);  // of twice as many
  server.AskJson(Post("/v1/completions", R"({"model":"stories","prompt":"Once"})"));
}

TEST_F(Serve, AFullQueueIsRefusedWithTheStatusAskedFor) {
  for (const std::string status : {"429", "503"}) {
    ServeProcess server(With({"--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--overload-status", status}));
    std::string prompts = "\"Once\"";
    for (int i = 1; i < 128; ++i) prompts += ",\"Once\"";
    const RawResponse refused = server.Ask(
        Post("/v1/completions",
             absl::StrCat(R"({"model":"stories","max_tokens":500,"ignore_eos":true,"prompt":[)", prompts, "]}")));
    EXPECT_EQ(std::to_string(refused.status), status) << refused.body;
    EXPECT_EQ(refused.headers.count("retry-after"), 1u);
    EXPECT_EQ((*ParseJson(refused.body))["error"]["code"], "overloaded");
    EXPECT_TRUE(server.WaitForMetric("vllm:num_requests_running", 0));
    EXPECT_TRUE(server.WaitForMetric("vllm:num_requests_waiting", 0));
    // Cancelled prompts may still be on their way to the queue when the metrics are read: the next request gets in
    // soon.
    int accepted = 0;
    for (int i = 0; i < 1000 && accepted != 200; ++i)
      accepted = server.Ask(Post("/v1/completions", R"({"model":"stories","prompt":"Once"})")).status;
    EXPECT_EQ(accepted, 200);
  }
}

// Room for 128 tokens: it is said at the start, a longer answer ends there, a longer prompt is refused.
TEST_F(Serve, AKvCacheShorterThanTheModelEndsAnswersWithLength) {
  ServeProcess server(With({"--kv-cache-memory-bytes", "240KiB", "--kv-cache-dtype", "float32"}));
  const auto ask = [&](int prompt, int status) {
    const Json body = {{"model", "stories"},
                       {"prompt", std::vector<int>(prompt, 403)},
                       {"max_tokens", 300},
                       {"ignore_eos", true},
                       {"temperature", 0}};
    return server.AskJson(Post("/v1/completions", Dump(body)), status);
  };
  EXPECT_EQ(server.AskJson(Get("/v1/models"))["data"][0]["max_model_len"], 128);
  const Json answer = ask(20, 200);
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(answer["usage"]["completion_tokens"], 128 - 20 + 1) << "the last token needs no KV";
  EXPECT_EQ(ask(200, 400)["error"]["type"], "invalid_request_error");
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_THAT(server.ErrorText(), HasSubstr("hold sequences of 128 tokens at most, less than --max-model-len"));
}

TEST_F(Serve, OneTenantsPromptsAreNotInAnothersCache) {
  ServeProcess server(With({"--api-key", "alpha", "--api-key", "beta", "--metrics-api-key", "gamma"}));
  const std::string body = Dump({{"model", "stories"}, {"prompt", std::vector<int>(200, 403)}, {"max_tokens", 1}});
  const auto cached = [&](const std::string& key, const std::string& sent) {
    const RawResponse response =
        server.Ask(Post("/v1/completions", sent, absl::StrCat("Authorization: Bearer ", key, "\r\n")));
    EXPECT_EQ(response.status, 200) << response.body;
    return (*ParseJson(response.body))["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached("alpha", body), 0);
  EXPECT_EQ(cached("alpha", body), 192);  // three blocks of 64
  EXPECT_EQ(cached("beta", body), 0);
  EXPECT_EQ(cached("beta", body), 192);
  Json salted = *ParseJson(body);
  salted["cache_salt"] = "of one conversation";
  EXPECT_EQ(cached("alpha", Dump(salted)), 0);
  EXPECT_EQ(cached("alpha", Dump(salted)), 192);
  EXPECT_EQ(server.Ask(Get("/metrics", "X-Api-Key: alpha\r\n")).status, 401);
  EXPECT_EQ(server.Ask(Get("/metrics", "X-Api-Key: gamma\r\n")).status, 200);
  EXPECT_EQ(server.Ask(Post("/v1/completions", body)).status, 401);
}

TEST_F(Serve, ASignalDrains) {
  for (const int signal : {SIGTERM, SIGINT}) {
    ServeProcess server(With({}));
    RawClient reader(server.port(), /*receive_buffer_bytes=*/4096);
    reader.Send(LongStream());
    ASSERT_TRUE(server.WaitForMetric("dovetail:requests_paused", 1));
    server.Signal(signal);
    while (server.Ask(Get("/ready")).status == 200) {
    }
    EXPECT_EQ(server.Ask(Get("/live")).status, 200);
    const RawResponse refused = server.Ask(Post("/v1/completions", R"({"model":"stories","prompt":"Once"})"));
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.headers.count("retry-after"), 1u);
    const RawResponse response = reader.Read();
    EXPECT_EQ(SseData(response.body).back(), "[DONE]");
    int ends = 0;
    for (const std::string& frame : SseData(response.body))
      ends += frame.find("\"finish_reason\":\"length\"") != std::string::npos;
    EXPECT_EQ(ends, 8);
    EXPECT_EQ(server.Wait(), 0);
  }
}

TEST_F(Serve, WhatIsLeftAtTheTimeoutEndsWithAnErrorFrame) {
  ServeProcess server(With({"--shutdown-timeout", "0"}));
  RawClient reader(server.port(), /*receive_buffer_bytes=*/4096);
  reader.Send(LongStream());
  ASSERT_TRUE(server.WaitForMetric("dovetail:requests_paused", 1));
  server.Signal(SIGTERM);
  const RawResponse response = reader.Read();
  const auto frames = SseData(response.body);
  ASSERT_FALSE(frames.empty());
  EXPECT_EQ((*ParseJson(frames.back()))["error"]["type"], "unavailable_error");
  EXPECT_EQ(server.Wait(), 0);
}

TEST_F(Serve, ASecondSignalEndsAtOnce) {
  ServeProcess server(With({"--shutdown-timeout", "3600"}));
  RawClient reader(server.port(), /*receive_buffer_bytes=*/4096);
  reader.Send(LongStream());
  ASSERT_TRUE(server.WaitForMetric("dovetail:requests_paused", 1));
  server.Signal(SIGTERM);
  while (server.Ask(Get("/ready")).status == 200) {
  }
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 128 + SIGTERM);
}

TEST_F(Serve, ACrashSaysInWhichFunctions) {
  ServeProcess server(With({}));
  server.Signal(SIGSEGV);
  EXPECT_EQ(server.Wait(), 128 + SIGSEGV);
  EXPECT_THAT(server.ErrorText(), AllOf(HasSubstr("SIGSEGV"), HasSubstr("dovetail::cli::")));
}

TEST_F(Serve, NoPromptIsLoggedOrDumped) {
  ServeProcess server(With({"--chat-template", "chatml"}));
  const std::string canary = "canary-3f81";
  for (const char* stream : {"true", "false"}) {
    server.Ask(Post("/v1/completions",
                    absl::StrCat(R"({"model":"stories","prompt":")", canary, R"(","stream":)", stream, "}")));
    server.Ask(Post("/v1/chat/completions", absl::StrCat(R"({"model":"stories","messages":[{"role":"user","content":")",
                                                         canary, R"("}],"max_tokens":4,"stream":)", stream, "}")));
  }
  server.Ask(Post("/v1/completions", absl::StrCat(R"({"model":"stories","prompt":")", canary, R"(","n":99})")));
  server.Ask(Post("/v1/completions", canary));
  std::ifstream limits(absl::StrCat("/proc/", server.pid(), "/limits"));
  std::stringstream text;
  text << limits.rdbuf();
  EXPECT_THAT(text.str(), testing::ContainsRegex("Max core file size +1 +1 "));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  const std::string log = server.ErrorText();
  EXPECT_THAT(log, HasSubstr("serving stories"));
  EXPECT_THAT(log, Not(HasSubstr("canary")));
}

// As llama-server has it; stories260K brings no template and no tokens of one.
TEST_F(Serve, AGgufFileWithoutATemplateWritesChatMl) {
  ServeProcess server(With({}));
  const Json chat = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}};
  EXPECT_EQ(server.AskJson(Post("/apply-template", Dump(chat)))["prompt"],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(server.AskJson(Post("/v1/chat/completions",
                                R"({"messages":[{"role":"user","content":"hi"}],"max_tokens":2})"))["object"],
            "chat.completion");
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_THAT(server.ErrorText(), HasSubstr("chats are written as ChatML"));
}

TEST_F(Serve, AChatWithoutATemplateSaysSo) {
  ServeProcess server(With({"--chat-template", "none"}));
  const Json error = server.AskJson(
      Post("/v1/chat/completions", R"({"model":"stories","messages":[{"role":"user","content":"hi"}]})"), 400)["error"];
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("--chat-template"));
  EXPECT_EQ(error["param"], "messages");
}

TEST_F(Serve, AModelWithoutATokenizerTakesAndGivesTokenIds) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K/hf");
  ServeProcess server({folder.string(), "--chat-template", "chatml"});
  const Json body =
      server.AskJson(Post("/v1/completions", R"({"model":"hf","prompt":[1,403,407],"max_tokens":5,"temperature":0})"));
  EXPECT_EQ(body["choices"][0]["token_ids"].size(), 5u);
  EXPECT_EQ(server.AskJson(Post("/v1/completions", R"({"model":"hf","prompt":"Once"})"), 400)["error"]["param"],
            "prompt");
  EXPECT_EQ(
      server.AskJson(Post("/v1/chat/completions", R"({"model":"hf","messages":[{"role":"user","content":"hi"}]})"),
                     400)["error"]["param"],
      "messages");
  EXPECT_EQ(server.Ask(Get("/tokenizer_info")).status, 404);
  EXPECT_EQ(server.Ask(Post("/tokenize", R"({"prompt":"Once"})")).status, 400);
}

// Templates that never end, come from a file as they might from a model: the chat is refused, and a stream at the same
// time goes on.
TEST_F(Serve, AnEndlessTemplateIsRefusedAndOthersGoOn) {
  const std::string path = (dovetail::test::TempFolder() / "endless.jinja").string();
  for (const char* source :
       {"{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ messages.__class__.__mro__ }}"}) {
    std::ofstream(path) << source;
    ServeProcess server(With({"--chat-template", path}));
    RawClient stream(server.port());
    stream.Send(Post("/v1/completions",
                     R"({"model":"stories","prompt":"Once","max_tokens":400,"ignore_eos":true,"stream":true})"));
    for (int i = 0; i < 3; ++i) {
      const Json error = server.AskJson(
          Post("/v1/chat/completions", R"({"model":"stories","messages":[{"role":"user","content":"hi"}]})"),
          400)["error"];
      EXPECT_EQ(error["param"], "messages") << source;
    }
    EXPECT_EQ(SseData(stream.Read().body).back(), "[DONE]");
  }
}

TEST_F(Serve, OtherModelNamesAreRefusedUnlessToldOtherwise) {
  ServeProcess server(With({"--served-model-name", "second", "--any-model-name"}));
  const Json models = server.AskJson(Get("/v1/models"))["data"];
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0]["id"], "stories");
  EXPECT_EQ(models[1]["id"], "second");
  EXPECT_EQ(server.AskJson(Post("/v1/completions", R"({"model":"gpt-4o","prompt":"Once"})"))["model"], "gpt-4o");
}

TEST_F(Serve, ASeedOfTheServersMakesRequestsRepeatThemselves) {
  ServeProcess server(With({"--seed", "7"}));
  const auto draw = [&](const std::string& more) {
    return server.AskJson(Post("/v1/completions", absl::StrCat(R"({"model":"stories","prompt":"Once","temperature":1)",
                                                               more, "}")))["choices"][0]["text"];
  };
  EXPECT_EQ(draw(""), draw(""));
  EXPECT_EQ(draw(""), draw(",\"seed\":7"));
  EXPECT_NE(draw(""), draw(",\"seed\":8"));
}

}  // namespace
}  // namespace dovetail::server::test
