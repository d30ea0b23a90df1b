#include "tests/server/serve_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "tests/support/test_data.h"

extern char** environ;

namespace dovetail::server::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{60};

// Starts the binary, with `open_files` as its soft and hard limit unless that is 0.
pid_t Spawn(const std::vector<std::string>& arguments, int out, int err, int open_files) {
  std::vector<std::string> words = {DOVETAIL_BINARY};
  if (open_files > 0)
    words = {"/bin/sh", "-c", "ulimit -n \"$0\" && exec \"$@\"", std::to_string(open_files), DOVETAIL_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out, 1);
  posix_spawn_file_actions_adddup2(&actions, err, 2);
  pid_t pid = -1;
  const int failed = posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  DT_CHECK(failed == 0, "cannot start ", DOVETAIL_BINARY);
  return pid;
}

int ExitCode(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// Ends a process that outlives our patience.
int WaitFor(pid_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  pollfd waiting{fd, POLLIN, 0};
  if (poll(&waiting, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count())) <= 0) kill(pid, SIGKILL);
  close(fd);
  int status = 0;
  waitpid(pid, &status, 0);
  return ExitCode(status);
}

// Reads what comes until the end of both; a terminal ends with EIO.
void ReadBoth(int out, std::string& out_text, int err, std::string& err_text) {
  pollfd waiting[] = {{out, POLLIN, 0}, {err, POLLIN, 0}};
  std::string* texts[] = {&out_text, &err_text};
  const auto end = Clock::now() + kPatience;
  while ((waiting[0].fd >= 0 || waiting[1].fd >= 0) && Clock::now() < end) {
    if (poll(waiting, 2, 1000) <= 0) continue;
    for (int i = 0; i < 2; ++i) {
      if (waiting[i].revents == 0) continue;
      char chunk[4096];
      const ssize_t got = read(waiting[i].fd, chunk, sizeof chunk);
      if (got > 0)
        texts[i]->append(chunk, got);
      else
        waiting[i].fd = -1;
    }
  }
}

}  // namespace

CommandResult RunDovetail(const std::vector<std::string>& arguments, bool terminal, int open_files) {
  int out[2], err[2];
  DT_CHECK(pipe2(out, O_CLOEXEC) == 0);
  if (terminal) {
    err[0] = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    DT_CHECK(err[0] >= 0 && grantpt(err[0]) == 0 && unlockpt(err[0]) == 0, "no terminal");
    err[1] = open(ptsname(err[0]), O_RDWR | O_NOCTTY | O_CLOEXEC);
  } else {
    DT_CHECK(pipe2(err, O_CLOEXEC) == 0);
  }
  const pid_t pid = Spawn(arguments, out[1], err[1], open_files);
  close(out[1]);
  close(err[1]);
  CommandResult result;
  ReadBoth(out[0], result.out, err[0], result.err);
  result.exit_code = WaitFor(pid);
  close(out[0]);
  close(err[0]);
  return result;
}

ServeProcess::ServeProcess(std::vector<std::string> arguments, int open_files) {
  arguments.insert(arguments.begin(), "serve");
  arguments.insert(arguments.end(), {"--port", "0"});
  static int count = 0;
  error_path_ = (dovetail::test::TempFolder() / absl::StrCat("serve", ++count, ".err")).string();
  const int err = open(error_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  int out[2];
  DT_CHECK(pipe2(out, O_CLOEXEC) == 0 && err >= 0);
  pid_ = Spawn(arguments, out[1], err, open_files);
  close(out[1]);
  close(err);
  std::string text;
  const auto end = Clock::now() + kPatience;
  while (text.find('\n') == std::string::npos && Clock::now() < end) {
    char chunk[512];
    pollfd waiting{out[0], POLLIN, 0};
    if (poll(&waiting, 1, 1000) <= 0) continue;
    const ssize_t got = read(out[0], chunk, sizeof chunk);
    if (got <= 0) break;
    text.append(chunk, got);
  }
  close(out[0]);
  const size_t colon = text.rfind(':');
  DT_CHECK(text.rfind("listening on http://", 0) == 0 && colon != std::string::npos,
           "the server does not listen: ", text, ErrorText());
  port_ = std::stoi(text.substr(colon + 1));
}

ServeProcess::~ServeProcess() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  Wait();
}

RawResponse ServeProcess::Ask(const std::string& request) const {
  RawClient client(port_);
  client.Send(request);
  return client.Read();
}

Json ServeProcess::AskJson(const std::string& request, int status) const {
  const RawResponse response = Ask(request);
  EXPECT_EQ(response.status, status) << response.body;
  auto json = ParseJson(response.body);
  EXPECT_TRUE(json.ok()) << response.body;
  return json.ok() ? *std::move(json) : Json::object();
}

double ServeProcess::Metric(const std::string& name) const {
  const std::string text = Ask(Get("/metrics")).body;
  double sum = 0;
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const char next = text[at + name.size()];
    const bool whole = name.find('{') != std::string::npos || next == '{' || next == ' ';
    if (!whole || (at > 0 && text[at - 1] != '\n')) continue;
    const size_t end = text.find('\n', at);
    sum += std::stod(text.substr(text.rfind(' ', end) + 1));
  }
  return sum;
}

bool ServeProcess::WaitForMetric(const std::string& name, double value) const {
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (Metric(name) != value)
    if (Clock::now() > end) return false;
  return true;
}

void ServeProcess::Signal(int signal) const { kill(pid_, signal); }

int ServeProcess::Wait() {
  if (pid_ < 0) return -1;
  const int code = WaitFor(pid_);
  pid_ = -1;
  return code;
}

std::string ServeProcess::ErrorText() { return dovetail::test::ReadFile(error_path_); }

}  // namespace dovetail::server::test
