// A full queue before the real engine, with several API keys: which requests get in, what the others are told, and when
// to try again.
#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <optional>

#include "server/http/http_server.h"
#include "server/work/admission.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/tiny_model.h"
#include "tests/server/holding_sink.h"
#include "tests/server/raw_client.h"
#include "tests/server/test_server.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

constexpr int kPromptTokens = 3;

// One sequence runs, three wait. The engine stands still from the beginning until LetGo, with a request of another
// else running; what arrives meanwhile reaches the scheduler in the order of arrival.
class SharedQueue : public testing::Test {
 protected:
  void Start(int overload_status) {
    const auto file = dovetail::test::WriteTinyModel({}, dovetail::test::TempFolder());
    auto model = dovetail::test::TestModel::Load(file, model::WeightFormat::kF32);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto options = dovetail::test::ClusterOptionsFor(*model_, DType::kF32);
    options.scheduler.max_num_seqs = 1;
    options.scheduler.max_queued_requests = 3;
    auto engine = dovetail::test::StartCluster(*model_, options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);

    HttpServerOptions http;
    http.port = 0;
    http.overload_status = overload_status;
    http.api_keys = {"alpha", "beta", "gamma"};
    server_.emplace(http);
    ASSERT_TRUE(server_->Start().ok());
    auto served = std::make_shared<ServedModel>();
    served->names = {"tiny"};
    served->max_model_len = options.scheduler.max_model_len;
    served->vocab_size = static_cast<int>(model_->config().vocab_size);
    server_->Serve(served, engine_.get());

    running_ = std::make_shared<HoldingSink>(1);
    ASSERT_TRUE(engine_->Submit(dovetail::test::GreedyRequest({1, 2, 3}, 20), running_).ok());
    running_->WaitUntilHeld();
  }
  void TearDown() override {
    if (running_ != nullptr) running_->LetGo();
  }

  static std::string Ask(const std::string& key, const std::string& more = "") {
    return Post("/v1/completions", absl::StrCat(R"({"model":"tiny","prompt":[4,5,6],"max_tokens":8)", more, "}"),
                absl::StrCat("Authorization: Bearer ", key, "\r\n"));
  }
  // Sends it and waits until the engine has it.
  RawClient& Send(const std::string& request) {
    RawClient& client = *clients_.emplace_back(std::make_unique<RawClient>(server_->port()));
    client.Send(request);
    accepted_ += kPromptTokens;
    const std::string line = absl::StrCat("dovetail:prompt_tokens_total{model_name=\"tiny\"} ", accepted_, "\n");
    for (int i = 0; i < 100'000; ++i) {
      RawClient metrics(server_->port());
      metrics.Send(Get("/metrics", "X-Api-Key: alpha\r\n"));
      if (metrics.Read().body.find(line) != std::string::npos) return client;
    }
    ADD_FAILURE() << "the engine did not get the request";
    return client;
  }
  static Json Error(const RawResponse& response) {
    const auto json = ParseJson(response.body);
    return json.ok() ? (*json)["error"] : Json::object();
  }

  std::unique_ptr<dovetail::test::TestModel> model_;
  std::unique_ptr<engine::EmbeddedCluster> engine_;
  std::optional<HttpServer> server_;
  std::shared_ptr<HoldingSink> running_;
  std::vector<std::unique_ptr<RawClient>> clients_;
  int accepted_ = 0;
};

TEST_F(SharedQueue, AKeyThatFillsItLosesItsLastRequestToAKeyWithFewer) {
  Start(503);
  std::vector<RawClient*> alpha;
  for (int i = 0; i < 2; ++i) alpha.push_back(&Send(Ask("alpha")));
  alpha.push_back(&Send(Ask("alpha", R"(,"stream":true)")));
  alpha.push_back(&Send(Ask("alpha")));  // finds it full
  RawClient& beta = Send(Ask("beta"));
  RawClient& late = Send(Ask("alpha"));
  running_->LetGo();

  const RawResponse full = alpha[3]->Read();  // no other tenant waited then: the server was full
  EXPECT_EQ(full.status, 503);
  EXPECT_EQ(Error(full)["type"], "overloaded_error");
  EXPECT_EQ(Error(full)["code"], "overloaded");
  const RawResponse pushed_out = alpha[2]->Read();  // accepted, a stream, and pushed out before its first token
  EXPECT_EQ(pushed_out.status, 429);
  EXPECT_EQ(Error(pushed_out)["type"], "rate_limit_error");
  EXPECT_EQ(Error(pushed_out)["code"], "rate_limit_exceeded");
  const RawResponse over = late.Read();  // has two of three places
  EXPECT_EQ(over.status, 429);
  for (const RawResponse* refused : {&full, &pushed_out, &over}) {
    ASSERT_EQ(refused->headers.count("retry-after"), 1u);
    EXPECT_GE(std::stoi(refused->headers.at("retry-after")), 1);
    for (const char* field : {"message", "type", "param", "code"}) EXPECT_TRUE(Error(*refused).contains(field));
  }
  EXPECT_EQ(beta.Read().status, 200);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(alpha[i]->Read().status, 200);

  RawClient metrics(server_->port());
  metrics.Send(Get("/metrics", "X-Api-Key: alpha\r\n"));
  const std::string text = metrics.Read().body;
  for (const char* line : {"status=\"200\"} 3\n", "status=\"429\"} 2\n", "status=\"503\"} 1\n"})
    EXPECT_THAT(text, testing::HasSubstr(absl::StrCat("{route=\"/v1/completions\",", line)));
  // What steps computed: the whole prompt and all but the last token, of three requests here and of the running one.
  const std::string labels = "{engine=\"0\",model_name=\"tiny\"} ";
  EXPECT_THAT(text, testing::HasSubstr(absl::StrCat("vllm:iteration_tokens_total_sum", labels,
                                                    3 * (kPromptTokens + 7) + 3 + 19, "\n")));
  EXPECT_THAT(text, testing::HasSubstr(absl::StrCat("vllm:request_queue_time_seconds_count", labels, "6\n")));
  const std::string no_time = absl::StrCat("vllm:request_queue_time_seconds_sum", labels, "0\n");
  EXPECT_THAT(text, testing::Not(testing::HasSubstr(no_time)));
}

TEST_F(SharedQueue, TheStatusOfAFullServerCanBe429) {
  Start(429);
  std::vector<RawClient*> alpha;
  for (int i = 0; i < 4; ++i) alpha.push_back(&Send(Ask("alpha")));
  running_->LetGo();
  const RawResponse full = alpha[3]->Read();
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(Error(full)["code"], "overloaded");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(alpha[i]->Read().status, 200);
}

// ---- before the request is read ----

engine::EngineStats Stats(int waiting, int running) {  // of an engine with a queue of 10
  engine::EngineStats stats;
  stats.max_queued_requests = 10;
  stats.scheduler.waiting_requests = waiting;
  stats.scheduler.running_sequences = running;
  return stats;
}

TEST(EarlyRefusal, HitsOnlyWhoCertainlyFillsTheQueue) {
  Admission admission;
  EXPECT_TRUE(admission.Check("a", Stats(10, 4)).ok()) << "it has nothing here; the scheduler decides";
  admission.Began("a", 13);
  EXPECT_TRUE(admission.Check("a", Stats(9, 4)).ok()) << "there is room";
  EXPECT_TRUE(absl::IsResourceExhausted(admission.Check("a", Stats(10, 4)))) << "no other tenant is here";
  admission.Began("b", 1);
  EXPECT_TRUE(absl::IsAborted(admission.Check("a", Stats(10, 4))));
  EXPECT_TRUE(admission.Check("b", Stats(10, 4)).ok());
  admission.Ended("a", 5, absl::UnixEpoch());
  EXPECT_TRUE(admission.Check("a", Stats(10, 4)).ok()) << "of 8 here 4 may run: maybe no more than 4 of 10 wait";
}

TEST(RetryAfter, IsHowLongTheQueueTakesAtTheRateOfTheLastSeconds) {
  const absl::Time start = absl::UnixEpoch() + absl::Hours(1);
  Admission admission;
  admission.Began("a", 1000);
  EXPECT_EQ(admission.RetryAfterSeconds(500, start), 1) << "nothing is known yet";
  for (int second = 0; second < 10; ++second) admission.Ended("a", 5, start + absl::Seconds(second));
  const absl::Time end = start + absl::Seconds(9);
  EXPECT_EQ(admission.RetryAfterSeconds(0, end), 1);
  EXPECT_EQ(admission.RetryAfterSeconds(100, end), 20) << "five a second";
  EXPECT_EQ(admission.RetryAfterSeconds(1'000'000, end), 60) << "clients ignore more than two minutes";
  EXPECT_EQ(admission.RetryAfterSeconds(100, end + absl::Seconds(5)), 40) << "half as many in the last ten seconds";
  EXPECT_EQ(admission.RetryAfterSeconds(100, end + absl::Seconds(60)), 10) << "nothing ended";
}

}  // namespace
}  // namespace dovetail::server::test
