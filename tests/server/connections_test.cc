// How many connections there may be, which is closed when all are taken, and that probes are answered even then.
#include <gmock/gmock.h>

#include <thread>

#include "server/http/log_gate.h"
#include "server/http/places.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

Connection* C(intptr_t number) { return reinterpret_cast<Connection*>(number * 64); }  // a name
const Places::Time kBegin{};

TEST(Places, AreGivenUntilTheLimitAndThenAFewAreLetInWithout) {
  Places places(2);
  EXPECT_TRUE(places.Add(C(1), kBegin).placed);
  EXPECT_TRUE(places.Add(C(2), kBegin).placed);
  for (int i = 0; i < kProbeConnections; ++i) {
    const Places::Admission admission = places.Add(C(3 + i), kBegin);
    EXPECT_FALSE(admission.placed);
    EXPECT_EQ(admission.end, nullptr);
  }
  // The oldest of these ends for a new one, and no more at once than there are descriptors for.
  for (int i = 0; i < kEndingConnections; ++i) {
    EXPECT_FALSE(places.Full());
    EXPECT_EQ(places.Add(C(100 + i), kBegin).end, C(3 + i));
  }
  EXPECT_TRUE(places.Full());
  places.Remove(C(3));
  EXPECT_FALSE(places.Full());
  places.Remove(C(1));
  EXPECT_TRUE(places.Add(C(200), kBegin).placed);
  EXPECT_EQ(places.taken(), 2);
}

TEST(Places, GoToTheRequestThatNeedsOneFromWhoHasBeenIdleLongest) {
  Places places(3);
  for (int i = 1; i <= 4; ++i) places.Add(C(i), kBegin + seconds(i));
  places.Busy(C(1));
  places.Idle(C(1), kBegin + seconds(10));  // now the one that was idle last
  EXPECT_FALSE(places.Take(C(4), kBegin + seconds(11), seconds(30)).placed);
  const Places::Place place = places.Take(C(4), kBegin + seconds(32), seconds(30));
  EXPECT_TRUE(place.placed);
  EXPECT_EQ(place.end, C(2));
  EXPECT_EQ(places.taken(), 3);
  places.Add(C(5), kBegin + seconds(40));
  places.Busy(C(3));
  EXPECT_EQ(places.Take(C(5), kBegin + seconds(41), seconds(30)).end, C(1));
  // A connection with a request under way stays in every case.
  places.Add(C(6), kBegin + seconds(90));
  EXPECT_FALSE(places.Take(C(6), kBegin + seconds(91), seconds(30)).placed);
  places.Remove(C(3));
  EXPECT_TRUE(places.Take(C(6), kBegin + seconds(91), seconds(30)).placed);
  EXPECT_EQ(places.taken(), 3);
}

TEST(Places, AreKeptByWhoHasBegunARequestMeanwhile) {
  Places places(1);
  places.Add(C(1), kBegin);
  places.Add(C(2), kBegin);
  EXPECT_EQ(places.Take(C(2), kBegin, seconds(0)).end, C(1));
  places.Busy(C(1));
  places.Keep(C(1));
  EXPECT_EQ(places.taken(), 2);  // for once more than the limit
  places.Idle(C(1), kBegin);
  places.Add(C(3), kBegin);
  const Places::Place place = places.Take(C(3), kBegin, seconds(0));
  EXPECT_EQ(place.end, C(1));
  EXPECT_FALSE(place.placed);
  places.Remove(C(1));
  places.Remove(C(2));
  EXPECT_TRUE(places.Take(C(3), kBegin, seconds(0)).placed);
  EXPECT_EQ(places.taken(), 1);
}

TEST(Places, WithoutADescriptorOneEndsAfterTheOther) {
  Places places(2);
  for (int i = 1; i <= 4; ++i) places.Add(C(i), kBegin);
  places.Busy(C(1));
  EXPECT_EQ(places.EndOne(), C(2));
  EXPECT_EQ(places.EndOne(), nullptr);  // that one first
  places.Remove(C(2));
  EXPECT_EQ(places.EndOne(), C(3));
  places.Remove(C(3));
  EXPECT_EQ(places.EndOne(), C(4));
  places.Remove(C(4));
  EXPECT_EQ(places.EndOne(), nullptr);
}

TEST(OpenFiles, LimitTheConnectionsAndSayWhy) {
  EXPECT_EQ(LimitConnections(4096, {.allowed = 20'000, .in_use = 100}).connections, 4096);
  const ConnectionLimit few = LimitConnections(4096, {.allowed = 128, .in_use = 11});
  EXPECT_EQ(few.connections, 128 - 11 - 48);
  EXPECT_EQ(few.why,
            "at most 69 connections, not the 4096 of --max-connections: 128 files may be open (ulimit -n), 11 are in "
            "use and 48 kept for probes and other files; ulimit -n 4155 would do");
  EXPECT_EQ(LimitConnections(4096, {.allowed = 4155, .in_use = 11}).connections, 4096);
  EXPECT_LE(LimitConnections(1, {.allowed = 50, .in_use = 11}).connections, 0);
  const OpenFiles now = CountOpenFiles();
  TestServer test;
  RawClient client(test.port());
  EXPECT_GT(CountOpenFiles().in_use, now.in_use);
}

TEST(LogGate, SaysHowManyItHeldBack) {
  LogGate gate(seconds(10));
  EXPECT_EQ(gate.Pass(kBegin), 0u);
  EXPECT_EQ(gate.Pass(kBegin + seconds(9)), std::nullopt);
  EXPECT_EQ(gate.Pass(kBegin + seconds(9)), std::nullopt);
  EXPECT_EQ(gate.Pass(kBegin + seconds(10)), 2u);
  EXPECT_EQ(gate.Pass(kBegin + seconds(20)), 0u);
}

// ---- over sockets ----

const char* const kStream = R"({"model":"bytes","prompt":"x","max_tokens":100,"stream":true})";

HttpServerOptions Eight() {
  HttpServerOptions options;
  options.max_connections = 8;
  options.header_timeout = std::chrono::hours(1);  // longer than any client waits
  return options;
}

bool MetricsSay(const TestServer& test, const std::string& line) {
  return test.Ask(Get("/metrics")).body.find(line + "\n") != std::string::npos;
}

// Eight streams that have begun.
std::vector<RawClient> TakeAll(TestServer& test) {
  std::vector<RawClient> busy;
  for (int i = 0; i < 8; ++i) busy.emplace_back(test.port()).Send(Post("/v1/completions", kStream));
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 8; }));
  return busy;
}

TEST(Connections, BeyondTheMaximumGetA503ButProbesAreAnswered) {
  TestServer test({.manual = true}, Eight());
  std::vector<RawClient> busy = TakeAll(test);
  for (int i = 0; i < 50; ++i) {
    for (const char* probe : {"/health", "/live", "/ready", "/metrics"}) {
      const RawResponse response = test.Ask(Get(probe));
      EXPECT_EQ(response.status, 200) << probe;
      EXPECT_TRUE(response.closed) << probe;
    }
  }
  for (const std::string& request : {Get("/v1/models"), Post("/v1/completions", kStream)}) {
    const RawResponse response = test.Ask(request);
    EXPECT_EQ(response.status, 503);
    EXPECT_EQ(response.headers.at("retry-after"), "1");
    EXPECT_TRUE(response.closed);
    EXPECT_THAT(response.body, HasSubstr("Too many connections"));
  }
  RawClient silent(test.port());
  EXPECT_EQ(silent.Read().status, 503);
  EXPECT_TRUE(MetricsSay(test, "dovetail:http_connections_max{model_name=\"bytes\"} 8"));
  EXPECT_TRUE(
      MetricsSay(test, "dovetail:http_connections_ended_for_room_total{model_name=\"bytes\",reason=\"refused\"} 3"));
  test.engine.Step(101);
  for (RawClient& client : busy) EXPECT_EQ(SseData(client.Read().body).back(), "[DONE]");
}

TEST(Connections, ThatAreSilentKeepNoProbeOut) {
  TestServer test({.manual = true}, Eight());
  std::vector<RawClient> busy = TakeAll(test);
  std::vector<RawClient> silent;
  for (int i = 0; i < 200; ++i) {
    silent.emplace_back(test.port());
    if (i % 2 == 1) silent.back().Send("GET /health HTTP/1.1\r\nHost: t\r\n");  // and no end of the head
    if (i % 10 == 9) {
      EXPECT_EQ(test.Ask(Get("/health")).status, 200) << i;
    }
  }
  EXPECT_LE(test.server.connections(), 8 + kProbeConnections + kEndingConnections);
  test.engine.Step(101);
  for (RawClient& client : busy) EXPECT_EQ(SseData(client.Read().body).back(), "[DONE]");
}

TEST(Connections, ThatAreIdleMakeRoomForRequestsTheOldestFirst) {
  HttpServerOptions options = Eight();
  options.min_idle = milliseconds(1);
  TestServer test({}, options);
  std::vector<RawClient> idle;
  for (int i = 0; i < 8; ++i) {
    idle.emplace_back(test.port()).Send(Get("/live"));
    EXPECT_EQ(idle.back().Read().status, 200);
  }
  idle[0].Send(Get("/live"));  // now the one that was idle last
  EXPECT_EQ(idle[0].Read().status, 200);
  std::this_thread::sleep_for(milliseconds(10));
  RawClient newcomer(test.port());
  newcomer.Send(Get("/v1/models"));
  const RawResponse response = newcomer.Read();
  EXPECT_EQ(response.status, 200);
  EXPECT_FALSE(response.closed);
  EXPECT_TRUE(idle[1].WaitForClose());
  for (int i : {0, 2, 3, 4, 5, 6, 7}) {
    idle[i].Send(Get("/live"));
    EXPECT_EQ(idle[i].Read().status, 200) << i;
  }
  EXPECT_TRUE(
      MetricsSay(test, "dovetail:http_connections_ended_for_room_total{model_name=\"bytes\",reason=\"idle\"} 1"));
}

TEST(Connections, ThatHaveJustBeenUsedAreNotClosedForOthers) {
  HttpServerOptions options = Eight();
  options.min_idle = std::chrono::hours(1);
  TestServer test({}, options);
  std::vector<RawClient> idle;
  for (int i = 0; i < 8; ++i) idle.emplace_back(test.port()).Send(Get("/live"));
  for (RawClient& client : idle) EXPECT_EQ(client.Read().status, 200);
  EXPECT_EQ(test.Ask(Get("/v1/models")).status, 503);
  EXPECT_EQ(test.Ask(Get("/health")).status, 200);
  for (RawClient& client : idle) {
    client.Send(Get("/live"));
    EXPECT_EQ(client.Read().status, 200);
  }
}

}  // namespace
}  // namespace dovetail::server::test
