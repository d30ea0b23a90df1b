#pragma once
#include <sys/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"

namespace dovetail::cli {

// Processes of this binary that a parent starts and stops. Their output appears line by line behind their names. They
// get SIGTERM when the parent dies, however it dies.
// Threads: thread-compatible.
class ChildProcesses {
 public:
  ~ChildProcesses();  // StopAll

  // `arguments` without the binary's name. `on_line` is called with the text of each line (log_flags.h: MessageOf) on
  // the child's reader thread.
  // Errors: kResourceExhausted: the system refused a pipe or a process.
  absl::Status Start(const std::string& name, const std::vector<std::string>& arguments,
                     std::function<void(const std::string&)> on_line = {});

  struct Ended {
    std::string name;
    std::string how;  // "exited with 1", "was killed by signal 9"
  };
  // Reaps the children that have ended. Does not block.
  std::vector<Ended> Reap();

  // SIGTERM to one child, then to all others in the order of their start reversed; one that has not ended after
  // `patience`, or once `hurry` says so, is killed. Reaps all.
  void StopAll(absl::Duration patience);
  void Stop(const std::string& name, absl::Duration patience, const std::function<bool()>& hurry = {});
  pid_t PidOf(const std::string& name) const;  // -1: not running

 private:
  struct Child {
    std::string name;
    pid_t pid = -1;
    std::thread reader;
  };
  void Finish(Child& child);
  std::vector<std::unique_ptr<Child>> children_;
};

}  // namespace dovetail::cli
