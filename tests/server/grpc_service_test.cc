#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "model/tokenizer/tokenizer.h"
#include "proto/control/vllm_engine.grpc.pb.h"
#include "server/grpc/generation_service.h"
#include "server/grpc/zip_archive.h"
#include "server/openai/requests.h"
#include "tests/server/fake_engine.h"
#include "tests/server/test_model.h"

// The gRPC server with a real client, before engines that no real one is like.

namespace dovetail::server::test {
namespace {

namespace pb = vllm::grpc::engine;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;
using ::testing::Not;

// Delivers a whole text before Submit returns, as an engine may that runs on another core.
class HastyEngine final : public FakeEngine {
 public:
  explicit HastyEngine(std::string text) : text_(std::move(text)) {}

  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request,
                                   std::shared_ptr<engine::GenerationSink> sink) override {
    sink_ = sink;
    prompt_tokens_ = static_cast<int>(request.prompt.size());
    std::thread([&] {
      for (size_t i = 0; i < text_.size(); ++i) {
        requests::GenerationUpdate update = Update(static_cast<int>(i));
        update.tokens.push_back(static_cast<TokenId>(text_[i]));
        sink->OnUpdate(std::move(update));
      }
    }).join();
    return RequestId(1);
  }
  void StopChoice(RequestId, int choice) override {
    ++stopped;
    requests::GenerationUpdate update = Update(static_cast<int>(text_.size()));
    update.choice = choice;
    update.choice_finished = update.request_finished = true;
    sink_->OnUpdate(std::move(update));
  }

  std::atomic<int> stopped{0};

 private:
  requests::GenerationUpdate Update(int index) const {
    return {.request = RequestId(1), .first_index = index, .prompt_tokens = prompt_tokens_};
  }
  const std::string text_;
  int prompt_tokens_ = 0;
  std::shared_ptr<engine::GenerationSink> sink_;
};

struct Client {
  explicit Client(engine::Engine* engine, std::shared_ptr<ServedModel> model = TestModel(),
                  GrpcServerOptions options = {}) {
    options.listen = "127.0.0.1:0";
    auto started =
        GrpcServer::Start(options, std::move(model), engine, std::make_shared<Intake>(1, WorkLimits{}), metrics);
    EXPECT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
    stub = pb::VllmEngine::NewStub(
        grpc::CreateChannel("127.0.0.1:" + std::to_string(server->port()), grpc::InsecureChannelCredentials()));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }

  std::shared_ptr<ServerMetrics> metrics = std::make_shared<ServerMetrics>(ServerMetrics::Info{.model_name = "m"});
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<pb::VllmEngine::Stub> stub;
  grpc::ClientContext context;
};

TEST(GrpcService, AStopStringThatCompletesBeforeTheIdIsKnownStopsTheChoice) {
  HastyEngine engine("one, two, three");
  Client client(&engine);
  pb::GenerateRequest request;
  request.set_text("count");
  request.set_stream(true);
  request.mutable_sampling_params()->set_max_tokens(100);
  request.mutable_sampling_params()->add_stop("two");
  const auto reader = client.stub->Generate(&client.context, request);
  pb::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(message.complete().matched_stop_str(), "two");
  EXPECT_EQ(engine.stopped, 1);
}

// Under which salt the prefix cache is asked for the blocks of a call.
std::string SaltOfACall(Client& client, FakeEngine& engine) {
  pb::GenerateRequest request;
  request.set_text("count");
  request.mutable_sampling_params()->set_max_tokens(1);
  grpc::ClientContext context;
  const auto reader = client.stub->Generate(&context, request);
  pb::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  return engine.log().submitted.back().cache_salt;
}

TEST(GrpcService, AfterAFlushNoRequestFindsWhatWasCachedBefore) {
  FakeEngine engine;
  Client client(&engine);
  const auto flush = [&] {
    grpc::ClientContext context;
    pb::FlushCacheRequest request;
    request.set_timeout_s(5);
    pb::FlushCacheResponse reply;
    EXPECT_TRUE(client.stub->FlushCache(&context, request, &reply).ok());
    EXPECT_TRUE(reply.success());
  };
  const std::string before = SaltOfACall(client, engine);
  EXPECT_EQ(before, SaltOfACall(client, engine));
  flush();
  const std::string after = SaltOfACall(client, engine);
  EXPECT_NE(before, after);
  EXPECT_EQ(after, SaltOfACall(client, engine)) << "later requests share among themselves";
  flush();
  EXPECT_NE(after, SaltOfACall(client, engine));
}

TEST(GrpcService, TheTokenizerComesInPiecesWithADigest) {
  FakeEngine engine;
  GrpcServerOptions options;
  auto archive = std::make_shared<TokenizerArchive>();
  for (size_t i = 0; i < 2 * TokenizerCall::kPieceBytes + 5; ++i) archive->zip += static_cast<char>(i % 251);
  archive->sha256 = "0123";
  options.tokenizer = archive;
  Client client(&engine, TestModel(), options);
  const auto reader = client.stub->GetTokenizer(&client.context, pb::GetTokenizerRequest());
  std::string all;
  std::vector<std::string> digests;
  pb::GetTokenizerChunk piece;
  while (reader->Read(&piece)) {
    all += piece.data();
    digests.push_back(piece.sha256());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(all, archive->zip);
  EXPECT_THAT(digests, ElementsAre("", "", "0123"));
}

TEST(GrpcService, AModelWithoutTokenizerFilesSaysSo) {
  FakeEngine engine;
  GrpcServerOptions options;
  options.why_no_tokenizer = "it is inside a GGUF file";
  options.api_keys = {{"secret", "tenant"}};
  Client client(&engine, TestModel(), options);
  const auto ask = [&](const char* key) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", std::string("Bearer ") + key);
    const auto reader = client.stub->GetTokenizer(&context, pb::GetTokenizerRequest());
    pb::GetTokenizerChunk piece;
    EXPECT_FALSE(reader->Read(&piece));
    return reader->Finish();
  };
  const grpc::Status status = ask("secret");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "it is inside a GGUF file");
  EXPECT_EQ(ask("guessed").error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST(GrpcService, AnArchiveHasTheChecksumsOfItsFiles) {
  EXPECT_EQ(ZipChecksum("123456789"), 0xcbf43926u);  // the check value of this CRC
  const auto zip = ZipOf({{"a.json", "{}"}, {"empty", ""}});
  ASSERT_TRUE(zip.ok());
  EXPECT_EQ(zip->substr(0, 4), "PK\x03\x04");
  EXPECT_EQ(zip->substr(30, 8), "a.json{}");
  EXPECT_EQ(zip->substr(zip->size() - 22, 4), "PK\x05\x06");
}

TEST(GrpcService, EmbedAnswersTheNormalisedVectorOfTokens) {
  FakeEngine engine;
  Client client(&engine);
  pb::EmbedRequest request;
  for (const uint32_t id : {3, 4}) request.mutable_tokenized()->add_input_ids(id);
  pb::EmbedResponse reply;
  const grpc::Status status = client.stub->Embed(&client.context, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.embedding_dim(), 4u);
  EXPECT_EQ(reply.prompt_tokens(), 2u);
  // The fake engine's vector: first and last token, their number, and how they are pooled.
  const double length = std::sqrt(3 * 3 + 4 * 4 + 2 * 2 + 2 * 2);
  EXPECT_THAT(reply.embedding(),
              ElementsAre(FloatEq(3 / length), FloatEq(4 / length), FloatEq(2 / length), FloatEq(2 / length)));
}

TEST(GrpcService, EmbedNamesWhatIsWrong) {
  FakeEngine engine;
  {
    Client client(&engine);
    pb::EmbedResponse reply;
    const grpc::Status status = client.stub->Embed(&client.context, {}, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("tokenized.input_ids"));
  }
  Client client(&engine);
  pb::EmbedRequest request;
  request.mutable_tokenized()->add_input_ids(100'000);
  pb::EmbedResponse reply;
  const grpc::Status status = client.stub->Embed(&client.context, request, &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("100000"));
  EXPECT_TRUE(engine.log().submitted.empty());
}

TEST(GrpcService, EmbedIsCancelledAtItsDeadline) {
  FakeEngineOptions options;
  options.manual = true;
  FakeEngine engine(options);
  Client client(&engine);
  client.context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  pb::EmbedRequest request;
  request.mutable_tokenized()->add_input_ids(3);
  pb::EmbedResponse reply;
  EXPECT_EQ(client.stub->Embed(&client.context, request, &reply).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(engine.WaitFor([](const FakeEngine::Log& log) { return log.cancelled == 1; }));
}

TEST(GrpcService, LoadsHaveTheTokensThatTheEngineHasNotBegun) {
  FakeEngineOptions options;
  options.manual = true;
  FakeEngine engine(options);
  Client client(&engine);
  pb::GenerateRequest request;
  for (int i = 0; i < 7; ++i) request.mutable_tokenized()->add_input_ids(3);
  request.mutable_sampling_params()->set_max_tokens(1);
  const auto reader = client.stub->Generate(&client.context, request);
  ASSERT_TRUE(engine.WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 1; }));
  const auto waiting = [&] {
    grpc::ClientContext context;
    pb::GetLoadsResponse loads;
    EXPECT_TRUE(client.stub->GetLoads(&context, {}, &loads).ok());
    return loads.loads(0).num_waiting_uncached_tokens();
  };
  EXPECT_EQ(waiting(), 7);
  engine.Step(2);
  pb::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(waiting(), 0);
}

grpc::Status Generate(Client& client, const std::function<void(pb::SamplingParams&)>& constrain) {
  pb::GenerateRequest request;
  request.set_text("hi");
  request.mutable_sampling_params()->set_max_tokens(4);
  constrain(*request.mutable_sampling_params());
  const auto reader = client.stub->Generate(&client.context, request);
  pb::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  return reader->Finish();
}

TEST(GrpcService, EachConstraintIsTheGrammarOfItsFieldOverHttp) {
  using Set = std::function<void(pb::SamplingParams&)>;
  const std::vector<std::pair<std::string, Set>> cases = {
      {R"({"json":{"type":"object","properties":{"a":{"type":"integer"}}}})",
       [](auto& p) { p.set_json_schema(R"({"type":"object","properties":{"a":{"type":"integer"}}})"); }},
      {R"({"json_object":true})", [](auto& p) { p.set_json_object(true); }},
      {R"({"regex":"[0-9]+"})", [](auto& p) { p.set_regex("[0-9]+"); }},
      {R"({"grammar":"root ::= \"a\" | \"b\""})", [](auto& p) { p.set_grammar(R"(root ::= "a" | "b")"); }},
      {R"({"structural_tag":{"format":{"type":"regex","pattern":"a"}}})",
       [](auto& p) { p.set_structural_tag(R"({"format":{"type":"regex","pattern":"a"}})"); }},
      {R"({"choice":["yes","no"]})",
       [](auto& p) {
         p.mutable_choice()->add_choices("yes");
         p.mutable_choice()->add_choices("no");
       }},
  };
  const auto model = ModelWithGrammars();
  FakeEngine engine;
  for (const auto& [http, constrain] : cases) {
    Client client(&engine, model);
    const grpc::Status status = Generate(client, constrain);
    ASSERT_TRUE(status.ok()) << http << status.error_message();
    const auto parsed = ParseCompletionRequest(
        *ParseJson(R"({"model":"bytes","prompt":"hi","structured_outputs":)" + http + "}"), *model);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const auto submitted = engine.log().submitted.back().sampling;
    EXPECT_TRUE(submitted.follows_grammar) << http;
    EXPECT_EQ(submitted.grammar.source, parsed->fields.grammar) << http;
  }
  Client client(&engine, model);
  EXPECT_TRUE(Generate(client, [](auto& p) { p.set_json_object(false); }).ok());
  EXPECT_FALSE(engine.log().submitted.back().sampling.follows_grammar);
}

TEST(GrpcService, AConstraintThatCannotBeEnforcedIsNamed) {
  const auto model = ModelWithGrammars();
  FakeEngine engine;
  const auto refused = [&](grpc::StatusCode code, const std::string& what, const auto& constrain) {
    Client client(&engine, model);
    const grpc::Status status = Generate(client, constrain);
    EXPECT_EQ(status.error_code(), code) << what;
    EXPECT_THAT(status.error_message(), ::testing::StartsWith("sampling_params." + what));
  };
  const auto invalid = grpc::StatusCode::INVALID_ARGUMENT;
  refused(invalid, "json_schema.not", [](auto& p) { p.set_json_schema(R"({"not":{}})"); });
  refused(invalid, "json_schema", [](auto& p) { p.set_json_schema("{"); });
  refused(invalid, "regex", [](auto& p) { p.set_regex("("); });
  refused(invalid, "grammar", [](auto& p) { p.set_grammar("root ::= missing"); });
  refused(invalid, "choice.choices", [](auto& p) { p.mutable_choice(); });
  refused(invalid, "ignore_eos", [](auto& p) { p.set_json_object(true), p.set_ignore_eos(true); });
  refused(invalid, "min_tokens", [](auto& p) { p.set_regex("a"), p.set_min_tokens(1); });
  refused(invalid, "structural_tag.format", [](auto& p) { p.set_structural_tag("{}"); });
  refused(invalid, "structural_tag.format.type",
          [](auto& p) { p.set_structural_tag(R"({"format":{"type":"token","token":1}})"); });
  EXPECT_TRUE(engine.log().submitted.empty());
}

TEST(GrpcService, OthersAreReadWhileAConstraintIsCompiled) {
  absl::Notification compiles, let_go;
  FakeEngine engine;
  Client client(&engine, ModelWithGrammars([&] {
    compiles.Notify();
    let_go.WaitForNotificationWithTimeout(absl::Seconds(15));
  }));
  pb::GenerateRequest request;
  request.set_text("constrained");
  request.mutable_sampling_params()->set_max_tokens(4);
  request.mutable_sampling_params()->set_regex("[0-9]+");
  grpc::ClientContext context;
  const auto constrained = client.stub->Generate(&context, request);
  compiles.WaitForNotification();
  EXPECT_TRUE(Generate(client, [](auto&) {}).ok());
  EXPECT_FALSE(let_go.HasBeenNotified());
  EXPECT_EQ(engine.log().submitted.size(), 1u);
  let_go.Notify();
  pb::GenerateResponse message;
  while (constrained->Read(&message)) {
  }
  EXPECT_TRUE(constrained->Finish().ok());
  EXPECT_TRUE(engine.log().submitted.back().sampling.follows_grammar);
}

TEST(GrpcService, WhatIsNotServedSaysWhy) {
  FakeEngine engine;
  const auto refused = [&](const auto& call) {
    Client client(&engine);
    const grpc::Status status = call(client);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(" is not served: "));
  };
  pb::NotServed reply;
  refused([&](Client& c) { return c.stub->StartProfile(&c.context, {}, &reply); });
  refused([&](Client& c) { return c.stub->StopProfile(&c.context, {}, &reply); });
}

TEST(GrpcService, HealthDoesNotTellWhatIsWrongWithTheEngine) {
  class SickEngine final : public FakeEngine {
    engine::EngineStats stats() override {
      return {.healthy = false, .error = "worker 3 at /var/lib/secret.sock died"};
    }
  } engine;
  Client client(&engine);
  pb::HealthCheckResponse reply;
  ASSERT_TRUE(client.stub->HealthCheck(&client.context, {}, &reply).ok());
  EXPECT_FALSE(reply.healthy());
  EXPECT_THAT(reply.message(), Not(HasSubstr("worker 3")));
}

}  // namespace
}  // namespace dovetail::server::test
