// Holds many completion streams open at one server and measures the gaps between what each receives. One thread and
// epoll, so that it takes little from the machine that it shares with the server. bench/server/run.sh starts both.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dovetail::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kGiveUpMs = 30'000;  // without a byte from any stream
constexpr std::string_view kDone = "data: [DONE]";

struct Flags {
  int port = 8000;
  std::string model;
  int streams = 200;
  int tokens = 400;
  int rounds = 3;
  int late = 0;  // streams that come one by one while the others run
};

struct Stream {
  int fd = -1;
  std::string tail;  // the last bytes, to find the end in
  Clock::time_point sent, last;
  bool began = false, done = false;
};

struct Round {
  double seconds = 0;
  std::vector<double> gaps_ms;   // between two reads of one stream
  std::vector<double> first_ms;  // from the request to the first token
  int complete = 0;
};

double Milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

bool Open(const Flags& flags, int index, Stream& stream) {
  stream.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(flags.port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (stream.fd < 0 || connect(stream.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return false;
  const std::string body =
      absl::StrCat(R"({"model":")", flags.model, R"(","prompt":"Once upon a time","temperature":1,)", R"("seed":)",
                   index, R"(,"ignore_eos":true,"stream":true,"max_tokens":)", flags.tokens, "}");
  const std::string request = absl::StrCat(
      "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
      "\r\n\r\n", body);
  stream.sent = Clock::now();
  return send(stream.fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size());
}

// Takes what there is; false when the server closed before the end.
bool Receive(Stream& stream, Round& round) {
  char chunk[16384];
  const ssize_t got = recv(stream.fd, chunk, sizeof chunk, 0);
  if (got <= 0) return false;
  const Clock::time_point now = Clock::now();
  const std::string_view bytes(chunk, static_cast<size_t>(got));
  if (stream.began) round.gaps_ms.push_back(Milliseconds(now - stream.last));
  if (!stream.began && bytes.find("data: ") != std::string_view::npos) {
    stream.began = true;
    round.first_ms.push_back(Milliseconds(now - stream.sent));
  }
  stream.last = now;
  stream.tail.append(bytes.substr(bytes.size() > 64 ? bytes.size() - 64 : 0));
  stream.done = stream.tail.find(kDone) != std::string::npos;
  if (stream.tail.size() > 128) stream.tail.erase(0, stream.tail.size() - 64);
  return true;
}

Round Run(const Flags& flags) {
  Round round;
  std::vector<Stream> streams(flags.streams);
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  const auto begin = Clock::now();
  int opened = 0, ended = 0, reads = 0;
  const auto open_one = [&] {
    Stream& stream = streams[opened];
    if (!Open(flags, opened, stream)) {
      std::fprintf(stderr, "cannot connect to port %d\n", flags.port);
      std::exit(1);
    }
    epoll_event event{.events = EPOLLIN, .data = {.u32 = static_cast<uint32_t>(opened++)}};
    epoll_ctl(poll, EPOLL_CTL_ADD, stream.fd, &event);
  };
  while (opened < flags.streams - flags.late) open_one();
  while (ended < flags.streams) {
    epoll_event events[256];
    const int ready = epoll_wait(poll, events, 256, kGiveUpMs);
    if (ready <= 0) break;
    for (int i = 0; i < ready; ++i) {
      Stream& stream = streams[events[i].data.u32];
      const bool alive = Receive(stream, round);
      if (alive && !stream.done) continue;
      round.complete += stream.done;
      ++ended;
      close(stream.fd);
    }
    if (opened < flags.streams && (++reads % 20 == 0 || ended == opened)) open_one();
  }
  close(poll);
  round.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return round;
}

double Quantile(std::vector<double>& values, double q) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Gaps between the tokens of many streams");
  app.add_option("--port", flags.port, "Of the server, on this machine")->required();
  app.add_option("--model", flags.model, "As the server calls it")->required();
  app.add_option("--streams", flags.streams, "Held open at once")->check(CLI::Range(1, 10000));
  app.add_option("--tokens", flags.tokens, "Of each")->check(CLI::Range(2, 1 << 20));
  app.add_option("--rounds", flags.rounds)->check(CLI::Range(1, 100));
  app.add_option("--late", flags.late, "Streams that come one by one while the others run")
      ->check(CLI::Range(0, 10000));
  CLI11_PARSE(app, argc, argv);
  flags.late = std::min(flags.late, flags.streams - 1);
  double worst = 0;
  bool complete = true;
  std::printf("%8s %8s %10s %12s %10s %10s %10s %14s %12s\n", "streams", "tokens", "tok/s", "gap p50 ms", "p99",
              "p99.9", "max", "first p99 ms", "client CPU s");
  for (int i = 0; i < flags.rounds; ++i) {
    const double cpu = CpuSeconds();
    Round round = Run(flags);
    const double longest = Quantile(round.gaps_ms, 1);
    std::printf("%8d %8d %10.0f %12.1f %10.1f %10.1f %10.1f %14.1f %12.2f\n", flags.streams, flags.tokens,
                flags.streams * flags.tokens / round.seconds, Quantile(round.gaps_ms, 0.5),
                Quantile(round.gaps_ms, 0.99), Quantile(round.gaps_ms, 0.999), longest, Quantile(round.first_ms, 0.99),
                CpuSeconds() - cpu);
    worst = std::max(worst, longest);
    complete = complete && round.complete == flags.streams;
  }
  std::printf("longest gap %.1f ms%s\n", worst, complete ? "" : "; streams were CUT OFF");
  return complete ? 0 : 1;
}

}  // namespace
}  // namespace dovetail::bench

int main(int argc, char** argv) { return dovetail::bench::Main(argc, argv); }
