// Wrappers around the socket calls through which UCX's TCP transport moves its bytes (socket_guard.h says why). The
// dynamic linker gives every library of the process the program's definition of such a call, and RTLD_NEXT finds the
// one of the C library. Calls that the guard does not have to know of pass through unchanged.
//
// UCX 1.13 and 1.22 use exactly these calls; tests/transport_ucx/socket_guard_test.cc attacks the build that is used,
// and UcxPeer refuses a TCP peer whose connections never passed here.
#include "transport/ucx/socket_hooks.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>

#include "transport/ucx/socket_marks.h"

namespace dovetail::transport::ucx {
namespace {

template <typename Function>
Function* NextOf(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

ssize_t Fail(int error) {
  errno = error;
  return -1;
}

// Whether the caller may go on; otherwise `result` is what the call returns.
bool MayReceive(int fd, ssize_t& result) {
  if (MarkOf(fd) != SocketMark::kAwaitsTicket) return true;
  switch (ReadTicket(fd)) {
    case TicketState::kOpen: return true;
    case TicketState::kAgain: result = Fail(EAGAIN); break;
    case TicketState::kEnded: result = 0; break;
    case TicketState::kRefused: result = Fail(ECONNRESET); break;
  }
  return false;
}

bool MaySend(int fd) { return MarkOf(fd) != SocketMark::kOwesTicket || SendTicket(fd); }

}  // namespace

namespace unwrapped {

int Close(int fd) {
  static const auto next = NextOf<decltype(close)>("close");
  return next(fd);
}
ssize_t Receive(int fd, void* data, size_t bytes, int flags) {
  static const auto next = NextOf<decltype(recv)>("recv");
  return next(fd, data, bytes, flags);
}
ssize_t Send(int fd, const void* data, size_t bytes, int flags) {
  static const auto next = NextOf<decltype(send)>("send");
  return next(fd, data, bytes, flags);
}

}  // namespace unwrapped
}  // namespace dovetail::transport::ucx

namespace guard = dovetail::transport::ucx;

extern "C" {

__attribute__((visibility("default"))) int listen(int fd, int backlog) noexcept {
  static const auto next = guard::NextOf<decltype(listen)>("listen");
  const int result = next(fd, backlog);
  if (result == 0) guard::OnListening(fd);
  return result;
}

__attribute__((visibility("default"))) int accept(int listener, sockaddr* address, socklen_t* length) {
  static const auto next = guard::NextOf<decltype(accept)>("accept");
  const socklen_t room = length == nullptr ? 0 : *length;
  while (true) {
    if (length != nullptr) *length = room;
    const int fd = next(listener, address, length);
    if (fd < 0 || guard::MarkOf(listener) == guard::SocketMark::kNone || guard::OnAccepted(listener, fd)) return fd;
    guard::unwrapped::Close(fd);
  }
}

__attribute__((visibility("default"))) int connect(int fd, const sockaddr* address, socklen_t length) {
  static const auto next = guard::NextOf<decltype(connect)>("connect");
  guard::OnConnecting(fd, address, length);
  return next(fd, address, length);
}

__attribute__((visibility("default"))) ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  ssize_t result = 0;
  return guard::MayReceive(fd, result) ? guard::unwrapped::Receive(fd, data, bytes, flags) : result;
}

__attribute__((visibility("default"))) ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  return guard::MaySend(fd) ? guard::unwrapped::Send(fd, data, bytes, flags) : -1;
}

__attribute__((visibility("default"))) ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto next = guard::NextOf<decltype(sendmsg)>("sendmsg");
  return guard::MaySend(fd) ? next(fd, message, flags) : -1;
}

__attribute__((visibility("default"))) int close(int fd) {
  if (guard::MarkOf(fd) != guard::SocketMark::kNone) guard::OnClosing(fd);
  return guard::unwrapped::Close(fd);
}

}  // extern "C"
