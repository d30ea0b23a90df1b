#include "server/cli/child_processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/log_entry.h"
#include "base/thread_name.h"
#include "server/cli/log_flags.h"
#include "server/openai/json.h"

namespace dovetail::cli {
namespace {

constexpr absl::Duration kReapPause = absl::Milliseconds(10);

// As this process shows it. Where lines are JSON a child's says which child it is, and what is none (a library's)
// becomes one.
std::string Relayed(const std::string& name, const std::string& line) {
  if (!LogsAsJson()) return absl::StrCat("[", name, "] ", line, "\n");
  if (server::Json::accept(line)) return line + "\n";
  return JsonLine({LogLevel::kInfo, absl::Now(), line, {}}, name);
}

void ReadLines(int fd, const std::string& name, const std::function<void(const std::string&)>& on_line) {
  NameThread("dt-" + name);
  FILE* in = fdopen(fd, "r");
  char* line = nullptr;
  size_t capacity = 0;
  while (getline(&line, &capacity, in) > 0) {
    std::string text(line);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::fputs(Relayed(name, text).c_str(), stdout);
    std::fflush(stdout);
    if (on_line) on_line(MessageOf(text));
  }
  std::free(line);
  std::fclose(in);
}

// In the child, between fork and exec: async-signal-safe calls only.
[[noreturn]] void Become(const char* binary, char* const* arguments, int output, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);  // it died in between
  setpgid(0, 0);                      // Ctrl-C is the parent's to pass on, in its order
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  execv(binary, arguments);
  _exit(127);
}

// The file that this process runs. Its path names a process that executes it until that takes a name of its own. A
// build that lies there instead by now is another one, with which this one does not speak.
std::string ThisBinary() {
  constexpr const char* kLink = "/proc/self/exe";
  std::error_code error;
  const std::string path = std::filesystem::read_symlink(kLink, error).string();
  struct stat own, there;
  const bool same = !error && stat(kLink, &own) == 0 && stat(path.c_str(), &there) == 0 && own.st_dev == there.st_dev &&
                    own.st_ino == there.st_ino;
  return same ? path : kLink;
}

std::string HowItEnded(int status) {
  if (WIFSIGNALED(status)) return absl::StrCat("was killed by signal ", WTERMSIG(status));
  return absl::StrCat("exited with ", WEXITSTATUS(status));
}

}  // namespace

ChildProcesses::~ChildProcesses() { StopAll(absl::Seconds(5)); }

absl::Status ChildProcesses::Start(const std::string& name, const std::vector<std::string>& arguments,
                                   std::function<void(const std::string&)> on_line) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ResourceExhausted(name, ": cannot be started: ", std::strerror(errno));
  std::vector<std::string> all = {"dovetail"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& argument : all) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const std::string binary = ThisBinary();
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(binary.c_str(), pointers.data(), ends[1], parent);
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return ResourceExhausted(name, ": cannot be started: ", std::strerror(errno));
  }
  auto child = std::make_unique<Child>();
  child->name = name;
  child->pid = pid;
  child->reader = std::thread([fd = ends[0], name, on_line = std::move(on_line)] { ReadLines(fd, name, on_line); });
  children_.push_back(std::move(child));
  return absl::OkStatus();
}

void ChildProcesses::Finish(Child& child) {
  child.pid = -1;
  child.reader.join();
}

std::vector<ChildProcesses::Ended> ChildProcesses::Reap() {
  std::vector<Ended> ended;
  for (auto& child : children_) {
    int status = 0;
    if (waitpid(child->pid, &status, WNOHANG) != child->pid) continue;
    ended.push_back({child->name, HowItEnded(status)});
    Finish(*child);
  }
  std::erase_if(children_, [](const auto& child) { return child->pid < 0; });
  return ended;
}

pid_t ChildProcesses::PidOf(const std::string& name) const {
  for (const auto& child : children_)
    if (child->name == name) return child->pid;
  return -1;
}

void ChildProcesses::Stop(const std::string& name, absl::Duration patience, const std::function<bool()>& hurry) {
  const pid_t pid = PidOf(name);
  if (pid < 0) return;
  kill(pid, SIGTERM);
  const absl::Time give_up = SystemClock().Now() + patience;
  while (PidOf(name) == pid) {
    Reap();
    if (PidOf(name) != pid) return;
    if (SystemClock().Now() >= give_up || (hurry && hurry())) kill(pid, SIGKILL);
    absl::SleepFor(kReapPause);
  }
}

void ChildProcesses::StopAll(absl::Duration patience) {
  for (auto it = children_.rbegin(); it != children_.rend(); ++it) kill((*it)->pid, SIGTERM);
  const absl::Time give_up = SystemClock().Now() + patience;
  while (!children_.empty()) {
    Reap();
    if (SystemClock().Now() >= give_up)
      for (const auto& child : children_) kill(child->pid, SIGKILL);
    if (!children_.empty()) absl::SleepFor(kReapPause);
  }
}

}  // namespace dovetail::cli
