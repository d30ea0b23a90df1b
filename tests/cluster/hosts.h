#pragma once
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace dovetail::test {

// Hosts on one machine: network namespaces joined by a bridge, each with a device data0. Host 0 is this process, whose
// network is its own from then on; the others last as long as the object, and end with this process whatever happens.
// Used by one thread.
class Hosts {
 public:
  // Before this process has other threads. kFailedPrecondition: hosts cannot be made here, and why.
  static absl::StatusOr<std::unique_ptr<Hosts>> Create(int count);
  ~Hosts();

  int count() const { return static_cast<int>(hosts_.size()) + 1; }
  std::string address(int host) const;

  // In a child process between fork and exec: makes it a program of the host, with the host's devices below /sys.
  // Async-signal-safe. False: it is none.
  bool Enter(int host) const;

  // What a host other than 0 and the rest send each other is lost from now on, without an error.
  bool Cut(int host);
  bool Mend(int host);
  // What is sent to it passes at this rate, as tc spells it. False: this kernel cannot do that.
  bool Squeeze(int host, const std::string& rate);

 private:
  struct Host {
    pid_t holder = -1;  // keeps the namespace
    int network = -1;   // of it
  };
  Hosts() = default;
  absl::Status Add();
  // Runs a program on the host and waits for its end. True: it said that all is well.
  bool Run(int host, std::vector<std::string> words) const;

  std::vector<Host> hosts_;  // from host 1 on
};

}  // namespace dovetail::test
