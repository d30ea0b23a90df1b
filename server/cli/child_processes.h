#pragma once
#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"

namespace dovetail::cli {

// Processes of this binary that a parent starts and stops. Their output appears line by line behind their names. Of
// their logs only what this process would log itself is shown. They get SIGTERM when the parent dies, however it dies.
// Threads: thread-compatible.
class ChildProcesses {
 public:
  ChildProcesses();
  ~ChildProcesses();  // StopAll

  // Called with the child's name at that time and the text of each line (log_flags.h: MessageOf), on the child's reader
  // thread.
  using OnLine = std::function<void(const std::string& name, const std::string& line)>;
  // What a child reads on standard input. kLines: what Tell() says; it ends with this process, however that ends.
  enum class Input : bool { kOfParent, kLines };

  // `arguments` without the binary's name.
  // Errors: kResourceExhausted: the system refused a pipe or a process.
  absl::Status Start(const std::string& name, const std::vector<std::string>& arguments, OnLine on_line = {},
                     Input input = Input::kOfParent);

  // Writes a line to a child that was started with Input::kLines. Does not block.
  // Errors: kUnavailable: it has ended, or does not read.
  absl::Status Tell(const std::string& name, const std::string& line);
  // Its standard input ends. Nothing happens if it does not run.
  void EndInput(const std::string& name);
  // The child is called `to` from here on, by this object and before the lines that are read from then on.
  // Requires: `name` runs, and none is called `to`.
  void Rename(const std::string& name, const std::string& to);

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
  class Child;
  Child* Find(const std::string& name) const;  // null: not running
  std::vector<std::unique_ptr<Child>> children_;
};

}  // namespace dovetail::cli
