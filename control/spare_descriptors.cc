#include "control/spare_descriptors.h"

#include <dlfcn.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "base/clock.h"
#include "base/log.h"

namespace dovetail::control {
namespace {

constexpr int kMostAtOnce = 1024;  // turned away by one call, which a flood must not keep
constexpr int kSilentHandshakeMs = 10'000;
constexpr int64_t kBetweenLinesUs = 10'000'000;

std::atomic<int64_t> turned_away{0};
std::atomic<int64_t> next_line_us{0};

// The kernel gives the lowest descriptor that is free.
bool LeavesSpare(int fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return true;
  return fd + int64_t{kSpareDescriptors} < static_cast<int64_t>(limit.rlim_cur);
}

void TurnAway(int fd) {
  close(fd);
  const int64_t count = ++turned_away, now = absl::ToUnixMicros(SystemClock().Now());
  int64_t due = next_line_us;
  if (now < due || !next_line_us.compare_exchange_strong(due, now + kBetweenLinesUs)) return;
  LogWarning("a gRPC connection was turned away, the ", count, ". so far: only ", kSpareDescriptors,
             " more files may be open (ulimit -n)");
}

bool IsWantOfDescriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

void BoundConnections(grpc::ServerBuilder& builder) {
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kSilentHandshakeMs);
}

}  // namespace dovetail::control

extern "C" __attribute__((visibility("default"))) int accept4(int listener, sockaddr* address, socklen_t* length,
                                                              int flags) {
  namespace control = dovetail::control;
  static const auto next = reinterpret_cast<decltype(accept4)*>(dlsym(RTLD_NEXT, "accept4"));
  const socklen_t room = length == nullptr ? 0 : *length;
  for (int turn = 0; turn < control::kMostAtOnce; ++turn) {
    if (length != nullptr) *length = room;
    const int fd = next(listener, address, length, flags);
    if (fd >= 0 && control::LeavesSpare(fd)) return fd;
    if (fd < 0) {
      if (control::IsWantOfDescriptors(errno)) break;
      return -1;
    }
    control::TurnAway(fd);
  }
  errno = EAGAIN;
  return -1;
}
