#include "transport/ucx/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>

namespace dovetail::transport::ucx {
namespace {

inline constexpr int kFieldsFromStateToStart = 20;  // proc(5): fields 3 to 22

// 0: there is no such process, or /proc does not say.
uint64_t StartOf(uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // the name before it may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int i = 0; i < kFieldsFromStateToStart; ++i) fields >> field;
  return field.empty() ? 0 : std::strtoull(field.c_str(), nullptr, 10);
}

}  // namespace

ProcessIdentity ThisProcess() {
  const auto pid = static_cast<uint32_t>(getpid());
  return {pid, StartOf(pid)};
}

// The descriptor refers to the process that has the number now; the start time says whether it is the process meant.
ProcessWatch::ProcessWatch(const ProcessIdentity& process) {
  if (process.pid == 0 || process.start == 0) return;
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
  if (fd_ < 0) {
    ended_ = errno == ESRCH;
    return;
  }
  ended_ = StartOf(process.pid) != process.start;
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) close(fd_);
}

bool ProcessWatch::Ended() {
  if (ended_ || fd_ < 0) return ended_;
  pollfd watched{fd_, POLLIN, 0};
  ended_ = poll(&watched, 1, 0) > 0;
  return ended_;
}

}  // namespace dovetail::transport::ucx
