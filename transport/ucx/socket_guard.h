#pragma once
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/status.h"

// A check in front of UCX's TCP ports, which have none of their own.
//
// UCX listens on TCP as soon as a worker may use TCP, and it acts on what any client sends: its protocol has a request
// that stores bytes at an address of the client's choice, and malformed requests abort the process. Neither can be
// switched off. So the socket calls of this process pass through wrappers (socket_hooks.cc):
//
//   - A connection that is accepted at a guarded listener must begin with the listener's ticket. UCX sees no byte of it
//     before the whole ticket has come and matched. A connection that begins with anything else is reset.
//   - A connection that is made to a listener whose ticket is known begins with that ticket.
//
// Tickets travel with the addresses of nodes, over the control plane only. Like everything on TCP, a ticket crosses the
// network in clear: it keeps strangers out, not an eavesdropper (docs/security.md).
//
// Limits:  kMaxWaiting connections may owe a listener its ticket; one more costs the oldest of them its connection.
// Threads: thread-safe. UCX accepts on a thread of its own.

namespace dovetail::transport::ucx {

inline constexpr size_t kMaxWaiting = 64;

using Ticket = std::array<std::byte, 32>;
Ticket RandomTicket();  // from the system's random numbers

// Address and port of a TCP listener, IPv4 or IPv6.
class SocketAddress {
 public:
  SocketAddress() = default;
  // kInvalidArgument: of another family, or too short.
  static absl::StatusOr<SocketAddress> From(const sockaddr* address, socklen_t length);
  // The inverse of bytes(). kInvalidArgument: not of an encoded address's size.
  static absl::StatusOr<SocketAddress> FromBytes(std::string_view bytes);

  // Port and address, both in network order: 6 or 18 bytes.
  const std::string& bytes() const { return bytes_; }
  std::string ToString() const;  // "10.0.0.5:7200"

  auto operator<=>(const SocketAddress&) const = default;

 private:
  std::string bytes_;
};

struct GuardedListener {
  int fd = -1;
  SocketAddress address;
};

// The listeners of one UCX worker.
class GuardedListeners {
 public:
  explicit GuardedListeners(const Ticket& ticket) : ticket_(ticket) {}
  // From now on these listeners refuse every connection. Their sockets are UCX's to close.
  ~GuardedListeners();
  GuardedListeners(const GuardedListeners&) = delete;
  GuardedListeners& operator=(const GuardedListeners&) = delete;

  // Runs `open`. Sockets that this thread makes listen meanwhile are guarded from their first connection on.
  void Collect(absl::FunctionRef<void()> open);
  const std::vector<GuardedListener>& listeners() const { return listeners_; }

 private:
  const Ticket ticket_;
  std::vector<GuardedListener> listeners_;
};

// While it lives, connections from this process to `addresses` begin with `ticket`.
class KnownTicket {
 public:
  KnownTicket() = default;
  KnownTicket(std::vector<SocketAddress> addresses, const Ticket& ticket);
  ~KnownTicket();
  KnownTicket(KnownTicket&& other) noexcept { std::swap(addresses_, other.addresses_); }
  KnownTicket& operator=(KnownTicket&& other) noexcept {
    std::swap(addresses_, other.addresses_);
    return *this;
  }

 private:
  std::vector<SocketAddress> addresses_;
};

// Since the process began.
struct GuardCounters {
  uint64_t admitted = 0;   // connections whose ticket matched
  uint64_t refused = 0;    // connections that were reset: another ticket, none, or the oldest of too many
  uint64_t presented = 0;  // tickets sent
};
GuardCounters CountersOfGuard();

}  // namespace dovetail::transport::ucx
