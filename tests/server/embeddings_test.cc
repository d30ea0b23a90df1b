// Vectors of texts over HTTP. The fake engine's are {first token, last token, how many there are, how they are pooled}.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/openai/embeddings.h"
#include "server/openai/parameters.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kPath = "/v1/embeddings";

std::vector<float> Normalised(std::vector<float> values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * value;
  for (float& value : values) value = static_cast<float>(value / std::sqrt(squares));
  return values;
}

std::vector<float> Floats(const Json& numbers) {
  std::vector<float> values;
  for (const Json& number : numbers) values.push_back(number.get<float>());
  return values;
}

Json Ask(TestServer& test, const std::string& body, const char* path = kPath) { return test.AskJson(Post(path, body)); }

// What is wrong with a body, and which field has it.
std::string Refused(TestServer& test, const std::string& body, int status = 400, const char* path = kPath) {
  const Json error = test.AskJson(Post(path, body), status)["error"];
  return absl::StrCat(error["param"].is_string() ? error["param"].get<std::string>() : "", " | ",
                      error["message"].get<std::string>());
}

TEST(Embeddings, OfATextAreItsNormalisedVector) {
  TestServer test;
  const Json body = Ask(test, R"({"model":"bytes","input":"hi","user":"u"})");
  EXPECT_EQ(body["object"], "list");
  EXPECT_EQ(body["model"], "bytes");
  ASSERT_EQ(body["data"].size(), 1u);
  EXPECT_EQ(body["data"][0]["object"], "embedding");
  EXPECT_EQ(body["data"][0]["index"], 0);
  EXPECT_EQ(Floats(body["data"][0]["embedding"]), Normalised({kBos, 'i', 3, 2}));
  EXPECT_EQ(body["usage"]["prompt_tokens"], 3);
  EXPECT_EQ(body["usage"]["total_tokens"], 3);
  EXPECT_THAT(body["id"].get<std::string>(), StartsWith("embd-"));
  const FakeEngine::Log log = test.engine.log();
  ASSERT_EQ(log.submitted.size(), 1u);
  EXPECT_EQ(log.submitted[0].max_tokens, 0);
  EXPECT_EQ(log.submitted[0].choices, 1);
}

TEST(Embeddings, OfSeveralInputsComeInTheirOrder) {
  TestServer test;
  for (const char* inputs : {R"(["a","bc"])", R"([[256,97],[256,98,99]])"}) {
    const Json body = Ask(test, absl::StrCat(R"({"input":)", inputs, "}"));
    ASSERT_EQ(body["data"].size(), 2u);
    EXPECT_EQ(Floats(body["data"][0]["embedding"]), Normalised({kBos, 'a', 2, 2}));
    EXPECT_EQ(Floats(body["data"][1]["embedding"]), Normalised({kBos, 'c', 3, 2}));
    EXPECT_EQ(body["data"][1]["index"], 1);
    EXPECT_EQ(body["usage"]["prompt_tokens"], 5);
  }
  EXPECT_EQ(Floats(Ask(test, R"({"input":[97,98]})")["data"][0]["embedding"]), Normalised({'a', 'b', 2, 2}));
}

TEST(Embeddings, ArePooledAsTheModelSays) {
  auto model = TestModel();
  model->pooling = requests::Pooling::kMean;
  TestServer test({}, {}, model);
  EXPECT_EQ(Floats(Ask(test, R"({"input":[5]})")["data"][0]["embedding"]), Normalised({5, 5, 1, 1}));
}

TEST(Embeddings, InBase64AreTheSameFloats) {
  TestServer test;
  const Json numbers = Ask(test, R"({"input":"hello","encoding_format":"float"})");
  const Json text = Ask(test, R"({"input":"hello","encoding_format":"base64"})");
  std::string bytes;
  ASSERT_TRUE(absl::Base64Unescape(text["data"][0]["embedding"].get<std::string>(), &bytes));
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  EXPECT_EQ(values, Floats(numbers["data"][0]["embedding"]));
  EXPECT_EQ(values.size(), 4u);
}

TEST(Embeddings, OfFewerDimensionsAreNormalisedAgain) {
  TestServer test;
  EXPECT_EQ(Floats(Ask(test, R"({"input":[3,4],"dimensions":2})")["data"][0]["embedding"]), Normalised({3, 4}));
  EXPECT_EQ(Ask(test, R"({"input":[3,4],"dimensions":4})")["data"][0]["embedding"].size(), 4u);
}

TEST(Embeddings, AVectorOfZerosStaysOne) {
  EXPECT_THAT(ShapeVector(std::vector<float>{0, 0}, {}), ElementsAre(0, 0));
  EXPECT_THAT(ShapeVector(std::vector<float>{3, 4}, {.normalise = false}), ElementsAre(3, 4));
}

TEST(Embeddings, OfManyInputsLeaveRoomInTheQueue) {
  FakeEngineOptions options;
  options.manual = true;
  options.max_queued = 64;
  TestServer test(options);
  Json inputs = Json::array();
  for (int i = 0; i < 2048; ++i) inputs.push_back(absl::StrCat(i));
  RawClient client(test.port());
  client.Send(Post(kPath, Dump({{"input", inputs}})));
  ASSERT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 64; }));
  EXPECT_NE(test.engine.log().submitted[0].call, 0u);
  test.engine.Step(100'000);
  const RawResponse response = client.Read();
  ASSERT_EQ(response.status, 200) << response.body;
  const Json body = *ParseJson(response.body);
  ASSERT_EQ(body["data"].size(), 2048u);
  EXPECT_EQ(Floats(body["data"][2047]["embedding"]), Normalised({kBos, '7', 5, 2}));
  EXPECT_EQ(body["usage"]["prompt_tokens"], 10 * 2 + 90 * 3 + 900 * 4 + 1048 * 5);
}

TEST(Embeddings, AreCancelledWhenTheClientLeaves) {
  FakeEngineOptions options;
  options.manual = true;
  TestServer test(options);
  Json inputs = Json::array();
  for (int i = 0; i < 100; ++i) inputs.push_back("x");
  {
    RawClient client(test.port());
    client.Send(Post(kPath, Dump({{"input", inputs}})));
    ASSERT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 64; }));
  }
  EXPECT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.cancelled == 64; }));
  EXPECT_EQ(test.engine.log().submitted.size(), 64u);
}

TEST(Embeddings, ThatTheEngineRefusesHalfWayAreRefused) {
  FakeEngineOptions options;
  options.manual = true;
  TestServer test(options);
  Json inputs = Json::array();
  for (int i = 0; i < 100; ++i) inputs.push_back("x");
  RawClient client(test.port());
  client.Send(Post(kPath, Dump({{"input", inputs}})));
  ASSERT_TRUE(test.engine.WaitFor([](const FakeEngine::Log& log) { return log.submitted.size() == 64; }));
  test.engine.SetRefusal(absl::ResourceExhaustedError("the queue is full"));
  test.engine.Step();
  EXPECT_EQ(client.Read().status, 503);
}

TEST(Embeddings, ALongTextIsRefusedOrCut) {
  TestServer test({}, {}, TestModel(/*max_model_len=*/8));
  EXPECT_EQ(Ask(test, R"({"input":"1234567"})")["usage"]["prompt_tokens"], 8) << "all positions may be used";
  EXPECT_THAT(
      Refused(test, R"({"input":"12345678"})"),
      HasSubstr("input | input: 9 tokens, but this model's maximum context length is 8 tokens; shorten it to at "
                "most 8"));
  EXPECT_THAT(Refused(test, R"({"input":["a","12345678"]})"), StartsWith("input.1 | "));
  const Json cut = Ask(test, R"({"input":"12345678","truncate_prompt_tokens":3})");
  EXPECT_EQ(Floats(cut["data"][0]["embedding"]), Normalised({'6', '8', 3, 2}));
  EXPECT_EQ(Ask(test, R"({"input":"12345678","truncate_prompt_tokens":-1})")["usage"]["prompt_tokens"], 8);
  EXPECT_THAT(Refused(test, R"({"input":"x","truncate_prompt_tokens":9})"), StartsWith("truncate_prompt_tokens | "));
}

TEST(Embeddings, BadInputIsNamed) {
  TestServer test;
  const std::pair<const char*, const char*> cases[] = {
      {R"({})", "input | input: is required"},
      {R"({"input":""})", "input | input: is empty"},
      {R"({"input":[]})", "input | input: is empty"},
      {R"({"input":["a",""]})", "input.1 | input.1: is empty"},
      {R"({"input":[[]]})", "input.0 | input.0: is empty"},
      {R"({"input":[1,"a"]})", "input.1 | "},
      {R"({"input":[100000]})", "input.0 | "},
      {R"({"input":{"a":1}})", "input | input: must be a string or an array of token ids"},
      {R"({"input":5})", "input | "},
      {R"({"input":"a","encoding_format":"int8"})",
       "encoding_format | encoding_format: the string \"int8\" is neither"},
      {R"({"input":"a","dimensions":0})", "dimensions | "},
      {R"({"input":"a","dimensions":5})", "dimensions | dimensions: 5 is more than the 4 values"},
      {R"({"input":"a","dimensions":"4"})", "dimensions | "},
      {R"({"input":"a","user":7})", "user | "},
      {R"({"input":"a","truncate_prompt_tokens":0})", "truncate_prompt_tokens | "},
      {R"({"input":"a","stream":true})", "stream | stream: vectors come whole"},
      {R"({"input":"a","messages":[]})", "messages | "},
      {R"({"input":"a","truncation_side":"right"})", "truncation_side | "},
      {R"({"input":"a","embed_dtype":"float16"})", "embed_dtype | "},
      {R"({"input":"a","normalize":false})", "normalize | "},
  };
  for (const auto& [body, expected] : cases) EXPECT_THAT(Refused(test, body), StartsWith(expected)) << body;
  EXPECT_THAT(Refused(test, R"({"model":"other","input":"a"})", 404), HasSubstr("other"));
  Json inputs = Json::array();
  for (int i = 0; i < 2049; ++i) inputs.push_back("x");
  EXPECT_THAT(Refused(test, Dump({{"input", inputs}})), StartsWith("input | input: 2049 prompts; at most 2048"));
  EXPECT_TRUE(test.engine.log().submitted.empty());
}

TEST(Embeddings, NumbersAreCheckedAtTheirLimits) {
  TestServer test;
  for (const char* bad : {"0", "-1", "1048577", "9223372036854775808", "1e308", "1.5", "\"1\"", "true", "[]", "{}"})
    EXPECT_THAT(Refused(test, absl::StrCat(R"({"input":"a","dimensions":)", bad, "}")), StartsWith("dimensions | "));
  for (const char* bad : {"-2", "3", "9223372036854775808", "1.5", "\"1\"", "true", "[]", "{}"})
    EXPECT_THAT(Refused(test, absl::StrCat(R"({"content":"a","embd_normalize":)", bad, "}"), 400, "/embedding"),
                StartsWith("embd_normalize | "));
  for (const char* field :
       {"dimensions", "encoding_format", "user", "truncate_prompt_tokens", "priority", "cache_salt"})
    EXPECT_EQ(test.Ask(Post(kPath, absl::StrCat(R"({"input":"a",")", field, R"(":null})"))).status, 200) << field;
}

TEST(Embeddings, AnAnswerHasABound) {
  auto model = TestModel();
  model->hidden_size = kMaxEmbeddingValues / 2;
  TestServer test({}, {}, model);
  EXPECT_THAT(Refused(test, R"({"input":["a","b","c"]})"), StartsWith("input | input: 3 vectors of 8388608 values"));
}

TEST(Embeddings, AModelWhosePoolingIsNotServedSaysSo) {
  auto model = TestModel();
  model->pooling = requests::Pooling::kNone;
  model->why_no_pooling = "this model's files ask for pooling by rank, which is not served";
  TestServer test({}, {}, model);
  EXPECT_THAT(Refused(test, R"({"input":"a"})"), HasSubstr("pooling by rank"));
}

TEST(Embeddings, InLlamaServersFormAreAListOfLists) {
  TestServer test;
  for (const char* path : {"/embedding", "/embeddings"}) {
    const Json body = Ask(test, R"({"content":"a"})", path);
    ASSERT_EQ(body.size(), 1u);
    EXPECT_EQ(body[0]["index"], 0);
    EXPECT_EQ(Floats(body[0]["embedding"][0]), Normalised({kBos, 'a', 2, 2}));
    const Json plain = Ask(test, R"({"input":["a","b"],"embd_normalize":-1})", path);
    EXPECT_EQ(Floats(plain[1]["embedding"][0]), (std::vector<float>{kBos, 'b', 2, 2}));
    EXPECT_THAT(Refused(test, R"({"content":"a","embd_normalize":1})", 400, path), StartsWith("embd_normalize | "));
    EXPECT_THAT(Refused(test, R"({"content":"a","input":"b"})", 400, path), StartsWith("content | "));
    EXPECT_THAT(Refused(test, R"({})", 400, path), StartsWith("content | content: is required"));
  }
}

}  // namespace
}  // namespace dovetail::server::test
