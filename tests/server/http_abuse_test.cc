// Requests that no honest client sends, over real sockets. Each gets a precise answer or is cut off; the server goes
// on.
#include <gmock/gmock.h>

#include <thread>

#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

HttpServerOptions Impatient() {
  HttpServerOptions options;
  options.header_timeout = options.body_grace = milliseconds(100);
  options.idle_timeout = milliseconds(150);
  options.write_stall_timeout = milliseconds(300);
  options.linger_timeout = milliseconds(100);
  return options;
}

// Malformed or ambiguous: 400, the error envelope, and the connection is closed.
TEST(Http, AmbiguousRequestsAreRefusedAndTheConnectionIsClosed) {
  const std::string body = R"({"model":"bytes","prompt":"x"})";
  const std::string host = "Host: t\r\n";
  const std::string post = "POST /v1/completions HTTP/1.1\r\n" + host;
  const std::string get = "GET /live HTTP/1.1\r\n";
  const std::vector<std::string> cases = {
      post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
      post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
      post + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
      post + "Content-Length: 5, 5\r\n\r\nhello",
      post + "Content-Length: +5\r\n\r\nhello",
      post + "Content-Length: -1\r\n\r\n",
      post + "Content-Length: 0x5\r\n\r\nhello",
      post + "Content-Length: 5 5\r\n\r\nhello",
      post + "Content-Length: \r\n\r\n",
      post + "Content-Length: 99999999999999999999\r\n\r\n",
      post + "Content-Length : 5\r\n\r\nhello",
      post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
      post + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      post + "Transfer-Encoding: identity\r\n\r\n",
      post + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
      "POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n+1\r\nx\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n 1\r\nx\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n1\r\nx\n0\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX Trailer: 1\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\n: 1\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\r\n folded\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\nY: 2\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\rY: 2\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nX: a\x01z\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n0\r\nGET /live HTTP/1.1\r\n\r\n",
      post + "Transfer-Encoding: chunked\r\n\r\n1;" + std::string(300, 'a') + "\r\nx\r\n0\r\n\r\n",
      get + "Host: t\r\nX: a\r\n folded\r\n\r\n",
      get + "Host: t\r\nX: a\r\n\tfolded\r\n\r\n",
      get + " Host: t\r\n\r\n",
      "GET /live HTTP/1.1\nHost: t\n\n",
      get + "Host: t\nX: 1\r\n\r\n",
      get + "Host: t\r\nX: a\rb\r\n\r\n",
      get + "Host: t\r\nX\r\n\r\n",
      get + "Host: t\r\n: x\r\n\r\n",
      get + "Host: t\r\nX Y: 1\r\n\r\n",
      get + std::string("Host: t\r\nX: a\0b\r\n\r\n", 18),
      get + "\r\n",  // no Host
      get + "Host: t\r\nHost: u\r\n\r\n",
      get + "Host: a b\r\n\r\n",
      "GET  /live HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET /live  HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET /live\r\nHost: t\r\n\r\n",
      "GET /live HTTP/1.1 \r\nHost: t\r\n\r\n",
      "GET /live HTTP/x.y\r\nHost: t\r\n\r\n",
      "GET live HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET * HTTP/1.1\r\nHost: t\r\n\r\n",
      "OPTIONS ** HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET http://evil/live HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET http:///live HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET ftp://t/live HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET /li\x80ve HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET /li%zzve HTTP/1.1\r\nHost: t\r\n\r\n",
      "GET /li%00ve HTTP/1.1\r\nHost: t\r\n\r\n",
      "G@T /live HTTP/1.1\r\nHost: t\r\n\r\n",
      "\r\n\r\nGET /live HTTP/1.1\r\nHost: t\r\n\r\n",
      post + "Content-Type: application/json\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
      get + "Host: t\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
  };
  TestServer test({}, Impatient());
  for (const std::string& request : cases) {
    const RawResponse response = test.Ask(request);
    const int expected = request.substr(0, 3) == "PRI" ? 505 : 400;
    EXPECT_EQ(response.status, expected) << request;
    EXPECT_TRUE(response.closed) << request;
    const auto json = ParseJson(response.body);
    ASSERT_TRUE(json.ok()) << request;
    for (const char* key : {"message", "type", "param", "code"}) EXPECT_TRUE((*json)["error"].contains(key)) << request;
    EXPECT_EQ(response.headers.count("x-request-id"), 1u);
  }
  EXPECT_GE(cases.size(), 40u);
  EXPECT_EQ(test.Ask(Get("/live")).status, 200);
  EXPECT_EQ(test.engine.log().submitted.size(), 0u);
}

TEST(Http, SizesBeyondTheLimitsAreRefused) {
  TestServer test({}, Impatient());
  const auto status = [&](const std::string& request) { return test.Ask(request).status; };
  EXPECT_EQ(status("GET /" + std::string(8200, 'a') + " HTTP/1.1\r\nHost: t\r\n\r\n"), 414);
  EXPECT_EQ(status(Get("/live", "X: " + std::string(8200, 'a') + "\r\n")), 431);
  std::string headers;
  for (int i = 0; i < 100; ++i) absl::StrAppend(&headers, "X", i, ": 1\r\n");
  EXPECT_EQ(status(Get("/live", headers)), 431);
  headers.clear();
  for (int i = 0; i < 3; ++i) absl::StrAppend(&headers, "X", i, ": ", std::string(6000, 'a'), "\r\n");
  EXPECT_EQ(status(Get("/live", headers)), 431);
  EXPECT_EQ(status("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 4194305\r\n\r\n"), 413);
  EXPECT_EQ(status("POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n400001\r\n"), 413);
  EXPECT_EQ(status("POST /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n"), 411);
  EXPECT_EQ(status(Get("/live", "Expect: something\r\n")), 417);
  const std::string chunked = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n";
  headers.clear();
  for (int i = 0; i < 101; ++i) absl::StrAppend(&headers, "X", i, ": 1\r\n");
  EXPECT_EQ(status(chunked + headers), 431);
  EXPECT_EQ(status(absl::StrCat(chunked, "X: ", std::string(8200, 'a'))), 431);
  EXPECT_EQ(status(absl::StrCat(chunked, std::string(8200, 'a'))), 431);
  headers.clear();
  for (int i = 0; i < 3; ++i) absl::StrAppend(&headers, "X", i, ": ", std::string(6000, 'a'), "\r\n");
  EXPECT_EQ(status(chunked + headers), 431);
}

TEST(Http, ATooLargeBodyStillGetsToReadItsAnswer) {
  TestServer test;
  RawClient client(test.port());
  client.Send(
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 5000000\r\n\r\n");
  client.Send(std::string(3'000'000, ' '));
  EXPECT_EQ(client.Read().status, 413);
}

TEST(Http, ABodyJustWithinTheLimitIsRead) {
  TestServer test;
  const std::string head = R"({"model":"bytes","prompt":"x","user":null)";
  std::string body = head + std::string((4 << 20) - head.size() - 1, ' ') + "}";
  EXPECT_EQ(test.Ask(Post("/v1/completions", body)).status, 200);
}

TEST(Http, ChunkedBodiesAreReadWhereverTheyAreCut) {
  TestServer test;
  const std::string body = R"({"model":"bytes","prompt":"x","max_tokens":1})";
  std::string request = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (const char c : body) absl::StrAppend(&request, "1;ext=1\r\n", std::string(1, c), "\r\n");
  request += "0\r\n\r\n";
  RawClient client(test.port());
  for (size_t at = 0; at < request.size(); at += 3) client.Send(std::string_view(request).substr(at, 3));
  EXPECT_EQ(client.Read().status, 200);
}

TEST(Http, ExpectContinueIsAnswered) {
  TestServer test;
  RawClient client(test.port());
  const std::string body = R"({"model":"bytes","prompt":"x"})";
  client.Send(absl::StrCat(
      "POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: ", body.size(), "\r\n\r\n"));
  EXPECT_EQ(client.Read().status, 100);
  client.Send(body);
  EXPECT_EQ(client.Read().status, 200);
}

TEST(Http, AnExpectationOfAnOldClientIsIgnored) {
  TestServer test;
  RawClient client(test.port());
  const std::string body = R"({"model":"bytes","prompt":"x"})";
  client.Send(absl::StrCat("POST /v1/completions HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: ", body.size(),
                           "\r\n\r\n", body.substr(0, 5)));
  std::this_thread::sleep_for(milliseconds(20));  // a 100 would have come here
  client.Send(body.substr(5));
  EXPECT_EQ(client.Read().status, 200);
}

TEST(Http, TrailersAreReadAndIgnored) {
  TestServer test;
  const std::string body = R"({"model":"bytes","prompt":"x","max_tokens":1})";
  const std::string request =
      absl::StrCat("POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n",
                   absl::Hex(body.size()), "\r\n", body,
                   "\r\n0\r\nX-Sum: 1\r\nContent-Length: 5\r\nTransfer-Encoding: gzip\r\nHost: u\r\nEmpty:\r\n\r\n");
  RawClient whole(test.port());
  whole.Send(request + Get("/live"));
  EXPECT_EQ(whole.Read().status, 200);
  EXPECT_EQ(whole.Read().body, R"({"status":"alive"})");  // and nothing of them was taken for a request
  RawClient cut(test.port());
  for (const char c : request) cut.Send(std::string_view(&c, 1));
  EXPECT_EQ(cut.Read().status, 200);
}

TEST(Http, OptionsOfTheServerAsAWholeAreAnswered) {
  HttpServerOptions options;
  options.api_keys = {"key"};
  TestServer test({}, options);
  for (const std::string target : {"*", "http://t", "*"}) {
    const RawResponse response = test.Ask("OPTIONS " + target + " HTTP/1.1\r\nHost: t\r\n\r\n");
    EXPECT_EQ(response.status, 200) << target;
    EXPECT_EQ(response.headers.at("allow"), "GET, HEAD, POST, OPTIONS");
    EXPECT_EQ(response.headers.at("content-length"), "0");
    EXPECT_EQ(response.headers.at("connection"), "keep-alive");
  }
  EXPECT_EQ(test.Ask("OPTIONS / HTTP/1.1\r\nHost: t\r\n\r\n").status, 401);
}

TEST(Http, RequestsOnOneConnectionAreAnsweredInOrder) {
  TestServer test;
  RawClient client(test.port());
  client.Send(Get("/live") + Post("/v1/completions", R"({"model":"bytes","prompt":"x"})") + Get("/version") +
              Get("/nothing"));
  EXPECT_EQ(client.Read().body, R"({"status":"alive"})");
  EXPECT_THAT(client.Read().body, HasSubstr("text_completion"));
  EXPECT_THAT(client.Read().body, HasSubstr("version"));
  EXPECT_EQ(client.Read().status, 404);
}

TEST(Http, PipelinedInputBeyondTheBoundWaitsUntilTheStreamEnded) {
  TestServer test({.step_interval = absl::Microseconds(200)});
  RawClient client(test.port());
  client.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":500,"stream":true})"));
  ASSERT_TRUE(client.ReadUntil("data: "));
  constexpr int kPipelined = 3000;  // 100 KB
  std::string requests;
  for (int i = 0; i < kPipelined; ++i) requests += Get("/live");
  ASSERT_GT(requests.size(), 90'000u);
  ASSERT_TRUE(client.Send(requests));
  EXPECT_EQ(SseData(client.Read().body).back(), "[DONE]");
  for (int i = 0; i < kPipelined; ++i) ASSERT_EQ(client.Read().status, 200) << i;
}

TEST(Http, AnEmptyLineBeforeARequestIsIgnored) {
  TestServer test;
  RawClient client(test.port());
  for (const std::string line : {"\r\n", ""}) {
    client.Send(line + Get("/live"));
    EXPECT_EQ(client.Read().status, 200);
  }
  client.Send("\r");
  client.Send("\n" + Get("/live"));
  EXPECT_EQ(client.Read().status, 200);
}

TEST(Http, TargetsInAbsoluteFormAreServed) {
  TestServer test;
  for (const std::string target : {"http://t/live", "HTTPS://T/live?x=1"})
    EXPECT_EQ(test.Ask("GET " + target + " HTTP/1.1\r\nHost: t\r\n\r\n").status, 200) << target;
  const std::string page = test.Ask(Get("/")).body;
  for (const std::string target : {"http://t", "http://t?x=/live"})
    EXPECT_EQ(test.Ask("GET " + target + " HTTP/1.1\r\nHost: t\r\n\r\n").body, page) << target;
  EXPECT_EQ(test.Ask("GET http://t/dead HTTP/1.1\r\nHost: t\r\n\r\n").status, 404);
}

TEST(Http, CodedBodiesAreRefusedByName) {
  TestServer test;
  const std::string body = R"({"model":"bytes","prompt":"x"})";
  const RawResponse response = test.Ask(Post("/v1/completions", body, "Content-Encoding: gzip\r\n"));
  EXPECT_EQ(response.status, 415);
  EXPECT_THAT(response.body, HasSubstr("gzip"));
  EXPECT_EQ(response.headers.at("accept-encoding"), "identity");
  EXPECT_EQ(test.Ask(Post("/v1/completions", body, "Content-Encoding: \x80\r\n")).status, 415);
  EXPECT_EQ(test.Ask(Post("/v1/completions", body, "Content-Encoding: Identity\r\n")).status, 200);
  EXPECT_EQ(test.Ask(Post("/v1/completions", body, "Content-Encoding: identity\r\nContent-Encoding: \r\n")).status,
            200);
  const RawResponse second =
      test.Ask(Post("/v1/completions", body, "Content-Encoding: identity\r\nContent-Encoding: br\r\n"));
  EXPECT_EQ(second.status, 415);
  EXPECT_THAT(second.body, HasSubstr("br is not supported"));
}

TEST(Http, AnOldClientGetsAnUnchunkedStreamThatEndsWithTheConnection) {
  TestServer test;
  const std::string body = R"({"model":"bytes","prompt":"x","stream":true})";
  const RawResponse response =
      test.Ask(absl::StrCat("POST /v1/completions HTTP/1.0\r\nContent-Length: ", body.size(), "\r\n\r\n", body));
  EXPECT_EQ(response.headers.count("transfer-encoding"), 0u);
  EXPECT_EQ(SseData(response.body).back(), "[DONE]");
}

TEST(Http, RequestIdsAreEchoedIfHarmlessElseMade) {
  TestServer test;
  EXPECT_EQ(test.Ask(Get("/live", "X-Request-Id: abc-1.2_3:4\r\n")).headers.at("x-request-id"), "abc-1.2_3:4");
  const std::string made = test.Ask(Get("/live", "X-Request-Id: <script>\r\n")).headers.at("x-request-id");
  EXPECT_EQ(made.size(), 32u);
  EXPECT_NE(made, test.Ask(Get("/live")).headers.at("x-request-id"));
  EXPECT_EQ(test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"x"})", "X-Request-Id: mine\r\n"))["id"],
            "cmpl-mine");
}

TEST(Http, WrongMethodsPathsAndTypesAreNamed) {
  TestServer test;
  RawResponse response = test.Ask(Get("/v1/completions"));
  EXPECT_EQ(response.status, 405);
  EXPECT_EQ(response.headers.at("allow"), "POST");
  EXPECT_EQ(test.Ask(Post("/v1/models", "{}")).status, 405);
  EXPECT_EQ(test.Ask(Get("/v1/other")).status, 404);
  EXPECT_EQ(
      test.Ask("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}")
          .status,
      415);
  EXPECT_EQ(test.AskJson(Post("/v1/completions", R"({"model":"gpt-x","prompt":"x"})"), 404)["error"]["code"],
            "model_not_found");
  EXPECT_EQ(test.AskJson(Get("/v1/models/gpt-x"), 404)["error"]["param"], "model");
  EXPECT_EQ(test.AskJson(Post("/v1/completions", "{"), 400)["error"]["type"], "invalid_request_error");
  EXPECT_EQ(test.AskJson(Post("/v1/completions", R"({"model":"bytes","prompt":"x","n":9})"), 400)["error"]["param"],
            "n");
  RawClient head(test.port());
  head.Send("HEAD /live HTTP/1.1\r\nHost: t\r\n\r\n");
  EXPECT_EQ(head.Read(/*head_only=*/true).status, 200);
}

TEST(Http, ASlowHeadIsCutOffAndOthersGoOn) {
  TestServer test({.step_interval = absl::Milliseconds(1)}, Impatient());
  std::vector<RawClient> slow;
  for (int i = 0; i < 200; ++i) slow.emplace_back(test.port()).Send("GET /live HTTP/1.1\r\nX: ");
  EXPECT_EQ(test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":50})")).status, 200);
  for (RawClient& client : slow) EXPECT_EQ(client.Read().status, 408);
}

TEST(Http, ASlowBodyIsCutOff) {
  TestServer test({}, Impatient());
  const RawResponse response = test.Ask("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100000\r\n\r\n{");
  EXPECT_EQ(response.status, 408);
  EXPECT_TRUE(response.closed);
}

TEST(Http, SilentAndIdleConnectionsAreClosed) {
  TestServer test({}, Impatient());
  RawClient silent(test.port());
  EXPECT_TRUE(silent.WaitForClose());
  RawClient idle(test.port());
  idle.Send(Get("/live"));
  EXPECT_EQ(idle.Read().status, 200);
  EXPECT_TRUE(idle.WaitForClose());
}

// ---- clients that leave or do not read ----

const char* const kLongStream = R"({"model":"bytes","prompt":"x","max_tokens":4000,"stream":true})";

TEST(Http, ADisconnectCancels) {
  for (const char* how : {"close", "reset", "half-close"}) {
    TestServer test({.manual = true});
    RawClient client(test.port());
    client.Send(Post("/v1/completions", kLongStream));
    test.engine.Step(5);
    ASSERT_TRUE(client.ReadUntil("data: "));
    if (how[0] == 'c') client.Close();
    if (how[0] == 'r') client.Reset();
    if (how[0] == 'h') client.HalfClose();
    EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.cancelled == 1 && log.live == 0; })) << how;
  }
}

// It said that the request is its last, so that the end of its input is no sign that it has left.
TEST(Http, AHalfClosedClientIsAnsweredIfItSaidThatItsRequestIsItsLast) {
  for (const std::string version :
       {"HTTP/1.0\r\n", "HTTP/1.1\r\nHost: t\r\nConnection: close\r\n", "HTTP/1.0\r\nConnection: keep-alive\r\n"}) {
    for (const char* stream : {"true", "false"}) {
      TestServer test({.manual = true});
      RawClient client(test.port());
      const std::string body = absl::StrCat(R"({"model":"bytes","prompt":"x","max_tokens":20,"stream":)", stream, "}");
      client.Send(absl::StrCat("POST /v1/completions ", version, "Content-Length: ", body.size(), "\r\n\r\n", body));
      client.HalfClose();
      ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
      std::this_thread::sleep_for(milliseconds(50));  // the end of its input is seen before the first token
      test.engine.Step(21);
      const RawResponse response = client.Read();
      EXPECT_EQ(response.status, 200) << version << stream;
      EXPECT_THAT(response.body, HasSubstr(stream[0] == 't' ? "[DONE]" : "completion_tokens\":20"));
      EXPECT_TRUE(client.WaitForClose());
      EXPECT_EQ(test.engine.log().cancelled, 0) << version << stream;
    }
  }
}

TEST(Http, AClientThatLeavesAfterItsLastRequestIsNoticedWhenItIsWrittenTo) {
  TestServer test({.manual = true});
  RawClient client(test.port());
  client.Send(Post("/v1/completions", kLongStream, "Connection: close\r\n"));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  client.Close();
  for (int token = 0; token < 3000 && test.engine.log().cancelled == 0; ++token) {
    test.engine.Step();
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(test.engine.log().cancelled, 1);
}

TEST(Http, AHalfClosedClientThatResetsIsNoticedBeforeItIsWrittenTo) {
  TestServer test({.manual = true});
  RawClient client(test.port());
  client.Send(Post("/v1/completions", kLongStream, "Connection: close\r\n"));
  client.HalfClose();
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 1; }));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(test.engine.log().cancelled, 0);
  client.Reset();
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.cancelled == 1; }));
}

TEST(Http, ARequestBehindOthersOfAClientThatLeftIsNotRun) {
  HttpServerOptions options;
  options.socket_send_buffer_bytes = 4096;
  TestServer test({.manual = true}, options);
  RawClient client(test.port(), /*receive_buffer_bytes=*/4096);
  client.Send(Get("/metrics") + Post("/v1/completions", kLongStream));
  client.HalfClose();
  std::this_thread::sleep_for(milliseconds(50));  // its end is seen while the first answer is written
  EXPECT_EQ(client.Read().status, 200);
  EXPECT_TRUE(client.WaitForClose());
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 0; }));
}

TEST(Http, WhatAHalfClosedClientSentBeforeIsAnswered) {
  TestServer test;
  RawClient client(test.port());
  client.Send(Get("/live") + Get("/nothing") + Get("/version"));
  client.HalfClose();
  EXPECT_EQ(client.Read().status, 200);
  EXPECT_EQ(client.Read().status, 404);
  EXPECT_THAT(client.Read().body, HasSubstr("version"));
  EXPECT_TRUE(client.WaitForClose());
  RawClient unfinished(test.port());
  unfinished.Send(Get("/live", "Connection: close\r\n").substr(0, 30));
  unfinished.HalfClose();
  EXPECT_TRUE(unfinished.WaitForClose());
}

TEST(Http, ADisconnectBeforeTheFirstTokenCancels) {
  for (const char* stream : {"true", "false"}) {
    TestServer test({.manual = true});
    RawClient client(test.port());
    client.Send(Post("/v1/completions", absl::StrCat(R"({"model":"bytes","prompt":["x","y"],"stream":)", stream, "}")));
    ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.submitted.size() == 2; }));
    client.Close();
    EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.cancelled == 2 && log.live == 0; }));
  }
}

TEST(Http, OneClientsDisconnectLeavesOthersAlone) {
  TestServer test({.step_interval = absl::Microseconds(200)});
  RawClient leaving(test.port());
  leaving.Send(Post("/v1/completions", kLongStream));
  RawClient staying(test.port());
  staying.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":200,"temperature":0})"));
  ASSERT_TRUE(leaving.ReadUntil("data: "));
  leaving.Reset();
  const auto json = ParseJson(staying.Read().body);
  EXPECT_EQ((*json)["usage"]["completion_tokens"], 200);
}

TEST(Http, ASlowReaderPausesTheEngineAndReadingOnResumesIt) {
  HttpServerOptions options;
  options.socket_send_buffer_bytes = 4096;
  TestServer test({.step_interval = absl::Microseconds(20)}, options);
  RawClient client(test.port(), /*receive_buffer_bytes=*/4096);
  client.Send(Post("/v1/completions", kLongStream));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.paused >= 1; }));
  EXPECT_LT(test.engine.log().tokens, 3000u);  // it was stopped long before the end
  const RawResponse response = client.Read();
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(SseData(response.body).back(), "[DONE]");
  EXPECT_EQ(SseData(response.body).size(), 4001u);
  EXPECT_GE(test.engine.log().resumed, 1);
  EXPECT_EQ(test.engine.log().cancelled, 0);
}

TEST(Http, AReaderThatStopsIsCancelledAndOthersGoOn) {
  HttpServerOptions options;  // patient with the request, which may come slowly where the machine is busy
  options.write_stall_timeout = milliseconds(300);
  options.socket_send_buffer_bytes = 4096;
  TestServer test({.step_interval = absl::Microseconds(20)}, options);
  RawClient stopped(test.port(), /*receive_buffer_bytes=*/4096);
  stopped.Send(Post("/v1/completions", kLongStream));
  ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.paused >= 1; }));
  EXPECT_EQ(test.Ask(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":500})")).status, 200);
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.cancelled == 1 && log.live == 0; }));
}

TEST(Http, TwoHundredDisconnectsLeaveNothingBehind) {
  TestServer test({.manual = true});
  {
    std::vector<RawClient> clients;
    for (int i = 0; i < 200; ++i) clients.emplace_back(test.port()).Send(Post("/v1/completions", kLongStream));
    ASSERT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 200; }));
    test.engine.Step();
    for (RawClient& client : clients) ASSERT_TRUE(client.ReadUntil("data: "));
  }
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 0 && log.cancelled == 200; }));
  EXPECT_EQ(test.Ask(Get("/live")).status, 200);
}

}  // namespace
}  // namespace dovetail::server::test
