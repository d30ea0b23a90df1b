// One way latency and bandwidth of UcxPort between two processes, for tensors of one size over one lane. Prints one
// line:
//   latency  <lanes> <payload> <bytes> <median us one way> <mean us one way>
//   stream   <lanes> <payload> <bytes> <MB/s> <us CPU per message, both sides>
// bench/transport/compare runs it in turn with ucx_perftest.
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <x86intrin.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "base/check.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::transport::ucx {
namespace {

using proto::FrameType;
using SteadyClock = std::chrono::steady_clock;

struct Settings {
  std::string test = "latency";
  std::string lanes = "shm";
  std::string payload = "auto";  // auto, message, put
  size_t bytes = 8;
  double seconds = 0.3;
  std::vector<int> cores{0, 1};
  uint64_t in_flight = 8 << 20;  // of a stream, unanswered
  int answer_every = 8;          // of a stream
};

constexpr uint64_t kLastStep = 1;

double Seconds(SteadyClock::duration d) { return std::chrono::duration<double>(d).count(); }

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// What ucx_perftest measures by as well: a clock of the system costs a tenth of what is between two messages.
class CycleCounter {
 public:
  CycleCounter() {
    const auto begun = SteadyClock::now();
    const uint64_t cycles = __rdtsc();
    while (dovetail::transport::ucx::Seconds(SteadyClock::now() - begun) < 0.02) continue;
    per_second_ =
        static_cast<double>(__rdtsc() - cycles) / dovetail::transport::ucx::Seconds(SteadyClock::now() - begun);
  }
  uint64_t Of(double seconds) const { return static_cast<uint64_t>(seconds * per_second_); }
  double Seconds(uint64_t cycles) const { return static_cast<double>(cycles) / per_second_; }

 private:
  double per_second_ = 0;
};

std::unique_ptr<UcxPort> MakePort(const Settings& settings, uint32_t node) {
  UcxOptions options;
  options.node = NodeId(node);
  options.epoch = Epoch(1);
  auto lanes = ParseLanes(settings.lanes);
  DT_CHECK(lanes.ok());
  options.lanes = *lanes;
  if (*lanes == Lanes::kTcp) options.devices = "lo";
  if (settings.payload == "message") options.put_min_bytes = ~uint64_t{0};
  if (settings.payload == "put") options.put_min_bytes = 0;
  auto port = UcxPort::Create(options);
  if (!port.ok()) {
    std::fprintf(stderr, "%s\n", std::string(port.status().message()).c_str());
    std::exit(1);
  }
  return *std::move(port);
}

// Text over the pipes between the two processes.
class Wire {
 public:
  Wire(int in, int out) : in_(in), out_(out) {}
  void Send(const std::string& text) {
    const uint64_t size = text.size();
    DT_CHECK(write(out_, &size, sizeof(size)) == sizeof(size));
    DT_CHECK(write(out_, text.data(), size) == static_cast<ssize_t>(size));
  }
  std::string Receive() {
    uint64_t size = 0;
    DT_CHECK(read(in_, &size, sizeof(size)) == sizeof(size));
    std::string text(size, 0);
    for (size_t at = 0; at < size;) {
      const ssize_t count = read(in_, text.data() + at, size - at);
      DT_CHECK(count > 0);
      at += static_cast<size_t>(count);
    }
    return text;
  }

 private:
  int in_, out_;
};

void Connect(UcxPort& port, NodeId peer, Wire& wire) {
  wire.Send(port.local_address());
  DT_CHECK(port.AddPeer(peer, wire.Receive(), UcxPort::Version(), Epoch(1)).ok());
}

proto::FrameHeader HeaderOf(FrameType type, uint64_t step, size_t bytes) {
  return proto::MakeHeader(type, Epoch(1), StepId(step), MicroBatchId(0), 0, bytes);
}

// Answers each query of a ping-pong with a tensor of its size, and every so many of a stream with an empty one.
class Responder final : public FrameHandler {
 public:
  Responder(UcxPort& port, const Settings& settings)
      : port_(port),
        stream_(settings.test == "stream"),
        answer_every_(settings.answer_every),
        answer_(settings.bytes) {}

  void OnFrame(const Delivery& delivery) override {
    last = delivery.header.step == kLastStep;
    if (stream_ && !last && ++unanswered_ < answer_every_) return;
    unanswered_ = 0;
    const std::span<const std::byte> answer(answer_.data(), stream_ ? 0 : answer_.size());
    DT_CHECK(port_.SendTensor(delivery.from, HeaderOf(FrameType::kPartial, delivery.header.step, answer.size()), answer)
                 .ok());
  }
  bool last = false;

 private:
  UcxPort& port_;
  const bool stream_;
  const int answer_every_;
  std::vector<std::byte> answer_;
  int unanswered_ = 0;
};

class Counter final : public FrameHandler {
 public:
  void OnFrame(const Delivery& delivery) override {
    ++frames;
    last = delivery.header.step == kLastStep;
  }
  uint64_t frames = 0;
  bool last = false;
};

void Ping(UcxPort& port, const Settings& settings) {
  const std::vector<std::byte> query(settings.bytes);
  Counter answers;
  CycleCounter cycles;
  std::vector<uint64_t> round_trips;
  round_trips.reserve(1 << 22);
  const auto once = [&](uint64_t step) {
    const uint64_t before = answers.frames;
    DT_CHECK(port.SendTensor(NodeId(2), HeaderOf(FrameType::kQuery, step, query.size()), query).ok());
    while (answers.frames == before) port.Poll(answers, 16);
  };
  for (int i = 0; i < 200; ++i) once(0);
  const uint64_t begun = __rdtsc(), end = begun + cycles.Of(settings.seconds);
  for (uint64_t now = begun; now < end && round_trips.size() < round_trips.capacity();) {
    once(0);
    const uint64_t then = std::exchange(now, __rdtsc());
    round_trips.push_back(now - then);
  }
  once(kLastStep);
  std::vector<double> one_way_us;
  for (const uint64_t trip : round_trips) one_way_us.push_back(cycles.Seconds(trip) * 0.5e6);
  double sum = 0;
  for (const double us : one_way_us) sum += us;
  std::nth_element(one_way_us.begin(), one_way_us.begin() + one_way_us.size() / 2, one_way_us.end());
  std::printf("latency %s %s %zu %.3f %.3f\n", settings.lanes.c_str(), settings.payload.c_str(), settings.bytes,
              one_way_us[one_way_us.size() / 2], sum / static_cast<double>(one_way_us.size()));
}

void Stream(UcxPort& port, const Settings& settings, Wire& wire) {
  const std::vector<std::byte> query(settings.bytes);
  Counter answers;
  const auto every = static_cast<uint64_t>(settings.answer_every);
  const uint64_t window =
      std::clamp<uint64_t>(settings.in_flight / std::max<uint64_t>(settings.bytes, 1), 2 * every, 256);
  uint64_t sent = 0;
  const auto run = [&](double seconds) {
    const auto begun = SteadyClock::now();
    while (true) {
      for (uint64_t i = 0; i < every && sent - answers.frames * every < window; ++i, ++sent)
        DT_CHECK(port.SendTensor(NodeId(2), HeaderOf(FrameType::kQuery, 0, query.size()), query).ok());
      port.Poll(answers, 16);
      if (sent % every == 0 && Seconds(SteadyClock::now() - begun) >= seconds) break;
    }
    while (answers.frames * every < sent) port.Poll(answers, 16);
  };
  run(settings.seconds / 5);
  const uint64_t before = sent;
  const double cpu = CpuSeconds();
  wire.Send("begin");
  const double other_cpu = std::stod(wire.Receive());
  const auto begun = SteadyClock::now();
  run(settings.seconds);
  const double elapsed = Seconds(SteadyClock::now() - begun);
  const double messages = static_cast<double>(sent - before);
  const double own = CpuSeconds() - cpu;
  answers.last = false;
  DT_CHECK(port.SendTensor(NodeId(2), HeaderOf(FrameType::kQuery, kLastStep, 0), {}).ok());
  while (!answers.last) port.Poll(answers, 16);
  const double other = std::stod(wire.Receive()) - other_cpu;
  std::printf("stream %s %s %zu %.1f %.3f\n", settings.lanes.c_str(), settings.payload.c_str(), settings.bytes,
              messages * static_cast<double>(settings.bytes) / elapsed / 1e6, (own + other) / messages * 1e6);
}

void Respond(UcxPort& port, const Settings& settings, Wire& wire, int in) {
  Responder responder(port, settings);
  bool told = settings.test != "stream";
  while (!responder.last) {
    port.Poll(responder, 16);
    if (told) continue;
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(in, &readable);
    timeval none{};
    if (select(in + 1, &readable, nullptr, nullptr, &none) <= 0) continue;
    wire.Receive();
    wire.Send(std::to_string(CpuSeconds()));
    told = true;
  }
  if (settings.test == "stream") wire.Send(std::to_string(CpuSeconds()));
}

void PinTo(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

int Run(const Settings& settings) {
  int to[2], from[2];
  DT_CHECK(pipe(to) == 0 && pipe(from) == 0);
  const pid_t child = fork();  // before either touches UCX
  const bool responding = child == 0;
  PinTo(settings.cores[responding ? 1 : 0]);
  const int in = responding ? to[0] : from[0];
  Wire wire(in, responding ? from[1] : to[1]);
  const std::unique_ptr<UcxPort> port = MakePort(settings, responding ? 2 : 1);
  Connect(*port, NodeId(responding ? 1 : 2), wire);
  if (responding) {
    Respond(*port, settings, wire, in);
    wire.Receive();
    _exit(0);
  }
  if (settings.test == "stream")
    Stream(*port, settings, wire);
  else
    Ping(*port, settings);
  std::fflush(stdout);
  wire.Send("end");
  waitpid(child, nullptr, 0);
  return 0;
}

}  // namespace
}  // namespace dovetail::transport::ucx

int main(int count, char** arguments) {
  dovetail::transport::ucx::Settings settings;
  CLI::App app{"Latency and bandwidth of UcxPort"};
  app.add_option("--test", settings.test)->check(CLI::IsMember({"latency", "stream"}));
  app.add_option("--lanes", settings.lanes);
  app.add_option("--payload", settings.payload)->check(CLI::IsMember({"auto", "message", "put"}));
  app.add_option("--bytes", settings.bytes);
  app.add_option("--seconds", settings.seconds);
  app.add_option("--in-flight", settings.in_flight, "Bytes of a stream that are unanswered, at most 256 tensors");
  app.add_option("--answer-every", settings.answer_every, "Tensors of a stream")->check(CLI::Range(1, 128));
  app.add_option("--cores", settings.cores, "Of the two processes, as 0,1")->delimiter(',')->expected(2);
  CLI11_PARSE(app, count, arguments);
  return dovetail::transport::ucx::Run(settings);
}
