// What operators rely on: keys, health, drain, overload, metrics, and error texts that tell nothing.
#include <gmock/gmock.h>

#include <thread>

#include "server/http/routes.h"
#include "server/metrics/server_metrics.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string RequestFor(const Route& route, const std::string& headers) {
  const std::string path = absl::StrCat(std::string(route.path), route.takes_rest() ? "bytes" : "");
  if (route.method == "GET") return Get(path, headers);
  if (route.id == RouteId::kChat || route.id == RouteId::kMessages || route.id == RouteId::kCountTokens ||
      route.id == RouteId::kApplyTemplate)
    return Post(path, R"({"model":"bytes","messages":[{"role":"user","content":"x"}],"max_tokens":1})", headers);
  if (route.id == RouteId::kResponses) return Post(path, R"({"model":"bytes","input":"x"})", headers);
  if (route.id == RouteId::kEmbeddings) return Post(path, R"({"model":"bytes","input":"x"})", headers);
  if (route.id == RouteId::kLlamaEmbeddings) return Post(path, R"({"model":"bytes","content":"x"})", headers);
  if (route.id == RouteId::kInfill) return Post(path, R"({"input_prefix":"x","n_predict":1})", headers);
  if (route.id == RouteId::kDetokenize) return Post(path, R"({"tokens":[97]})", headers);
  return Post(path, R"({"model":"bytes","prompt":"x"})", headers);
}

TEST(Auth, WithKeysEveryRouteButProbesAndPagesWantsTheRightOne) {
  HttpServerOptions options;
  options.api_keys = {"first-key", "second-key"};
  options.metrics_api_keys = {"metrics-key"};
  TestServer test({.eos_after = 1}, options, FillInModel());
  for (const Route& route : Routes()) {
    const auto status = [&](const std::string& headers) { return test.Ask(RequestFor(route, headers)).status; };
    const bool probe = route.id == RouteId::kHealth || route.id == RouteId::kLive || route.id == RouteId::kReady;
    const bool open = probe || route.id == RouteId::kPage || route.id == RouteId::kDocs;
    const bool metrics = route.id == RouteId::kMetrics;
    for (const char* none :
         {"", "Authorization: Bearer \r\n", "Authorization: Bearer wrong\r\n", "Authorization: first-key\r\n",
          "Authorization: Basic first-key\r\n", "X-Api-Key: first-ke\r\n", "X-Api-Key: first-keyy\r\n"})
      EXPECT_EQ(status(none), open ? 200 : 401) << route.path << " " << none;
    for (const char* key :
         {"Authorization: Bearer first-key\r\n", "authorization: bearer second-key\r\n", "X-Api-Key: first-key\r\n"})
      EXPECT_EQ(status(key), metrics ? 401 : 200) << route.path << " " << key;
    EXPECT_EQ(status("Authorization: Bearer metrics-key\r\n"), open || metrics ? 200 : 401) << route.path;
  }
  EXPECT_EQ(test.Ask(Get("/no/such/path")).status, 401);  // without a key not even the routes are told
  EXPECT_EQ(test.Ask(Get("/no/such/path", "X-Api-Key: first-key\r\n")).status, 404);
  const Json error = test.AskJson(Get("/v1/models"), 401);
  EXPECT_EQ(error["error"]["type"], "authentication_error");
  EXPECT_EQ(error["error"]["code"], "invalid_api_key");
}

TEST(Auth, EachKeyIsATenantOfItsOwn) {
  HttpServerOptions options;
  options.api_keys = {"first-key", "second-key"};
  TestServer test({}, options);
  for (const char* key : {"first-key", "second-key", "first-key"})
    test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})", absl::StrCat("X-Api-Key: ", key, "\r\n")));
  const auto submitted = test.engine.log().submitted;
  EXPECT_EQ(submitted[0].tenant, submitted[2].tenant);
  EXPECT_NE(submitted[0].tenant, submitted[1].tenant);
  EXPECT_EQ(submitted[0].tenant.find("first"), std::string::npos);
  EXPECT_EQ(test.Ask(Get("/metrics", "X-Api-Key: first-key\r\n")).status, 200);  // no metrics key: API keys do
}

TEST(Routes, GiveTheLengthThatTheKvCachesHoldNow) {
  TestServer test;
  test.engine.SetLongestSequence(320);
  for (const char* path : {"/v1/models/bytes", "/v1/models"}) {
    Json model = test.AskJson(Get(path));
    if (model.contains("data")) model = model["data"][0];
    EXPECT_EQ(model["max_model_len"], 320);
    EXPECT_EQ(model["configured_max_model_len"], 4096);
  }
  EXPECT_EQ(test.AskJson(Post("/tokenize", R"({"prompt":"the"})"))["max_model_len"], 320);
  for (const int enough : {4096, 5000, 0}) {  // 0: no worker is there
    test.engine.SetLongestSequence(enough);
    const Json model = test.AskJson(Get("/v1/models/bytes"));
    EXPECT_EQ(model["max_model_len"], 4096);
    EXPECT_FALSE(model.contains("configured_max_model_len"));
  }
}

TEST(Routes, OfOtherServersAreRefusedByName) {
  TestServer test;
  for (const auto& [request, words] :
       std::vector<std::pair<std::string, std::string>>{{Post("/pooling", R"({"input":"x"})"), "/v1/embeddings"},
                                                        {Post("/v1/rerank", "{}"), "ranked"},
                                                        {Post("/v1/audio/speech", "{}"), "text only"},
                                                        {Get("/v1/responses/resp_1"), "keeps nothing"},
                                                        {Get("/v1/messages/batches"), "one by one"}}) {
    const RawResponse response = test.Ask(request);
    EXPECT_EQ(response.status, 501) << request;
    EXPECT_THAT(response.body, HasSubstr(words));
    EXPECT_EQ(response.headers.at("x-should-retry"), "false") << "clients repeat what is above 499";
  }
  EXPECT_EQ(test.Ask(Get("/v1/responses")).status, 405);
  EXPECT_EQ(test.Ask(Post("/v1/embeddingsx", "{}")).status, 404);
}

TEST(Routes, AnswerWhatClientsExpect) {
  TestServer test;
  EXPECT_EQ(test.AskJson(Get("/v1/models"))["data"][0]["id"], "bytes");
  EXPECT_EQ(test.AskJson(Get("/v1/models"))["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(test.AskJson(Get("/v1/models/bytes%2Dalias"))["id"], "bytes-alias");
  EXPECT_EQ(test.AskJson(Get("/tokenizer_info"))["eos_token"], "<eos>");
  EXPECT_EQ(Dump(test.AskJson(Post("/tokenize", R"({"prompt":"the"})"))),
            R"({"count":2,"max_model_len":4096,"tokens":[256,260],"token_strs":null})");
  EXPECT_EQ(Dump(test.AskJson(Post("/tokenize", R"({"content":"the","with_pieces":true})"))["tokens"]),
            R"([{"id":260,"piece":"the"}])");
  EXPECT_EQ(
      Dump(test.AskJson(Post(
          "/tokenize",
          R"({"messages":[{"role":"user","content":"the"}],"return_token_strs":true,"add_generation_prompt":false})"))
               ["token_strs"]),
      R"(["<turn>","u","s","e","r",":","the"])");
  const Json text = test.AskJson(Post("/detokenize", R"({"tokens":[260,33]})"));
  EXPECT_EQ(text["prompt"], "the!");
  EXPECT_EQ(text["content"], "the!");
  EXPECT_EQ(test.AskJson(Get("/version"))["version"], "0.1.0");
}

TEST(Routes, AChatWithoutATemplateSaysWhichFlagGivesOne) {
  auto model = TestModel();
  model->chat = {};
  TestServer test({}, {}, model);
  const Json error =
      test.AskJson(Post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})"), 400)["error"];
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("--chat-template"));
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("chatml"));
}

TEST(Health, MeansProgress) {
  TestServer test;
  EXPECT_EQ(test.Ask(Get("/health")).status, 200);
  EXPECT_EQ(test.Ask(Get("/ready")).status, 200);
  test.engine.SetHealthy(false);
  EXPECT_EQ(test.Ask(Get("/health")).status, 503);
  EXPECT_EQ(test.Ask(Get("/ready")).status, 503);
  EXPECT_EQ(test.Ask(Get("/live")).status, 200);
  EXPECT_EQ(test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})")).status, 503);
  test.engine.SetHealthy(true);
  test.engine.SetStalled();
  EXPECT_EQ(test.AskJson(Get("/health"), 503)["error"]["code"], "engine_stalled");
}

TEST(Health, ALoadingServerIsAliveAndNotReady) {
  HttpServerOptions options;
  options.port = 0;
  HttpServer server(options);
  ASSERT_TRUE(server.Start().ok());
  const auto ask = [&](const std::string& request) {
    RawClient client(server.port());
    client.Send(request);
    return client.Read();
  };
  EXPECT_EQ(ask(Get("/live")).status, 200);
  EXPECT_EQ(ask(Get("/ready")).status, 503);
  const RawResponse refused = ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})"));
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.count("retry-after"), 1u);
  FakeEngine engine;
  server.Serve(TestModel(), &engine);
  EXPECT_EQ(ask(Get("/ready")).status, 200);
  server.Stop();
}

TEST(Overload, AFullQueueIsA503WithRetryAfterAndTakesNothing) {
  TestServer test({.max_queued = 2, .manual = true});
  RawClient first(test.port());
  first.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})"));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  const RawResponse refused =
      test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":["x","y"]})"));  // one fits, the other does not
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.at("retry-after"), "1");
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.cancelled == 1 && log.live == 1; }));
}

TEST(Overload, TheStatusCanBe429) {
  HttpServerOptions options;
  options.overload_status = 429;
  TestServer test({.max_queued = 0}, options);
  EXPECT_EQ(test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})"), 429)["error"]["code"],
            "overloaded");
}

HttpServerOptions LimitedTo(std::chrono::milliseconds limit) {
  HttpServerOptions options;
  options.request_timeout = limit;
  return options;
}

FakeEngineOptions WithoutSteps() {
  FakeEngineOptions options;
  options.manual = true;
  return options;
}

TEST(Timeout, ARequestWhoseTimeIsOverIsA504AndIsCancelled) {
  TestServer test(WithoutSteps(), LimitedTo(std::chrono::milliseconds(300)));
  RawClient client(test.port());
  client.Send(Post("/v1/completions", R"({"prompt":"x"})"));
  const RawResponse response = client.Read();
  EXPECT_EQ(response.status, 504) << response.body;
  const Json error = (*ParseJson(response.body))["error"];
  EXPECT_EQ(error["type"], "timeout_error");
  EXPECT_EQ(error["code"], "request_timeout");
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("300ms"));
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("--request-timeout"));
  EXPECT_EQ(response.headers.at("x-should-retry"), "false");
  EXPECT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.cancelled == 1; }));
  // The connection goes on, and the next request has a time of its own.
  client.Send(Post("/v1/completions", R"({"prompt":"x","max_tokens":1})"));
  ASSERT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 2; }));
  test.engine.Step(4);
  EXPECT_EQ(client.Read().status, 200);
}

TEST(Timeout, AStreamThatHasBegunEndsWithAnErrorFrame) {
  for (const auto& [path, body, words] :
       {std::tuple{"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"stream":true})",
                   "\"timeout_error\""},
        {"/v1/messages", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":50,"stream":true})",
         "event: error"}}) {
    TestServer test(WithoutSteps(), LimitedTo(std::chrono::milliseconds(700)));
    RawClient client(test.port());
    client.Send(Post(path, body));
    ASSERT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 1; }));
    test.engine.Step();
    const RawResponse response = client.Read();
    EXPECT_EQ(response.status, 200);
    EXPECT_TRUE(response.complete);
    EXPECT_THAT(response.body, HasSubstr(words));
    EXPECT_THAT(response.body, HasSubstr("--request-timeout"));
    EXPECT_THAT(response.body, Not(HasSubstr("[DONE]")));
    EXPECT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.cancelled == 1; }));
  }
}

TEST(Timeout, ARequestThatWaitsToBeReadIsNotReadAnyMore) {
  FakeEngine engine;
  const auto intake = std::make_shared<Intake>(/*threads=*/0, WorkLimits{});  // nothing is ever read
  HttpServer server(TestServer::WithFreePort(LimitedTo(std::chrono::milliseconds(200))), intake);
  ASSERT_TRUE(server.Start().ok());
  server.Serve(TestModel(), &engine);
  RawClient client(server.port());
  client.Send(Post("/v1/completions", R"({"prompt":"x"})"));
  EXPECT_EQ(client.Read().status, 504);
  EXPECT_EQ(intake->queue.waiting(), 0);
  EXPECT_TRUE(engine.log().submitted.empty());
}

TEST(Timeout, IsEachRequestsOwnOnAConnection) {
  constexpr std::chrono::milliseconds kLimit(300);
  TestServer test(WithoutSteps(), LimitedTo(kLimit));
  RawClient client(test.port());
  test.engine.Step();
  client.Send(Post("/v1/completions", R"({"prompt":"x","max_tokens":1})"));
  EXPECT_EQ(client.Read().status, 200);
  const auto begin = std::chrono::steady_clock::now();
  client.Send(Post("/v1/completions", R"({"prompt":"x","max_tokens":1})"));
  EXPECT_EQ(client.Read().status, 504);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kLimit);
}

TEST(Drain, RunningStreamsFinishAndNewRequestsAreRefused) {
  TestServer test({.manual = true});
  RawClient client(test.port());
  client.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":8,"stream":true})"));
  test.engine.Step(3);
  ASSERT_TRUE(client.ReadUntil("data: "));
  bool clean = false;
  std::thread drain([&] { clean = test.server.Drain(absl::Seconds(30)); });
  while (test.Ask(Get("/ready")).status != 503) {
  }
  EXPECT_EQ(test.Ask(Get("/live")).status, 200);
  const RawResponse refused = test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})"));
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.count("retry-after"), 1u);
  test.engine.Step(5);
  const RawResponse response = client.Read();
  EXPECT_EQ(SseData(response.body).back(), "[DONE]");
  drain.join();
  EXPECT_TRUE(clean);
}

TEST(Drain, WhatIsLeftAtTheLimitEndsWithAnErrorFrame) {
  TestServer test({.manual = true});
  RawClient client(test.port());
  client.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":8,"stream":true})"));
  RawClient waiting(test.port());
  waiting.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":8})"));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 2; }));
  test.engine.Step(3);
  ASSERT_TRUE(client.ReadUntil("data: "));
  EXPECT_FALSE(test.server.Drain(absl::Milliseconds(20)));
  const RawResponse response = client.Read();
  EXPECT_TRUE(response.complete);
  EXPECT_EQ((*ParseJson(SseData(response.body).back()))["error"]["type"], "unavailable_error");
  EXPECT_EQ(waiting.Read().status, 503);
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 0; }));
}

TEST(Drain, StoppingWithRequestsUnderWayCancelsThem) {
  FakeEngine engine({.step_interval = absl::Microseconds(100)});
  HttpServerOptions options;
  options.port = 0;
  auto server = std::make_unique<HttpServer>(options);
  ASSERT_TRUE(server->Start().ok());
  server->Serve(TestModel(), &engine);
  std::vector<RawClient> clients;
  for (int i = 0; i < 20; ++i)
    clients.emplace_back(server->port())
        .Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":4000,"stream":true})"));
  for (RawClient& client : clients) ASSERT_TRUE(client.ReadUntil("data: "));
  server.reset();
  EXPECT_TRUE(engine.WaitFor([](const auto& log) { return log.live == 0; }));
  for (RawClient& client : clients) EXPECT_TRUE(client.WaitForClose());
}

// ---- metrics ----

double Value(const std::string& text, const std::string& line_start) {
  size_t at = 0;
  double sum = 0;
  while ((at = text.find(line_start, at)) != std::string::npos) {
    if (at == 0 || text[at - 1] == '\n') sum += std::stod(text.substr(text.find(' ', text.find('}', at)) + 1));
    ++at;
  }
  return sum;
}

TEST(Metrics, TokensAreConservedForGoodAbortedAndFailedRequests) {
  FakeEngineOptions options;
  options.manual = true;
  options.fail_after = 12;
  TestServer test(options);
  // good: 8 tokens each of 2 choices
  RawClient good(test.port());
  good.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"abc","max_tokens":8,"n":2})"));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  test.engine.Step(8);
  const auto usage = (*ParseJson(good.Read().body))["usage"];
  EXPECT_EQ(usage["completion_tokens"], 16);
  // failed after 12 tokens
  RawClient bad(test.port());
  bad.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"abcd","max_tokens":100,"stream":true})"));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  test.engine.Step(13);
  const size_t frames = SseData(bad.Read().body).size();
  EXPECT_EQ(frames, 13u);
  // aborted after 5
  RawClient gone(test.port());
  gone.Send(Post(
      "/v1/completions",
      R"({"model":"bytes","prompt":"abcde","max_tokens":100,"stream":true,"stream_options":{"continuous_usage_stats":true}})"));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  test.engine.Step(5);
  ASSERT_TRUE(gone.ReadUntil("\"completion_tokens\":5"));
  gone.Close();
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 0; }));

  const std::string text = test.Ask(Get("/metrics")).body;
  for (const std::string prefix : {"dovetail:", "vllm:"}) {
    EXPECT_EQ(Value(text, prefix + "prompt_tokens_total"), 4 + 5 + 6);
    EXPECT_EQ(Value(text, prefix + "generation_tokens_total"), 16 + 12 + 5);
    EXPECT_EQ(Value(text, prefix + "request_prompt_tokens_sum"), 4 + 5 + 6);
    EXPECT_EQ(Value(text, prefix + "request_generation_tokens_sum"), 16 + 12 + 5);
    EXPECT_EQ(Value(text, prefix + "e2e_request_latency_seconds_count"), 3);
    EXPECT_EQ(Value(text, prefix + "time_to_first_token_seconds_count"), 3);
  }
  EXPECT_THAT(text,
              HasSubstr("vllm:request_success_total{engine=\"0\",finished_reason=\"abort\",model_name=\"bytes\"} 1"));
  EXPECT_THAT(text,
              HasSubstr("vllm:request_success_total{engine=\"0\",finished_reason=\"error\",model_name=\"bytes\"} 1"));
  EXPECT_THAT(text, HasSubstr("vllm:num_requests_running{engine=\"0\",model_name=\"bytes\"} 0"));
  EXPECT_THAT(text, HasSubstr("vllm:num_requests_waiting{engine=\"0\",model_name=\"bytes\"} 0"));
  EXPECT_THAT(text, HasSubstr("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"bytes\"} 0"));
  EXPECT_GT(Value(text, "dovetail:step_dense_seconds_count"), 0);
  EXPECT_THAT(text, HasSubstr("dovetail:http_responses_total{route=\"/v1/completions\",status=\"200\"} 3"));
}

// A step of the fake engine takes 1 ms: 0.65 of its own, 0.3 of waiting, in 0.12 of which others were at work.
TEST(Metrics, SayWhereStepsSpendTheirTime) {
  TestServer test;
  test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"abc","max_tokens":8})"));
  const std::string text = test.Ask(Get("/metrics")).body;
  const double steps = Value(text, "dovetail:step_seconds_count");
  ASSERT_GT(steps, 0);
  const auto part = [&](const char* name) {
    const std::string line = absl::StrCat(R"(dovetail:step_part_seconds_total{model_name="bytes",part=")", name, "\"");
    return Value(text, line) / steps;
  };
  EXPECT_NEAR(part("dense"), 0.65e-3, 1e-9);
  EXPECT_NEAR(part("attention"), 0.15e-3, 1e-9);
  EXPECT_NEAR(part("wire"), 0.03e-3, 1e-9);
  EXPECT_NEAR(part("bubble"), 0.17e-3, 1e-9);
  EXPECT_NEAR(Value(text, "dovetail:step_part_seconds_total") / steps, 1e-3, 1e-9);
}

// Incarnations of a worker count from 0 each, and there may be two of a name in turn.
TEST(Metrics, DamagedBlocksAreCountedByAttentionWorker) {
  ServerMetrics metrics({.model_name = "m"});
  const auto update = [&](std::vector<engine::DamagedBlocks> damaged) {
    engine::EngineStats stats;
    stats.damaged_blocks = std::move(damaged);
    metrics.Update(stats, {});
    metrics.Update(stats, {});  // what was said before is no news
  };
  const auto value = [&](const std::string& worker) {
    return Value(metrics.Text(), absl::StrCat(R"(dovetail:kv_damaged_blocks_total{attention_worker=")", worker,
                                              R"(",model_name="m"})"));
  };
  update({{"a1", 7, 0}, {"a2", 8, 3}});
  EXPECT_THAT(metrics.Text(), HasSubstr(R"(dovetail:kv_damaged_blocks_total{attention_worker="a1",model_name="m"} 0)"));
  update({{"a1", 7, 2}, {"a2", 8, 3}});
  update({{"a2", 8, 4}});
  update({{"a1", 9, 5}, {"a2", 8, 4}});
  EXPECT_EQ(value("a1"), 7);
  EXPECT_EQ(value("a2"), 4);
  for (uint64_t i = 0; i < 2000; ++i) update({{absl::StrCat("w", i), i, 1}, {absl::StrCat("v", i), i, 1}});
  EXPECT_EQ(value("others"), 4000 - 1022) << "of those beyond the limit";
}

TEST(Metrics, AWorkersSeriesComeAndGoWithIt) {
  ServerMetrics metrics({.model_name = "m"});
  const auto update = [&](std::vector<engine::WorkerLoad> workers) {
    engine::EngineStats stats;
    stats.workers = std::move(workers);
    metrics.Update(stats, {});
  };
  update({});
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("dovetail:workers_serving{")));  // a process that is a whole cluster
  const engine::WorkerLoad compute{"c1", "compute", true, 7, 0, 0, 2};
  update({compute, {"a1", "attention", true, 5, 100, 40}, {"a2", "attention", false, 0, 100, 0}});
  for (const char* line :
       {R"(dovetail:workers_serving{role="attention"} 1)", R"(dovetail:workers_serving{role="compute"} 1)",
        R"(dovetail:worker_steps{role="compute",worker="c1"} 7)",
        R"(dovetail:worker_host_links{role="compute",worker="c1"} 2)",
        R"(dovetail:worker_kv_blocks{role="attention",worker="a1"} 100)",
        R"(dovetail:worker_kv_blocks_in_use{role="attention",worker="a1"} 40)"})
    EXPECT_THAT(metrics.Text(), HasSubstr(line));
  EXPECT_THAT(metrics.Text(), Not(HasSubstr(R"(dovetail:worker_kv_blocks{role="compute")")));
  update({compute});
  EXPECT_THAT(metrics.Text(), HasSubstr(R"(dovetail:workers_serving{role="attention"} 0)"));
  EXPECT_THAT(metrics.Text(), Not(HasSubstr(R"(worker="a1")")));
  update({});  // the scheduler cannot be reached
  EXPECT_THAT(metrics.Text(), HasSubstr(R"(dovetail:workers_serving{role="compute"} 0)"));
}

TEST(Metrics, RequestsAndTokensAreCountedByTenant) {
  ServerMetrics metrics({.model_name = "m"});
  RequestRecord record;
  record.prompt_tokens = 3;
  record.generation_tokens = 5;
  for (const char* tenant : {"blue", "green", "blue"}) {
    record.tenant = tenant;
    metrics.RequestFinished(record);
  }
  const auto value = [&](const std::string& name, const std::string& tenant) {
    return Value(metrics.Text(),
                 absl::StrCat("dovetail:tenant_", name, R"(_total{model_name="m",tenant=")", tenant, "\"}"));
  };
  EXPECT_EQ(value("requests", "blue"), 2);
  EXPECT_EQ(value("prompt_tokens", "blue"), 6);
  EXPECT_EQ(value("generation_tokens", "green"), 5);
  for (int i = 0; i < 1000; ++i) {
    record.tenant = absl::StrCat("t", i);
    metrics.RequestFinished(record);
  }
  EXPECT_EQ(value("requests", "others"), 1000 - 253) << "of those beyond the limit";
}

TEST(Metrics, EveryAnswerIsCountedWithItsStatus) {
  FakeEngineOptions failing;
  failing.fail_after = 0;
  TestServer test(failing);
  const std::string json = R"({"model":"bytes","prompt":"x"})";
  const std::string plain =
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n\r\n";
  for (const std::string& request :
       {Post("/v1/completions", json), Post("/v1/completions", "{"), plain, Post("/v1/models", "{}"), Get("/nowhere"),
        Get("/v1/models"), Get("/v1/models/unknown"), std::string("GARBAGE\r\n\r\n")})
    test.Ask(request);
  const std::string text = test.Ask(Get("/metrics")).body;
  for (const char* line : {R"({route="/v1/completions",status="500"} 1)", R"({route="/v1/completions",status="400"} 1)",
                           R"({route="/v1/completions",status="415"} 1)", R"({route="none",status="405"} 1)",
                           R"({route="none",status="404"} 1)", R"({route="/v1/models",status="200"} 1)",
                           R"({route="/v1/models/",status="404"} 1)", R"({route="none",status="400"} 1)"})
    EXPECT_THAT(text, HasSubstr(absl::StrCat("dovetail:http_responses_total", line, "\n")));
}

TEST(Metrics, HaveTheNamesThatRoutersAndDashboardsKnow) {
  TestServer test;
  test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"abc","max_tokens":8})"));
  const std::string text = test.Ask(Get("/metrics")).body;
  for (const std::string name : {"num_requests_running",
                                 "num_requests_waiting",
                                 "kv_cache_usage_perc",
                                 "cache_config_info",
                                 "prompt_tokens_total",
                                 "generation_tokens_total",
                                 "prompt_tokens_cached_total",
                                 "prompt_tokens_by_source_total",
                                 "prefix_cache_queries_total",
                                 "prefix_cache_hits_total",
                                 "num_preemptions_total",
                                 "request_success_total",
                                 "time_to_first_token_seconds",
                                 "inter_token_latency_seconds",
                                 "request_time_per_output_token_seconds",
                                 "e2e_request_latency_seconds",
                                 "request_queue_time_seconds",
                                 "request_inference_time_seconds",
                                 "request_prefill_time_seconds",
                                 "request_decode_time_seconds",
                                 "request_prompt_tokens",
                                 "request_generation_tokens",
                                 "request_params_n",
                                 "request_params_max_tokens",
                                 "request_max_num_generation_tokens",
                                 "iteration_tokens_total",
                                 "request_prefill_kv_computed_tokens"})
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# TYPE vllm:", name, " ")));
  for (const char* line :
       {R"(vllm:prompt_tokens_by_source_total{engine="0",model_name="bytes",source="local_compute"} 2)",
        R"(vllm:prompt_tokens_by_source_total{engine="0",model_name="bytes",source="local_cache_hit"} 2)",
        R"(vllm:request_queue_time_seconds_count{engine="0",model_name="bytes"} 1)",
        R"(vllm:request_queue_time_seconds_sum{engine="0",model_name="bytes"} 0.25)"})
    EXPECT_THAT(text, HasSubstr(absl::StrCat(line, "\n")));
}

// ---- error texts ----

TEST(Leak, NoErrorBodyHasAPathAnAddressOrAnInternalName) {
  FakeEngineOptions failing;
  failing.fail_after = 0;
  TestServer test(failing);
  const std::vector<std::string> requests = {
      Get("/nope"),
      Post("/v1/models", "{}"),
      Post("/v1/completions", "{"),
      Post("/v1/completions", "[]"),
      Post("/v1/completions", R"({"model":1})"),
      Post("/v1/completions", R"({"model":"x","prompt":"x"})"),
      Post("/v1/completions", R"({"model":"bytes","prompt":"x"})"),
      Post("/v1/completions", R"({"model":"bytes","prompt":"x","stream":true})"),
      Post("/v1/completions", "\"\xFF\""),
      Post("/v1/chat/completions", R"({"model":"bytes","messages":[{"role":"user","content":{}}]})"),
      "GARBAGE\r\n\r\n",
      Post("/tokenize", "{}"),
      Post("/detokenize", R"({"tokens":[99999999]})"),
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999\r\n\r\n"};
  for (const std::string& request : requests) {
    const RawResponse response = test.Ask(request);
    EXPECT_GE(response.status, 400);
    const auto json = ParseJson(response.body);
    ASSERT_TRUE(json.ok()) << response.body;
    for (const char* key : {"message", "type", "param", "code"})
      EXPECT_TRUE((*json)["error"].contains(key)) << response.body;
    for (const char* leak : {"0x", "/var", "/work", "/tmp", "/usr", "/home", ".cc", ".sock", "nlohmann",
                             "json.exception", "dovetail::", "absl", "boost", "shm"})
      EXPECT_EQ(response.body.find(leak), std::string::npos) << response.body;
  }
}

TEST(Options, AreCheckedByName) {
  const auto message = [](auto change) {
    HttpServerOptions options;
    change(options);
    return std::string(options.Validate().message());
  };
  EXPECT_EQ(message([](auto&) {}), "");
  EXPECT_THAT(message([](auto& o) { o.port = 65536; }), HasSubstr("--port: 65536"));
  EXPECT_THAT(message([](auto& o) { o.api_keys = {""}; }), HasSubstr("--api-key"));
  EXPECT_THAT(message([](auto& o) { o.api_keys = {"a b"}; }), HasSubstr("--api-key"));
  EXPECT_THAT(message([](auto& o) { o.overload_status = 500; }), HasSubstr("--overload-status"));
  EXPECT_THAT(message([](auto& o) { o.host = ""; }), HasSubstr("--host"));
  EXPECT_THAT(message([](auto& o) { o.max_connections = 0; }), HasSubstr("--max-connections: 0"));
  EXPECT_THAT(message([](auto& o) { o.max_body_bytes = 1000; }), HasSubstr("--max-body-bytes: 1000"));
  EXPECT_THAT(message([](auto& o) { o.max_unfinished_body_bytes = o.max_body_bytes - 1; }),
              HasSubstr("--max-unfinished-body-bytes: 4194303 is less than the 4194304 of --max-body-bytes"));
  EXPECT_THAT(message([](auto& o) { o.min_body_bytes_per_s = 0; }), HasSubstr("--min-body-rate: 0"));
  HttpServerOptions taken;
  TestServer test;
  taken.port = test.port();
  HttpServer second(taken);
  const absl::Status status = second.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("choose another --port"));
}

}  // namespace
}  // namespace dovetail::server::test
