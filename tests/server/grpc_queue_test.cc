#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/generate_call.h"
#include "server/grpc/generate_request.h"
#include "server/grpc/generation_service.h"
#include "server/http/http_server.h"
#include "tests/server/fake_engine.h"
#include "tests/server/raw_client.h"
#include "tests/server/test_model.h"

// gRPC calls that wait to be read, in the queue and under the admission that HTTP has. The test is the worker.

namespace dovetail::server::test {
namespace {

namespace pb = vllm::grpc::engine;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// True as soon as `condition` is; false after 30 s.
bool Until(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

struct Call {
  Call(pb::VllmEngine::Stub& stub, const std::string& text, const std::string& key,
       std::chrono::milliseconds limit = std::chrono::seconds(30)) {
    context.set_deadline(std::chrono::system_clock::now() + limit);
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    pb::GenerateRequest request;
    request.set_request_id("id-" + text.substr(0, 8));
    request.set_text(text);
    request.mutable_sampling_params()->set_max_tokens(1);
    reader = stub.Generate(&context, request);
  }
  grpc::Status End() {
    pb::GenerateResponse message;
    while (reader->Read(&message)) {
    }
    return reader->Finish();
  }

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<pb::GenerateResponse>> reader;
};

class GrpcQueue : public testing::Test {
 protected:
  // A queue without threads, unless the test wants some.
  void Start(const WorkLimits& limits = {}, std::vector<ApiKey> keys = {}, int max_model_len = 4096, int threads = 0) {
    intake_ = std::make_shared<Intake>(threads, limits);
    const auto model = TestModel(max_model_len);
    GrpcServerOptions options;
    options.listen = "127.0.0.1:0";
    options.api_keys = keys;
    options.request_timeout = request_timeout_;
    auto started = GrpcServer::Start(options, model, engine_.get(), intake_,
                                     std::make_shared<ServerMetrics>(ServerMetrics::Info{.model_name = "m"}));
    ASSERT_TRUE(started.ok()) << started.status();
    grpc_ = *std::move(started);
    stub_ = pb::VllmEngine::NewStub(
        grpc::CreateChannel("127.0.0.1:" + std::to_string(grpc_->port()), grpc::InsecureChannelCredentials()));
    HttpServerOptions http;
    http.port = 0;
    http.api_keys = std::move(keys);
    http_.emplace(http, intake_);
    ASSERT_TRUE(http_->Start().ok());
    http_->Serve(model, engine_.get());
  }
  void TearDown() override { grpc_.reset(); }

  std::unique_ptr<Call> Ask(const std::string& text, const std::string& key = "") {
    return std::make_unique<Call>(*stub_, text, key);
  }
  RawClient AskHttp() {
    RawClient client(http_->port());
    client.Send(Post("/v1/completions", R"({"model":"bytes","max_tokens":1,"prompt":"abc"})"));
    return client;
  }
  bool Waiting(int calls) {
    return Until([&] { return intake_->queue.waiting() == calls; });
  }
  bool RunNext() { return intake_->queue.RunNext(); }
  std::vector<std::string> Tenants() {
    std::vector<std::string> tenants;
    for (const auto& request : engine_->log().submitted) tenants.push_back(request.tenant);
    return tenants;
  }

  std::unique_ptr<FakeEngine> engine_ = std::make_unique<FakeEngine>();
  absl::Duration request_timeout_;
  std::shared_ptr<Intake> intake_;
  std::optional<HttpServer> http_;
  std::unique_ptr<GrpcServer> grpc_;  // ends first
  std::unique_ptr<pb::VllmEngine::Stub> stub_;
};

TEST_F(GrpcQueue, AShortRequestIsAnsweredWhileLongOnesOfAnotherTenantWait) {
  Start({}, {{"alpha", "a"}, {"beta", "b"}}, /*max_model_len=*/200'000);
  std::vector<std::unique_ptr<Call>> large;
  for (int i = 0; i < 3; ++i) large.push_back(Ask(std::to_string(i) + std::string(100'000, 'a'), "alpha"));
  ASSERT_TRUE(Waiting(3));
  const auto brief = Ask("abc", "beta");
  ASSERT_TRUE(Waiting(4));
  ASSERT_TRUE(RunNext());
  ASSERT_TRUE(RunNext());
  EXPECT_TRUE(brief->End().ok());
  EXPECT_EQ(intake_->queue.waiting(), 2);
  EXPECT_THAT(Tenants(), ElementsAre("a", "b"));
  while (RunNext()) {
  }
  for (const auto& call : large) EXPECT_TRUE(call->End().ok());
}

TEST_F(GrpcQueue, ACallThatIsCancelledWhileItWaitsIsNeverReadAndItsPlaceIsFree) {
  Start({.tasks = 1});
  const auto left = Ask("left");
  ASSERT_TRUE(Waiting(1));
  left->context.TryCancel();
  EXPECT_EQ(left->End().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(Waiting(0));
  const auto stays = Ask("stays");
  ASSERT_TRUE(Waiting(1));
  EXPECT_TRUE(RunNext());
  EXPECT_TRUE(stays->End().ok());
  EXPECT_FALSE(RunNext());
  EXPECT_EQ(engine_->log().submitted.size(), 1u);
}

TEST_F(GrpcQueue, ACallWhoseDeadlinePassesWhileItWaitsIsNeverRead) {
  Start({.tasks = 1});
  Call late(*stub_, "late", "", std::chrono::seconds(1));
  ASSERT_TRUE(Waiting(1));
  EXPECT_EQ(late.End().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Waiting(0));
  EXPECT_FALSE(RunNext());
}

TEST_F(GrpcQueue, ACallWhoseDeadlinePassesWhileItRunsIsCancelled) {
  FakeEngineOptions options;
  options.manual = true;
  engine_ = std::make_unique<FakeEngine>(options);
  Start({}, {}, 4096, /*threads=*/1);
  Call late(*stub_, "late", "", std::chrono::seconds(1));
  EXPECT_EQ(late.End().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(engine_->WaitFor([](const FakeEngine::Log& log) { return log.cancelled == 1; }));
}

TEST_F(GrpcQueue, ACallMayTakeNoLongerThanTheServerAllows) {
  FakeEngineOptions options;
  options.manual = true;
  options.step_interval = absl::Milliseconds(100);  // the call has ended long before the engine lets go of its request
  engine_ = std::make_unique<FakeEngine>(options);
  request_timeout_ = absl::Milliseconds(300);
  Start({}, {}, 4096, /*threads=*/1);
  const auto running = Ask("running");
  ASSERT_TRUE(engine_->WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 1; }));
  const grpc::Status status = running->End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("--request-timeout"));
  EXPECT_TRUE(engine_->WaitFor([](const FakeEngine::Log& log) { return log.cancelled > 0 && log.live == 0; }));
  EXPECT_EQ(engine_->log().cancelled, 1);
}

TEST_F(GrpcQueue, ACallThatWaitsLongerThanTheServerAllowsIsNeverRead) {
  request_timeout_ = absl::Milliseconds(300);
  Start();
  const auto waits = Ask("waits");
  EXPECT_EQ(waits->End().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Waiting(0));
  EXPECT_FALSE(RunNext());
}

TEST_F(GrpcQueue, ACallThatWaitsCanBeAborted) {
  Start();
  const auto call = Ask("abc");
  ASSERT_TRUE(Waiting(1));
  grpc::ClientContext context;
  pb::AbortRequest request;
  request.add_request_ids("id-abc");
  pb::AbortResponse reply;
  ASSERT_TRUE(stub_->Abort(&context, request, &reply).ok());
  EXPECT_EQ(intake_->queue.waiting(), 0);
  const grpc::Status status = call->End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_THAT(status.error_message(), HasSubstr("aborted"));
}

TEST_F(GrpcQueue, AFullQueueIsResourceExhausted) {
  Start({.tasks = 2, .tenant_tasks = 1}, {{"alpha", "a"}, {"beta", "b"}, {"gamma", "c"}});
  const auto one = Ask("one", "alpha");
  ASSERT_TRUE(Waiting(1));
  const grpc::Status own = Ask("two", "alpha")->End();
  EXPECT_EQ(own.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(own.error_message(), "too many requests of this tenant wait to be read; try again in 1 s");
  const auto two = Ask("two", "beta");
  ASSERT_TRUE(Waiting(2));
  const grpc::Status all = Ask("three", "gamma")->End();
  EXPECT_EQ(all.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(all.error_message(), "too many requests wait to be read; try again in 1 s");
  while (RunNext()) {
  }
  EXPECT_TRUE(one->End().ok());
  EXPECT_TRUE(two->End().ok());
}

TEST_F(GrpcQueue, AnIdIsFreeAsSoonAsItsCallHasEnded) {
  Start({.tasks = 1});
  const auto first = Ask("first");
  ASSERT_TRUE(Waiting(1));
  for (int i = 0; i < 500; ++i) ASSERT_EQ(Ask("abc")->End().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << i;
  EXPECT_TRUE(RunNext());
  EXPECT_TRUE(first->End().ok());
}

TEST_F(GrpcQueue, IsThatOfHttp) {
  Start({.tasks = 1});
  RawClient http = AskHttp();
  ASSERT_TRUE(Waiting(1));
  EXPECT_EQ(Ask("abc")->End().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(RunNext());
  EXPECT_EQ(http.Read().status, 200);
  const auto call = Ask("abc");
  ASSERT_TRUE(Waiting(1));
  EXPECT_EQ(AskHttp().Read().status, 503);
  EXPECT_TRUE(RunNext());
  EXPECT_TRUE(call->End().ok());
}

// 700 kB as a message, and 14 MB of strings that have nothing in them.
TEST_F(GrpcQueue, TakesTheMemoryOfARequestAsItsCost) {
  Start({.bytes = 4 << 20});
  const auto first = Ask("abc");
  ASSERT_TRUE(Waiting(1));
  pb::GenerateRequest request;
  request.set_text("abc");
  for (int i = 0; i < 350'000; ++i) request.mutable_sampling_params()->add_stop("");
  ASSERT_LT(request.ByteSizeLong(), 1u << 20);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto reader = stub_->Generate(&context, request);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(RunNext());
  EXPECT_TRUE(first->End().ok());
}

TEST_F(GrpcQueue, TakesTheBytesOfARequestAsItsCost) {
  Start({.bytes = 1 << 20});
  const auto large = Ask(std::string(1'000'000, 'a'));
  ASSERT_TRUE(Waiting(1));
  EXPECT_EQ(Ask("b" + std::string(50'000, 'b'))->End().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto brief = Ask("abc");
  ASSERT_TRUE(Waiting(2));
  while (RunNext()) {
  }
  EXPECT_TRUE(brief->End().ok());
  const grpc::Status refused = large->End();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("at least 166667 tokens")) << "by its bytes, as over HTTP";
}

// What waits in the engine is more than it may, and stays so.
class FullEngine final : public FakeEngine {
 public:
  FullEngine() : FakeEngine({.manual = true}) {}
  engine::EngineStats stats() override {
    engine::EngineStats stats = FakeEngine::stats();
    stats.scheduler.running_sequences = 0;
    stats.scheduler.waiting_requests = stats.max_queued_requests = 1;
    return stats;
  }
};

TEST_F(GrpcQueue, AdmissionCountsTheRequestsOfBothApis) {
  engine_ = std::make_unique<FullEngine>();
  Start();
  const auto call = Ask("abc");
  ASSERT_TRUE(Waiting(1));
  EXPECT_TRUE(RunNext());
  const grpc::Status refused = Ask("def")->End();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("the queue is full; try again in"));
  EXPECT_EQ(AskHttp().Read().status, 503);
  engine_->Step();
  EXPECT_TRUE(call->End().ok());
  ASSERT_TRUE(Until([&] { return intake_->admission.Check("anonymous", engine_->stats()).ok(); }));
  RawClient http = AskHttp();
  ASSERT_TRUE(Waiting(1));
  EXPECT_TRUE(RunNext());
  ASSERT_TRUE(engine_->WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 2; }));
  EXPECT_EQ(Ask("ghi")->End().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  engine_->Step();
  EXPECT_EQ(http.Read().status, 200);
}

// Without gRPC, as if the client never read: no write ends, and the call neither.
class CallWithoutGrpc {
 public:
  explicit CallWithoutGrpc(FullEngine& engine) : engine_(engine) {
    pb::GenerateRequest request;
    request.set_request_id("id");
    request.set_text("abc");
    request.set_stream(true);
    request.mutable_sampling_params()->set_max_tokens(5);
    auto prepared = PrepareGrpcRequest(request, *model_, {.tenant = "a"});
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    call_->Begin(*model_, *std::move(prepared));
  }

  GenerateCall& call() { return *call_; }
  bool HasRoom() { return intake_.admission.Check("a", engine_.stats()).ok(); }
  bool ended() const { return ended_; }

 private:
  FullEngine& engine_;
  const std::shared_ptr<const ServedModel> model_ = TestModel();
  EngineCalls calls_;
  Intake intake_{/*threads=*/0, {}};
  ServerMetrics metrics_{{}};
  const RequestLogOptions log_;
  WaitingTokens waiting_tokens_{0};
  std::atomic<bool> ended_{false};
  const std::shared_ptr<GenerateCall> call_ =
      std::make_shared<GenerateCall>(GenerateCall::Server{engine_, calls_, intake_, metrics_, log_, waiting_tokens_},
                                     CallInfo{"id", "a", "/Generate", absl::Now()}, [this] { ended_ = true; });
};

TEST(GenerateCallTest, LeavesTheAdmissionOnceTheEngineHasEndedItThoughItsClientHasNotReadYet) {
  FullEngine engine;
  CallWithoutGrpc call(engine);
  EXPECT_FALSE(call.HasRoom());
  engine.Step(5);
  EXPECT_TRUE(Until([&] { return call.HasRoom(); }));
  EXPECT_FALSE(call.ended());
  call.call().OnDone();  // the engine's thread may not have left it yet
}

// AddressSanitizer sees it if something of the server is used.
TEST(GenerateCallTest, MayBeWithTheEngineLongerThanThereIsAServer) {
  FullEngine engine;
  {
    CallWithoutGrpc call(engine);
    call.call().OnDone();
  }
  engine.Step(5);
  EXPECT_TRUE(engine.WaitFor([](const FakeEngine::Log& log) { return log.live == 0; }));
}

TEST_F(GrpcQueue, ASickEngineTakesNoCalls) {
  Start();
  engine_->SetHealthy(false);
  EXPECT_EQ(Ask("abc")->End().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(intake_->queue.waiting(), 0);
}

TEST_F(GrpcQueue, CallsThatWaitEndWithTheServer) {
  Start();
  const auto call = Ask("abc");
  ASSERT_TRUE(Waiting(1));
  grpc_->Stop(absl::ZeroDuration());
  EXPECT_FALSE(call->End().ok());
  EXPECT_EQ(intake_->queue.waiting(), 0);
}

TEST_F(GrpcQueue, CallsThatWaitEndWithTheQueue) {
  Start();
  const auto call = Ask("abc");
  ASSERT_TRUE(Waiting(1));
  intake_->queue.Stop();
  const grpc::Status status = call->End();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shutting down"));
  EXPECT_EQ(Ask("def")->End().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GrpcQueue, CallsThatAreCancelledAtAnyMomentAllEndAndNothingIsLeft) {
  Start({}, {}, 4096, /*threads=*/2);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Call>> calls;
    for (int i = 0; i < 20; ++i) calls.push_back(Ask(absl::StrCat(round, "-", i, std::string(i * 100, 'a'))));
    for (int i = 0; i < 20; i += 2) calls[i]->context.TryCancel();
    for (int i = 0; i < 20; ++i) {
      const grpc::Status status = calls[i]->End();
      EXPECT_TRUE(status.ok() || (i % 2 == 0 && status.error_code() == grpc::StatusCode::CANCELLED))
          << status.error_code() << status.error_message();
    }
  }
  EXPECT_TRUE(engine_->WaitFor([](const FakeEngine::Log& log) { return log.live == 0; }));
  grpc_->Stop(absl::ZeroDuration());
  EXPECT_EQ(intake_->queue.waiting(), 0);
}

}  // namespace
}  // namespace dovetail::server::test
