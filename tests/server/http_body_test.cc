// What the bodies of all clients may hold together, and for how long.
#include <gmock/gmock.h>
#include <poll.h>

#include <thread>

#include "server/http/body_decoder.h"
#include "server/http/body_pace.h"
#include "server/http/listener.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;
constexpr seconds kPatience{30};

// A completion of one token whose JSON has `bytes` bytes.
std::string Padded(size_t bytes) {
  const std::string head = R"({"model":"bytes","prompt":"x","max_tokens":1)";
  return head + std::string(bytes - head.size() - 1, ' ') + "}";
}

std::string PostHead(const std::string& framing) {
  return "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n" + framing + "\r\n\r\n";
}
std::string LengthHead(size_t bytes) { return PostHead(absl::StrCat("Content-Length: ", bytes)); }

double Metric(const TestServer& test, const std::string& line) {
  const std::string text = test.Ask(Get("/metrics")).body;
  const size_t at = text.find("\n" + line);
  return at == std::string::npos ? -1 : std::stod(text.substr(text.find(' ', at) + 1));
}
double Held(const TestServer& test) { return Metric(test, "dovetail:http_body_bytes{"); }
double Refused(const TestServer& test, const std::string& reason) {
  return Metric(test, R"(dovetail:http_bodies_refused_total{model_name="bytes",reason=")" + reason + "\"}");
}
template <typename Holds>
bool Within(Holds holds) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

TEST(BodyBudget, CountsWhatBuffersReserveAndNeverMoreThanTheLimitOfABody) {
  const auto budget = std::make_shared<BodyBudget>(10'000);
  {
    RequestBody body(budget);
    for (int i = 0; i < 80; ++i) {
      ASSERT_TRUE(body.Append(std::string(100, 'a' + i % 26), 8000));
      EXPECT_GE(budget->held(), body.bytes().size());
      EXPECT_LE(budget->held(), std::min<size_t>(body.bytes().size() * 3 / 2 + 100, 8000));
      EXPECT_LE(body.bytes().capacity(), budget->held());
    }
    EXPECT_EQ(body.bytes()[0], 'a');
    EXPECT_EQ(body.bytes()[7999], 'a' + 79 % 26);
    RequestBody second(budget);
    EXPECT_TRUE(second.Append(std::string(2000, 'x'), 8000));
    EXPECT_FALSE(second.Append("y", 8000));  // 10,000 are held
    EXPECT_EQ(second.bytes(), std::string(2000, 'x'));
    RequestBody moved = std::move(second);
    EXPECT_EQ(budget->held(), 10'000u);
    moved.Free();
    EXPECT_EQ(moved.bytes().capacity(), std::string().capacity());
    EXPECT_EQ(budget->held(), 8000u);
    moved = std::move(body);
    EXPECT_EQ(budget->held(), 8000u);
  }
  EXPECT_EQ(budget->held(), 0u);
}

TEST(BodyPace, GivesEachByteItsTimeAndSavesUpNoMoreThanTheGrace) {
  const BodyPace::Time begin{};
  BodyPace pace(begin, seconds(10), 100);
  EXPECT_EQ(pace.deadline(), begin + seconds(10));
  pace.Received(50, begin + seconds(1));
  EXPECT_EQ(pace.deadline(), begin + milliseconds(10'500));
  pace.Received(1'000'000, begin + seconds(2));  // worth hours
  EXPECT_EQ(pace.deadline(), begin + seconds(12));
  for (int i = 3; i < 100; ++i) pace.Received(100, begin + seconds(i));  // at the rate: it may go on
  EXPECT_EQ(pace.deadline(), begin + seconds(12 + 97));
  for (int i = 100; i < 200; ++i) pace.Received(50, begin + seconds(i));  // at half of it
  EXPECT_EQ(pace.deadline(), begin + seconds(109 + 50));
}

TEST(BodyDecoder, CountsThePayloadWithoutItsFraming) {
  RequestHead head;
  head.chunked = true;
  BodyDecoder body(head, {.max_bytes = 100});
  body.Consume(absl::StrCat("2;", std::string(200, 'e'), "\r\nab\r\n1\r\nc\r\n"));
  EXPECT_EQ(body.payload(), 3u);
  BodyDecoder dropped(head, {.max_bytes = 100}, BodyDecoder::Use::kDrop);
  dropped.Consume("2\r\nab\r\n0\r\n\r\n");
  EXPECT_TRUE(dropped.done());
  EXPECT_EQ(dropped.body().bytes(), "");
  EXPECT_EQ(dropped.payload(), 2u);
}

HttpServerOptions WithRoomFor(size_t unfinished) {
  HttpServerOptions options;
  options.max_body_bytes = kMiB;
  options.max_unfinished_body_bytes = unfinished;
  return options;
}

TEST(Bodies, OneThatFindsTheirMemoryTakenGetsA503AsSoonAsItsLengthIsKnown) {
  TestServer test({}, WithRoomFor(kMiB));
  RawClient first(test.port());
  first.Send(LengthHead(kMiB));
  first.Send(std::string(600'000, ' '));
  ASSERT_TRUE(Within([&] { return Held(test) >= 600'000; }));
  EXPECT_LE(Held(test), static_cast<double>(kMiB));
  // Before a byte of its body, and in place of 100 Continue.
  const RawResponse refused = test.Ask(PostHead("Expect: 100-continue\r\nContent-Length: 1000000"));
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.at("retry-after"), "1");
  EXPECT_THAT(refused.body, HasSubstr("try again"));
  // Of unknown length: when there is no room for it.
  RawClient chunked(test.port());
  chunked.Send(PostHead("Transfer-Encoding: chunked") + "f0000\r\n" + std::string(0xf0000, ' '));
  const RawResponse late = chunked.Read();
  EXPECT_EQ(late.status, 503);
  EXPECT_EQ(late.headers.at("retry-after"), "1");
  EXPECT_EQ(Refused(test, "no_room"), 2);
  // One that fits is read, and so is one that took its place before.
  EXPECT_EQ(test.Ask(Post("/v1/completions", Padded(100'000))).status, 200);
  first.Reset();
  ASSERT_TRUE(Within([&] { return Held(test) == 0; }));
  EXPECT_EQ(test.Ask(Post("/v1/completions", Padded(1'000'000))).status, 200);
  EXPECT_TRUE(Within([&] { return Held(test) == 0; }));
}

TEST(Bodies, ThatAreAnnouncedAndNotSentTakeNothing) {
  TestServer test({}, WithRoomFor(kMiB));
  std::vector<RawClient> idle;
  for (int i = 0; i < 50; ++i) idle.emplace_back(test.port()).Send(LengthHead(kMiB));
  for (int i = 0; i < 50; ++i)
    idle.emplace_back(test.port()).Send(PostHead("Transfer-Encoding: chunked") + "100000\r\n");
  EXPECT_EQ(test.Ask(Post("/v1/completions", Padded(kMiB))).status, 200);
  EXPECT_EQ(Refused(test, "no_room"), 0);
}

TEST(Bodies, BeyondTheLimitOfOneGetA413WhateverRoomThereIs) {
  TestServer test({}, WithRoomFor(kMiB));
  EXPECT_EQ(test.Ask(LengthHead(kMiB + 1)).status, 413);
  EXPECT_EQ(test.Ask(PostHead("Transfer-Encoding: chunked") + "100001\r\n").status, 413);
  EXPECT_EQ(Refused(test, "too_large"), 2);
  EXPECT_EQ(Refused(test, "no_room"), 0);
}

TEST(Bodies, ThatFillTheirMemoryAndStallMakeRoomInTime) {
  HttpServerOptions options = WithRoomFor(kMiB);
  options.body_grace = milliseconds(300);
  options.min_body_bytes_per_s = 100;  // what was sent would be worth hours
  TestServer test({}, options);
  std::vector<RawClient> slow;
  for (int i = 0; i < 4; ++i) {
    slow.emplace_back(test.port()).Send(LengthHead(kMiB / 4));
    slow.back().Send(std::string(kMiB / 4 - 1, ' '));
  }
  EXPECT_TRUE(Within([&] { return test.Ask(Post("/v1/completions", Padded(kMiB))).status == 200; }));
  for (RawClient& client : slow) EXPECT_EQ(client.Read().status, 408);
  EXPECT_EQ(Refused(test, "too_slow"), 4);
}

TEST(Bodies, MakeNoProgressByTheFramingOfTheirChunks) {
  HttpServerOptions options;
  options.body_grace = milliseconds(300);
  options.min_body_bytes_per_s = 2000;
  TestServer test({}, options);
  RawClient client(test.port());
  client.Send(PostHead("Transfer-Encoding: chunked"));
  pollfd answer{client.fd(), POLLIN, 0};
  const std::string chunk = absl::StrCat("1;", std::string(250, 'e'), "\r\n \r\n");
  const auto end = std::chrono::steady_clock::now() + kPatience;
  // At least 2,000 bytes a second where this machine lets us, of which one in 258 is payload.
  while (poll(&answer, 1, 10) == 0 && std::chrono::steady_clock::now() < end) client.Send(chunk);
  EXPECT_LT(std::chrono::steady_clock::now(), end) << "it was let go on";
  EXPECT_EQ(client.Read().status, 408);
}

TEST(Bodies, AreNoLongerHeldWhileTheirRequestRuns) {
  TestServer test({.manual = true});
  RawClient client(test.port());
  client.Send(Post("/v1/completions", Padded(kMiB)));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  EXPECT_TRUE(Within([&] { return Held(test) == 0; }));
  test.engine.Step(2);
  EXPECT_EQ(client.Read().status, 200);
}

TEST(Bodies, OfRefusedRequestsAreReadAndNotHeld) {
  HttpServerOptions options = WithRoomFor(kMiB);
  options.api_keys = {"key"};
  TestServer test({}, options);
  RawClient client(test.port());
  client.Send(LengthHead(60'000));
  client.Send(std::string(59'999, ' '));
  const std::string with_key = "X-Api-Key: key\r\n";
  for (int i = 0; i < 20; ++i)
    EXPECT_THAT(test.Ask(Get("/metrics", with_key)).body,
                HasSubstr("dovetail:http_body_bytes{model_name=\"bytes\"} 0"));
  client.Send(" ");
  const RawResponse response = client.Read();
  EXPECT_EQ(response.status, 401);
  EXPECT_EQ(response.headers.at("connection"), "keep-alive");
}

// Keeps requests, as the queue before the parsing threads does.
class KeepingHandler : public HttpHandler {
 public:
  std::vector<std::pair<std::string, std::string>> CommonHeaders(const RequestHead&) override { return {}; }
  std::optional<HttpResponse> OnHead(const RequestHead&, const std::string&) override { return std::nullopt; }
  void OnRequest(std::shared_ptr<Exchange> exchange) override {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(exchange));
  }
  bool IsProbe(const RequestHead&) const override { return false; }
  HttpResponse ProtocolError(int status, const std::string&, std::string_view, const std::string&) override {
    return {.status = status};
  }
  std::vector<std::shared_ptr<Exchange>> kept() {
    std::lock_guard lock(mutex_);
    return kept_;
  }
  void Forget() {
    std::lock_guard lock(mutex_);
    kept_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Exchange>> kept_;
};

TEST(Bodies, CountUntilTheyAreParsedEvenWhenTheirClientHasLeft) {
  HttpServerOptions options = WithRoomFor(kMiB);
  options.port = 0;
  KeepingHandler handler;
  Listener listener(options, handler);
  ASSERT_TRUE(listener.Start().ok());
  RawClient client(listener.port()), second(listener.port());
  client.Send(Post("/", std::string(700'000, ' ')));
  ASSERT_TRUE(Within([&] { return handler.kept().size() == 1; }));
  EXPECT_GE(listener.stats().body_bytes, 700'000u);
  second.Send(Post("/", std::string(700'000, ' ')));
  EXPECT_EQ(second.Read().status, 503);
  client.Reset();
  ASSERT_TRUE(Within([&] { return listener.connections() == 0; }));
  EXPECT_GE(listener.stats().body_bytes, 700'000u);
  handler.Forget();
  EXPECT_TRUE(Within([&] { return listener.stats().body_bytes == 0; }));
}

}  // namespace
}  // namespace dovetail::server::test
