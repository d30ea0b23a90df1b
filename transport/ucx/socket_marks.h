#pragma once
#include <sys/socket.h>

#include <atomic>
#include <cstdint>

// What the socket guard has to do at a socket call, by descriptor: the part of the guard that the wrappers of
// socket_hooks.cc call. Every other socket of the process pays one relaxed load.
// Threads: thread-safe.

namespace dovetail::transport::ucx {

inline constexpr int kMaxMarkedDescriptor = 1 << 16;  // a listener with a larger number refuses every connection

enum class SocketMark : uint8_t {
  kNone,
  kListener,      // guarded
  kAwaitsTicket,  // accepted at a guarded listener, its ticket has not come
  kOwesTicket,    // made to a listener whose ticket is known, the ticket has not been sent
};

extern constinit std::atomic<SocketMark> socket_marks[kMaxMarkedDescriptor];

inline SocketMark MarkOf(int fd) {
  return fd < 0 || fd >= kMaxMarkedDescriptor ? SocketMark::kNone : socket_marks[fd].load(std::memory_order_relaxed);
}

// A listen() on `fd` succeeded.
void OnListening(int fd);
// A connection was accepted at a listener. False: it must be closed.
bool OnAccepted(int listener, int fd);
// `fd` is about to connect.
void OnConnecting(int fd, const sockaddr* address, socklen_t length);
// `fd` is about to be closed.
void OnClosing(int fd);

// Reads what there is of the ticket that `fd` awaits. kOpen: it has come and matched, what follows is for UCX.
// kAgain: more of it must come. kEnded: the other end closed. kRefused: it is wrong.
enum class TicketState { kOpen, kAgain, kEnded, kRefused };
TicketState ReadTicket(int fd);

// Sends what is left of the ticket that `fd` owes. False: errno says why not all of it.
bool SendTicket(int fd);

}  // namespace dovetail::transport::ucx
