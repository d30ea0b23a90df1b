#include "server/cli/child_processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
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
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/log_entry.h"
#include "base/mutex.h"
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

// Two ends that are closed unless they are taken. A child that is started meanwhile gets none of them.
class Ends {
 public:
  ~Ends() {
    for (const int end : ends_)
      if (end >= 0) close(end);
  }
  // Errors: kResourceExhausted. `name`: the child's.
  absl::Status Open(const std::string& name, bool of_socket) {
    const int error = of_socket ? socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_) : pipe2(ends_, O_CLOEXEC);
    if (error == 0) return absl::OkStatus();
    return ResourceExhausted(name, ": cannot be started: ", std::strerror(errno));
  }
  int childs() const { return ends_[1]; }
  int TakeParents() { return std::exchange(ends_[0], -1); }

 private:
  int ends_[2] = {-1, -1};
};

// In the child, between fork and exec: async-signal-safe calls only.
// `input`: -1: the parent's.
[[noreturn]] void Become(const char* binary, char* const* arguments, int input, int output, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);  // it died in between
  setpgid(0, 0);                      // Ctrl-C is the parent's to pass on, in its order
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (input >= 0) dup2(input, STDIN_FILENO);
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

// One process that runs, and the thread that reads its output.
class ChildProcesses::Child {
 public:
  // `input`: -1: none of ours.
  Child(const std::string& name, pid_t pid, int output, int input, OnLine on_line)
      : pid_(pid),
        input_(input),
        name_(name),
        reader_([this, output, on_line = std::move(on_line)] { ReadLines(output, on_line); }) {}
  // It has ended: what it wrote is read to its end.
  ~Child() {
    reader_.join();
    EndInput();
  }

  pid_t pid() const { return pid_; }
  std::string name() const {
    MutexLock lock(mutex_);
    return name_;
  }
  void Rename(const std::string& name) {
    MutexLock lock(mutex_);
    name_ = name;
  }
  // False: it did not take all of it. A socket's end raises no SIGPIPE.
  bool Write(const std::string& text) const {
    const ssize_t sent = send(input_, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent == static_cast<ssize_t>(text.size());
  }
  void EndInput() {
    if (const int input = std::exchange(input_, -1); input >= 0) close(input);
  }

 private:
  void ReadLines(int fd, const OnLine& on_line) const {
    std::string thread_of;
    FILE* in = fdopen(fd, "r");
    char* line = nullptr;
    size_t capacity = 0;
    while (true) {
      if (const std::string now = name(); now != thread_of) NameThread("dt-" + (thread_of = now));
      if (getline(&line, &capacity, in) <= 0) break;
      std::string text(line);
      while (!text.empty() && text.back() == '\n') text.pop_back();
      const std::string name = this->name();
      if (const auto level = LevelOf(text); !level || LogsAt(*level)) {
        std::fputs(Relayed(name, text).c_str(), stdout);
        std::fflush(stdout);
      }
      if (on_line) on_line(name, MessageOf(text));
    }
    std::free(line);
    std::fclose(in);
  }

  const pid_t pid_;
  int input_;
  mutable Mutex mutex_;
  std::string name_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;  // last: it uses the rest
};

ChildProcesses::ChildProcesses() = default;
ChildProcesses::~ChildProcesses() { StopAll(absl::Seconds(5)); }

absl::Status ChildProcesses::Start(const std::string& name, const std::vector<std::string>& arguments, OnLine on_line,
                                   Input input) {
  Ends output, lines;
  DT_RETURN_IF_ERROR(output.Open(name, /*of_socket=*/false));
  if (input == Input::kLines) DT_RETURN_IF_ERROR(lines.Open(name, /*of_socket=*/true));
  std::vector<std::string> all = {"dovetail"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& argument : all) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const std::string binary = ThisBinary();
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(binary.c_str(), pointers.data(), lines.childs(), output.childs(), parent);
  if (pid < 0) return ResourceExhausted(name, ": cannot be started: ", std::strerror(errno));
  children_.push_back(
      std::make_unique<Child>(name, pid, output.TakeParents(), lines.TakeParents(), std::move(on_line)));
  return absl::OkStatus();
}

absl::Status ChildProcesses::Tell(const std::string& name, const std::string& line) {
  const Child* const child = Find(name);
  if (child == nullptr || !child->Write(line + "\n"))
    return absl::UnavailableError(absl::StrCat(name, ": has ended, or reads no lines"));
  return absl::OkStatus();
}

void ChildProcesses::EndInput(const std::string& name) {
  if (Child* const child = Find(name); child != nullptr) child->EndInput();
}

void ChildProcesses::Rename(const std::string& name, const std::string& to) {
  Child* const child = Find(name);
  DT_CHECK(child != nullptr && Find(to) == nullptr, name, " to ", to);
  child->Rename(to);
}

std::vector<ChildProcesses::Ended> ChildProcesses::Reap() {
  std::vector<Ended> ended;
  std::erase_if(children_, [&](const std::unique_ptr<Child>& child) {
    int status = 0;
    if (waitpid(child->pid(), &status, WNOHANG) != child->pid()) return false;
    ended.push_back({child->name(), HowItEnded(status)});
    return true;
  });
  return ended;
}

ChildProcesses::Child* ChildProcesses::Find(const std::string& name) const {
  for (const auto& child : children_)
    if (child->name() == name) return child.get();
  return nullptr;
}

pid_t ChildProcesses::PidOf(const std::string& name) const {
  const Child* const child = Find(name);
  return child == nullptr ? -1 : child->pid();
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
  for (auto it = children_.rbegin(); it != children_.rend(); ++it) kill((*it)->pid(), SIGTERM);
  const absl::Time give_up = SystemClock().Now() + patience;
  while (!children_.empty()) {
    Reap();
    if (SystemClock().Now() >= give_up)
      for (const auto& child : children_) kill(child->pid(), SIGKILL);
    if (!children_.empty()) absl::SleepFor(kReapPause);
  }
}

}  // namespace dovetail::cli
