// Many streams at once through one server: nobody waits, nothing is lost.
#include <gtest/gtest.h>

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using Clock = std::chrono::steady_clock;

// 200 streams of a token every 20 ms each, read by one thread: the largest gap between two reads of one stream.
TEST(Load, TwoHundredStreamsFlowWithoutAStall) {
  constexpr int kStreams = 200, kTokens = 100;
  TestServer test({.step_interval = absl::Milliseconds(20)});
  std::vector<RawClient> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.emplace_back(test.port()).Send(Post(
        "/v1/chat/completions", absl::StrCat(R"({"model":"bytes","messages":[{"role":"user","content":"hello"}],"stream":true,"max_tokens":)", kTokens, "}")));
  }
  std::vector<std::string> received(kStreams);
  std::vector<Clock::time_point> last(kStreams);
  std::vector<pollfd> waiting(kStreams);
  for (int i = 0; i < kStreams; ++i) waiting[i] = {clients[i].fd(), POLLIN, 0};
  std::chrono::milliseconds largest{0};
  int done = 0;
  while (done < kStreams && poll(waiting.data(), kStreams, 30'000) > 0) {
    const auto now = Clock::now();
    for (int i = 0; i < kStreams; ++i) {
      if (waiting[i].revents == 0) continue;
      char chunk[8192];
      const ssize_t got = recv(waiting[i].fd, chunk, sizeof chunk, 0);
      ASSERT_GT(got, 0);
      if (!received[i].empty()) largest = std::max(largest, std::chrono::duration_cast<std::chrono::milliseconds>(now - last[i]));
      last[i] = now;
      received[i].append(chunk, got);
      if (received[i].find("data: [DONE]") != std::string::npos) {
        waiting[i].fd = -1;
        ++done;
      }
    }
  }
  EXPECT_EQ(done, kStreams);
  for (const std::string& text : received) {
    size_t frames = 0;
    for (size_t at = 0; (at = text.find("\"content\":\"", at)) != std::string::npos; ++at) ++frames;
    EXPECT_EQ(frames, static_cast<size_t>(kTokens));
  }
  RecordProperty("largest_gap_ms", static_cast<int>(largest.count()));
  std::printf("largest gap %d ms\n", static_cast<int>(largest.count()));
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(largest.count(), 2000);
#else
  EXPECT_LT(largest.count(), 200);
#endif
}

// Clients of every temper from several threads, on two I/O threads: what TSan should see.
TEST(Load, ClientsComeAndGoFromAllSides) {
  HttpServerOptions options;
  options.io_threads = options.worker_threads = 2;
  TestServer test({.step_interval = absl::Microseconds(200)}, options);
  const auto one_of_them = [&](int seed) {
    for (int i = 0; i < 15; ++i) {
      RawClient client(test.port());
      switch ((seed + i) % 5) {
        case 0:
          client.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":30,"stop":"quick"})"));
          EXPECT_EQ(client.Read().status, 200);
          break;
        case 1:
          client.Send(Post("/v1/completions", R"({"model":"bytes","prompt":"x","max_tokens":4000,"stream":true})"));
          EXPECT_TRUE(client.ReadUntil("data: "));
          client.Reset();
          break;
        case 2:
          client.Send(Post("/v1/chat/completions", R"({"model":"bytes","messages":[{"role":"user","content":"x"}],"n":4,"max_tokens":20,"stream":true})"));
          EXPECT_EQ(SseData(client.Read().body).back(), "[DONE]");
          break;
        case 3:
          client.Send(Get("/metrics"));
          EXPECT_EQ(client.Read().status, 200);
          break;
        default:
          client.Send("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n{");
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(one_of_them, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(test.engine.WaitFor([](const auto& log) { return log.live == 0; }));
}

}  // namespace
}  // namespace dovetail::server::test
