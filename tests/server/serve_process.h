#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "server/openai/json.h"
#include "tests/server/raw_client.h"

namespace dovetail::server::test {

// What a command left behind.
struct CommandResult {
  int exit_code = -1;  // 128 + the signal that ended it
  std::string out, err;
};

// Runs the `dovetail` binary of this build to its end; killed after 60 s. With `terminal` its stderr is a terminal.
// `open_files`: its limit of them, soft and hard; 0: that of this process.
CommandResult RunDovetail(const std::vector<std::string>& arguments, bool terminal = false, int open_files = 0);

// `dovetail serve ARGUMENTS... --port 0` as a process of its own. The constructor waits until it listens and is ready.
class ServeProcess {
 public:
  explicit ServeProcess(std::vector<std::string> arguments, int open_files = 0);
  ~ServeProcess();  // kills it, if it still runs
  ServeProcess(const ServeProcess&) = delete;
  ServeProcess& operator=(const ServeProcess&) = delete;

  int port() const { return port_; }
  pid_t pid() const { return pid_; }
  RawResponse Ask(const std::string& request) const;
  Json AskJson(const std::string& request, int status = 200) const;  // expects that status, and JSON

  // The sum of a metric over its labels; `name` may go on with labels: "x{a=\"b\"". 0 when it is not there.
  double Metric(const std::string& name) const;
  // Asks for the metric until it has this value; false after 30 s.
  bool WaitForMetric(const std::string& name, double value) const;

  void Signal(int signal) const;
  int Wait();               // for the end: as CommandResult::exit_code; 60 s at most
  std::string ErrorText();  // what it wrote to stderr; after Wait()

 private:
  pid_t pid_ = -1;
  int port_ = 0;
  std::string error_path_;
};

}  // namespace dovetail::server::test
