#include "tests/cluster/hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace dovetail::test {
namespace {

std::string PortOf(int host) { return absl::StrCat("port", host); }

}  // namespace

absl::StatusOr<std::unique_ptr<Hosts>> Hosts::Create(int count) {
  std::unique_ptr<Hosts> hosts(new Hosts);
  if (unshare(CLONE_NEWNET) != 0) return FailedPrecondition("no network namespaces: ", std::strerror(errno));
  if (!hosts->Run(0, {"ip", "link", "set", "lo", "up"}))
    return FailedPrecondition("the program ip (iproute2) is not installed");
  if (!hosts->Run(0, {"ip", "link", "add", "data0", "type", "bridge"}) ||
      !hosts->Run(0, {"ip", "address", "add", hosts->address(0) + "/24", "dev", "data0"}) ||
      !hosts->Run(0, {"ip", "link", "set", "data0", "up"}))
    return FailedPrecondition("no bridges");
  for (int i = 1; i < count; ++i) DT_RETURN_IF_ERROR(hosts->Add());
  return hosts;
}

Hosts::~Hosts() {
  for (const Host& host : hosts_) {
    kill(host.holder, SIGKILL);
    waitpid(host.holder, nullptr, 0);
    close(host.network);
  }
}

std::string Hosts::address(int host) const { return absl::StrCat("10.79.0.", host + 1); }

absl::Status Hosts::Add() {
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) return FailedPrecondition("pipe: ", std::strerror(errno));
  Host host;
  host.holder = fork();
  if (host.holder == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const char made = unshare(CLONE_NEWNET) == 0 ? 1 : 0;
    if (write(ready[1], &made, 1) == 1)
      while (true) pause();
    _exit(1);
  }
  char made = 0;
  const bool told = read(ready[0], &made, 1) == 1;
  close(ready[0]);
  close(ready[1]);
  host.network = open(absl::StrCat("/proc/", host.holder, "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
  hosts_.push_back(host);
  const int number = count() - 1;
  if (!told || made != 1 || host.network < 0) return FailedPrecondition("no second network namespace");
  if (!Run(0, {"ip", "link", "add", PortOf(number), "type", "veth", "peer", "name", "data0", "netns",
               std::to_string(host.holder)}) ||
      !Mend(number) || !Run(number, {"ip", "link", "set", "lo", "up"}) ||
      !Run(number, {"ip", "address", "add", address(number) + "/24", "dev", "data0"}) ||
      !Run(number, {"ip", "link", "set", "data0", "up"}))
    return FailedPrecondition("no veth devices");
  return absl::OkStatus();
}

bool Hosts::Enter(int host) const {
  if (host > 0 && setns(hosts_[host - 1].network, CLONE_NEWNET) != 0) return false;
  // /sys shows the devices of the namespace it was mounted in.
  return unshare(CLONE_NEWNS) == 0 && mount("", "/", nullptr, MS_SLAVE | MS_REC, nullptr) == 0 &&
         umount2("/sys", MNT_DETACH) == 0 && mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
}

bool Hosts::Run(int host, std::vector<std::string> words) const {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (host > 0 && setns(hosts_[host - 1].network, CLONE_NEWNET) != 0) _exit(1);
    const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(nowhere, STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool Hosts::Cut(int host) { return Run(0, {"ip", "link", "set", PortOf(host), "nomaster"}); }

bool Hosts::Mend(int host) {
  return Run(0, {"ip", "link", "set", PortOf(host), "master", "data0"}) &&
         Run(0, {"ip", "link", "set", PortOf(host), "up"});
}

bool Hosts::Squeeze(int host, const std::string& rate) {
  return Run(0, {"tc", "qdisc", "replace", "dev", PortOf(host), "root", "tbf", "rate", rate, "burst", "4kb", "latency",
                 "100ms"});
}

}  // namespace dovetail::test
