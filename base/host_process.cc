#include "base/host_process.h"

#include <unistd.h>

#include <array>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace dovetail {
namespace {

// Of /proc/PID/stat, behind the name: that may hold spaces and parentheses.
struct Stat {
  char state = 0;  // 0: no such process
  uint64_t started = 0;
};

Stat StatOf(uint32_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  Stat stat;
  fields >> stat.state;
  std::string between;
  for (int field = 4; field < 22; ++field) fields >> between;
  fields >> stat.started;
  return fields ? stat : Stat{};
}

std::string LinkAt(const char* path) {
  std::array<char, 128> target{};
  const ssize_t length = readlink(path, target.data(), target.size());
  return length <= 0 ? std::string() : std::string(target.data(), static_cast<size_t>(length));
}

std::string ThisHost() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  file >> boot;
  const std::string processes = LinkAt("/proc/self/ns/pid"), networks = LinkAt("/proc/self/ns/net");
  if (boot.empty() || processes.empty() || networks.empty()) return "";
  return absl::StrCat(boot, " ", processes, " ", networks);
}

}  // namespace

HostProcess ThisProcess() {
  const auto pid = static_cast<uint32_t>(getpid());
  const Stat stat = StatOf(pid);
  return stat.state == 0 ? HostProcess{} : HostProcess{ThisHost(), pid, stat.started};
}

bool RunsHere(const HostProcess& process) {
  if (process.host.empty() || process.pid == static_cast<uint32_t>(getpid()) || process.host != ThisHost())
    return false;
  const Stat stat = StatOf(process.pid);
  return stat.state != 0 && stat.started == process.started &&
         std::string_view("TtZXx").find(stat.state) == std::string_view::npos;
}

}  // namespace dovetail
