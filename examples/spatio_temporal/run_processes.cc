#include "examples/spatio_temporal/run_processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "nlohmann/json.hpp"
#include "sequence_parallel/run_switch.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::spatio_temporal {
namespace {

using Json = nlohmann::json;
using sequence_parallel::SwitchExchange;
using transport::ucx::UcxPort;

constexpr absl::Duration kStartLimit = absl::Seconds(120);  // to open ports, connect and make weights
constexpr absl::Duration kLastWords = absl::Seconds(5);     // for the others, once one has failed
constexpr size_t kMaxLineBytes = 4 << 20;

// Lines of a pipe. Closed: end of input, or a line beyond the limit.
class LineReader {
 public:
  explicit LineReader(int fd) : fd_(fd) {}
  // A line, or nothing after `timeout` or once closed.
  std::optional<std::string> Next(absl::Duration timeout) {
    pollfd readable{fd_, POLLIN, 0};
    if (lines_.find('\n') == std::string::npos && !closed_ &&
        poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) > 0) {
      char bytes[65536];
      const ssize_t count = read(fd_, bytes, sizeof(bytes));
      if (count <= 0 || lines_.size() > kMaxLineBytes) closed_ = true;
      if (count > 0) lines_.append(bytes, static_cast<size_t>(count));
    }
    const size_t end = lines_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    std::string line = lines_.substr(0, end);
    lines_.erase(0, end + 1);
    return line;
  }
  bool closed() const { return closed_; }

 private:
  const int fd_;
  std::string lines_;
  bool closed_ = false;
};

bool WriteLine(int fd, std::string line) {
  line += "\n";
  for (size_t at = 0; at < line.size();) {
    const ssize_t count = write(fd, line.data() + at, line.size() - at);
    if (count <= 0) return false;
    at += static_cast<size_t>(count);
  }
  return true;
}

// ---- the processes of ranks ----

class RankProcess {
 public:
  explicit RankProcess(int rank) : rank_(rank), orders_(STDIN_FILENO) {}

  absl::Status Run() {
    DT_ASSIGN_OR_RETURN(const std::string text, Order());
    DT_ASSIGN_OR_RETURN(options_, OptionsFromJson(text));
    DT_RETURN_IF_ERROR(OpenPort());
    DT_RETURN_IF_ERROR(Connect());
    DT_ASSIGN_OR_RETURN(const auto device, kernels::CreateCpuDevice({.threads = options_.threads}));
    const auto stream = device->CreateStream();
    DT_ASSIGN_OR_RETURN(const Weights weights, Weights::Random(options_.config, &stream->pool()));
    WriteLine(STDOUT_FILENO, "{\"ready\":true}");
    DT_RETURN_IF_ERROR(Order().status());  // go
    RankLink link(*exchange_, *port_, *port_, [this](SwitchExchange& exchange) { LookAtPeers(exchange); });
    const auto report = RunRank(options_, weights, rank_, *device, options_.ranks == 1 ? nullptr : &link);
    if (!report.ok()) {
      exchange_->Void(report.status());
      return report.status();
    }
    WriteLine(STDOUT_FILENO, ToJson(*report));
    // The others may still wait for what this port has to send.
    if (const auto end = Order(); !end.ok()) return end.status();
    return absl::OkStatus();
  }

 private:
  // The next line; keeps the port going meanwhile.
  absl::StatusOr<std::string> Order() {
    while (true) {
      if (port_ != nullptr && exchange_ != nullptr && port_->Poll(*exchange_, 64) > 0) continue;
      if (auto line = orders_.Next(absl::Milliseconds(port_ == nullptr ? 100 : 1))) return *std::move(line);
      if (orders_.closed()) return absl::CancelledError("the process that started this rank has ended");
    }
  }

  absl::Status OpenPort() {
    transport::ucx::UcxOptions options;
    options.node = NodeOf(rank_);
    options.epoch = Epoch(1);
    DT_ASSIGN_OR_RETURN(options.lanes, transport::ucx::ParseLanes(options_.transport));
    if (options.lanes == transport::ucx::Lanes::kTcp) options.devices = "lo";
    DT_ASSIGN_OR_RETURN(port_, UcxPort::Create(options));
    sequence_parallel::ExchangeOptions exchange;
    for (int rank = 0; rank < options_.ranks; ++rank) exchange.members.push_back(NodeOf(rank));
    exchange.rank = rank_;
    exchange.group = Epoch(1);
    exchange.stall = options_.stall;
    exchange.chunk_bytes = options_.chunk_bytes;
    DT_ASSIGN_OR_RETURN(exchange_, SwitchExchange::Create(exchange, *port_, SystemClock()));
    return absl::OkStatus();
  }

  absl::Status Connect() {
    WriteLine(
        STDOUT_FILENO,
        Json{{"address", absl::BytesToHexString(port_->local_address())}, {"version", UcxPort::Version()}}.dump());
    DT_ASSIGN_OR_RETURN(const std::string text, Order());
    const Json peers = Json::parse(text, nullptr, false);
    if (!peers.is_array() || static_cast<int>(peers.size()) != options_.ranks)
      return InvalidArgument("peers of rank ", rank_, ": ", text);
    for (int rank = 0; rank < options_.ranks; ++rank)
      if (rank != rank_)
        DT_RETURN_IF_ERROR(port_->AddPeer(NodeOf(rank),
                                          absl::HexStringToBytes(peers[rank].value("address", std::string())),
                                          peers[rank].value("version", std::string()), Epoch(1)));
    const absl::Time deadline = SystemClock().Now() + kStartLimit;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      while (rank != rank_ && !port_->Connected(NodeOf(rank))) {
        port_->Poll(*exchange_, 64);
        LookAtPeers(*exchange_);
        DT_RETURN_IF_ERROR(exchange_->status());
        if (SystemClock().Now() > deadline)
          return absl::DeadlineExceededError(
              absl::StrCat("rank ", rank, " has not connected for ", absl::FormatDuration(kStartLimit)));
        port_->Wait(absl::Milliseconds(5));
      }
    }
    return absl::OkStatus();
  }

  void LookAtPeers(SwitchExchange& exchange) {
    for (const auto& failure : port_->TakeFailures())
      exchange.PeerLost(failure.node, std::string(failure.status.message()));
  }

  static NodeId NodeOf(int rank) { return NodeId(static_cast<uint32_t>(rank + 1)); }

  const int rank_;
  LineReader orders_;
  RunOptions options_;
  std::unique_ptr<UcxPort> port_;
  std::unique_ptr<SwitchExchange> exchange_;
};

// ---- the process that starts them ----

struct Child {
  int rank = 0;
  pid_t pid = -1;
  int orders = -1;
  int answers = -1;
  std::unique_ptr<LineReader> lines;
  absl::Status failure;

  ~Child() {
    if (orders >= 0) close(orders);
    if (answers >= 0) close(answers);
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  void Order(const std::string& line) {
    if (!WriteLine(orders, line)) failure = absl::UnavailableError("takes no orders any more");
  }
  // Waits for its end, which is near.
  void Reap() {
    int status = 0;
    if (pid <= 0 || waitpid(pid, &status, 0) != pid) return;
    pid = -1;
    if (WIFSIGNALED(status))
      failure = absl::UnavailableError(absl::StrCat("its process was ended by signal ", WTERMSIG(status)));
    else if (failure.ok() && WEXITSTATUS(status) != 0)
      failure = absl::UnavailableError(absl::StrCat("its process ended with status ", WEXITSTATUS(status)));
  }
};

absl::Status Start(Child& child, int rank) {
  int to[2], from[2];
  if (pipe2(to, O_CLOEXEC) != 0) return ResourceExhausted("rank ", rank, ": no pipe");
  if (pipe2(from, O_CLOEXEC) != 0) return ResourceExhausted("rank ", rank, ": no pipe");
  const std::string name = absl::StrCat(rank);
  const pid_t parent = getpid();
  child.rank = rank;
  child.pid = fork();
  if (child.pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    dup2(to[0], STDIN_FILENO);
    dup2(from[1], STDOUT_FILENO);
    execl("/proc/self/exe", "spatio_temporal", "--as-rank", name.c_str(), nullptr);
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  child.orders = to[1];
  child.answers = from[0];
  child.lines = std::make_unique<LineReader>(child.answers);
  if (child.pid < 0) return ResourceExhausted("rank ", rank, ": no process");
  std::printf("rank %d is process %d\n", rank, static_cast<int>(child.pid));
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Failures(const std::vector<std::unique_ptr<Child>>& children) {
  std::string text;
  absl::StatusCode code = absl::StatusCode::kOk;
  for (const auto& child : children) {
    if (child->failure.ok()) continue;
    if (code == absl::StatusCode::kOk) code = child->failure.code();
    absl::StrAppend(&text, text.empty() ? "" : "\n", "rank ", child->rank, ": ", std::string(child->failure.message()));
  }
  return {code, text};
}

// A line of each, or what became of it. With the first failure the others have kLastWords left.
std::vector<std::string> Collect(std::vector<std::unique_ptr<Child>>& children, absl::Duration limit) {
  std::vector<std::string> lines(children.size());
  absl::Time deadline = SystemClock().Now() + limit;
  for (size_t missing = children.size(); missing > 0;) {
    for (size_t i = 0; i < children.size(); ++i) {
      Child& child = *children[i];
      if (!lines[i].empty() || !child.failure.ok()) continue;
      if (auto line = child.lines->Next(absl::Milliseconds(10))) {
        const Json json = Json::parse(*line, nullptr, false);
        if (json.is_object() && json.contains("error"))
          child.failure = absl::AbortedError(json.value("error", std::string()));
        lines[i] = *std::move(line);
      } else if (child.lines->closed()) {
        child.failure = absl::UnavailableError("has ended without a word");
        child.Reap();
      } else if (SystemClock().Now() > deadline) {
        child.failure = absl::DeadlineExceededError("has not answered");
      } else {
        continue;
      }
      --missing;
      if (!child.failure.ok()) deadline = std::min(deadline, SystemClock().Now() + kLastWords);
    }
  }
  return lines;
}

}  // namespace

absl::StatusOr<std::vector<RankReport>> RunProcesses(const RunOptions& options) {
  DT_RETURN_IF_ERROR(options.Validate());
  signal(SIGPIPE, SIG_IGN);  // a rank that has ended shows when its answers do
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < options.ranks; ++rank) {
    children.push_back(std::make_unique<Child>());
    DT_RETURN_IF_ERROR(Start(*children.back(), rank));
    children.back()->Order(ToJson(options));
  }
  const std::vector<std::string> addresses = Collect(children, kStartLimit);
  DT_RETURN_IF_ERROR(Failures(children));
  Json peers = Json::array();
  for (const std::string& address : addresses) peers.push_back(Json::parse(address, nullptr, false));
  for (auto& child : children) child->Order(peers.dump());
  Collect(children, kStartLimit);  // ready
  DT_RETURN_IF_ERROR(Failures(children));
  for (auto& child : children) child->Order("go");
  std::printf("running\n");
  std::fflush(stdout);
  const std::vector<std::string> lines = Collect(children, absl::InfiniteDuration());
  DT_RETURN_IF_ERROR(Failures(children));
  for (auto& child : children) child->Order("end");
  std::vector<RankReport> reports;
  for (size_t rank = 0; rank < children.size(); ++rank) {
    DT_ASSIGN_OR_RETURN(RankReport report, ReportFromJson(lines[rank]));
    reports.push_back(std::move(report));
    children[rank]->Reap();
  }
  DT_RETURN_IF_ERROR(Failures(children));
  return reports;
}

int RunAsRank(int rank) {
  signal(SIGPIPE, SIG_IGN);
  const absl::Status done = RankProcess(rank).Run();
  if (done.ok()) return 0;
  WriteLine(STDOUT_FILENO, Json{{"error", std::string(done.message())}}.dump());
  return 1;
}

}  // namespace dovetail::spatio_temporal
