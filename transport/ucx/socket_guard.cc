#include "transport/ucx/socket_guard.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/constant_time.h"
#include "base/mutex.h"
#include "transport/ucx/socket_hooks.h"
#include "transport/ucx/socket_marks.h"

namespace dovetail::transport::ucx {
namespace {

// What a guarded connection begins with. The first eight bytes are public: a client that knows nothing of tickets is
// told so at once.
struct Preamble {
  std::array<char, 8> magic = {'D', 'o', 'v', 'e', 't', 'a', 'i', 'l'};
  Ticket ticket{};
};
static_assert(sizeof(Preamble) == 40);

// A marked socket.
struct Marked {
  SocketMark mark = SocketMark::kNone;
  Preamble preamble;      // of a listener and of a connection that owes it: what is expected or sent
  Preamble received;      // of a connection that awaits it
  size_t moved = 0;       // bytes of it that were received or sent
  uint64_t accepted = 0;  // counts connections, to know the oldest
};

struct KnownListener {
  Ticket ticket;
  int holders = 0;
};

struct State {
  Mutex mutex;
  std::map<int, Marked> marked ABSL_GUARDED_BY(mutex);
  std::map<SocketAddress, KnownListener> known ABSL_GUARDED_BY(mutex);
  uint64_t accepted ABSL_GUARDED_BY(mutex) = 0;
  GuardCounters counters ABSL_GUARDED_BY(mutex);
};

// Wrapped calls come from every thread of the process until it ends, so this is never destroyed.
State& TheState() {
  static State& state = *new State;
  return state;
}

thread_local const Ticket* collecting = nullptr;  // of the GuardedListeners that collects on this thread
thread_local std::vector<GuardedListener>* collected = nullptr;

void SetMark(int fd, SocketMark mark) { socket_marks[fd].store(mark, std::memory_order_relaxed); }

void Forget(State& state, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  SetMark(fd, SocketMark::kNone);
  state.marked.erase(fd);
}

// The peer and UCX both see the end of the connection; UCX then closes the socket.
void Refuse(State& state, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  ++state.counters.refused;
  const linger reset{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  shutdown(fd, SHUT_RDWR);
}

void RefuseOldestOfTooMany(State& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mutex) {
  size_t waiting = 0;
  auto oldest = state.marked.end();
  for (auto it = state.marked.begin(); it != state.marked.end(); ++it) {
    if (it->second.mark != SocketMark::kAwaitsTicket) continue;
    ++waiting;
    if (oldest == state.marked.end() || it->second.accepted < oldest->second.accepted) oldest = it;
  }
  if (waiting > kMaxWaiting) Refuse(state, oldest->first);
}

}  // namespace

constinit std::atomic<SocketMark> socket_marks[kMaxMarkedDescriptor] = {};

Ticket RandomTicket() {
  Ticket ticket;
  DT_CHECK(getentropy(ticket.data(), ticket.size()) == 0, "the system gives no random numbers");
  return ticket;
}

// ---- addresses ----

absl::StatusOr<SocketAddress> SocketAddress::From(const sockaddr* address, socklen_t length) {
  SocketAddress result;
  const auto take = [&](const void* host, size_t host_bytes, in_port_t port) {
    result.bytes_.assign(reinterpret_cast<const char*>(&port), sizeof(port));
    result.bytes_.append(static_cast<const char*>(host), host_bytes);
    return result;
  };
  if (address != nullptr && address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    const auto& v4 = *reinterpret_cast<const sockaddr_in*>(address);
    return take(&v4.sin_addr, sizeof(v4.sin_addr), v4.sin_port);
  }
  if (address != nullptr && address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(address);
    return take(&v6.sin6_addr, sizeof(v6.sin6_addr), v6.sin6_port);
  }
  return InvalidArgument("socket address: neither IPv4 nor IPv6");
}

absl::StatusOr<SocketAddress> SocketAddress::FromBytes(std::string_view bytes) {
  if (bytes.size() != sizeof(in_port_t) + sizeof(in_addr) && bytes.size() != sizeof(in_port_t) + sizeof(in6_addr))
    return InvalidArgument("socket address: ", bytes.size(), " bytes are neither IPv4 nor IPv6");
  SocketAddress address;
  address.bytes_ = bytes;
  return address;
}

std::string SocketAddress::ToString() const {
  if (bytes_.empty()) return "";
  in_port_t port;
  std::memcpy(&port, bytes_.data(), sizeof(port));
  const bool v4 = bytes_.size() == sizeof(port) + sizeof(in_addr);
  char host[INET6_ADDRSTRLEN] = "";
  inet_ntop(v4 ? AF_INET : AF_INET6, bytes_.data() + sizeof(port), host, sizeof(host));
  return v4 ? absl::StrCat(host, ":", ntohs(port)) : absl::StrCat("[", host, "]:", ntohs(port));
}

// ---- listeners and tickets ----

void GuardedListeners::Collect(absl::FunctionRef<void()> open) {
  collecting = &ticket_;
  collected = &listeners_;
  open();
  collecting = nullptr;
  collected = nullptr;
}

GuardedListeners::~GuardedListeners() {
  State& state = TheState();
  MutexLock lock(state.mutex);
  for (const GuardedListener& listener : listeners_) {
    // Its number may be that of another socket by now, which is not a listener of the guard then.
    const auto it = state.marked.find(listener.fd);
    if (it != state.marked.end() && it->second.preamble.ticket == ticket_) it->second.preamble.ticket = RandomTicket();
  }
}

KnownTicket::KnownTicket(std::vector<SocketAddress> addresses, const Ticket& ticket)
    : addresses_(std::move(addresses)) {
  State& state = TheState();
  MutexLock lock(state.mutex);
  for (const SocketAddress& address : addresses_) {
    KnownListener& known = state.known[address];
    known.ticket = ticket;  // of the latest incarnation that listens there
    ++known.holders;
  }
}

KnownTicket::~KnownTicket() {
  if (addresses_.empty()) return;
  State& state = TheState();
  MutexLock lock(state.mutex);
  for (const SocketAddress& address : addresses_) {
    const auto it = state.known.find(address);
    if (it != state.known.end() && --it->second.holders == 0) state.known.erase(it);
  }
}

GuardCounters CountersOfGuard() {
  State& state = TheState();
  MutexLock lock(state.mutex);
  return state.counters;
}

// ---- calls of the wrappers ----

void OnListening(int fd) {
  if (collecting == nullptr) return;
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) return;
  const auto address = SocketAddress::From(reinterpret_cast<const sockaddr*>(&bound), length);
  if (!address.ok() || fd >= kMaxMarkedDescriptor) return;
  State& state = TheState();
  MutexLock lock(state.mutex);
  state.marked[fd] = {.mark = SocketMark::kListener, .preamble = {.ticket = *collecting}};
  SetMark(fd, SocketMark::kListener);
  collected->push_back({fd, *address});
}

bool OnAccepted(int listener, int fd) {
  State& state = TheState();
  MutexLock lock(state.mutex);
  const auto it = state.marked.find(listener);
  if (it == state.marked.end() || it->second.mark != SocketMark::kListener) return true;
  if (fd >= kMaxMarkedDescriptor) {
    ++state.counters.refused;
    return false;
  }
  state.marked[fd] = {.mark = SocketMark::kAwaitsTicket, .preamble = it->second.preamble, .accepted = ++state.accepted};
  SetMark(fd, SocketMark::kAwaitsTicket);
  RefuseOldestOfTooMany(state);
  return true;
}

void OnConnecting(int fd, const sockaddr* address, socklen_t length) {
  if (fd < 0 || fd >= kMaxMarkedDescriptor) return;
  const auto to = SocketAddress::From(address, length);
  if (!to.ok()) return;
  State& state = TheState();
  MutexLock lock(state.mutex);
  const auto known = state.known.find(*to);
  if (known == state.known.end()) return;
  state.marked[fd] = {.mark = SocketMark::kOwesTicket, .preamble = {.ticket = known->second.ticket}};
  SetMark(fd, SocketMark::kOwesTicket);
}

void OnClosing(int fd) {
  State& state = TheState();
  MutexLock lock(state.mutex);
  Forget(state, fd);
}

TicketState ReadTicket(int fd) {
  State& state = TheState();
  MutexLock lock(state.mutex);
  const auto it = state.marked.find(fd);
  if (it == state.marked.end()) return TicketState::kOpen;
  Marked& socket = it->second;
  auto* const bytes = reinterpret_cast<std::byte*>(&socket.received);
  while (socket.moved < sizeof(Preamble)) {
    const ssize_t got = unwrapped::Receive(fd, bytes + socket.moved, sizeof(Preamble) - socket.moved, MSG_DONTWAIT);
    if (got == 0) return TicketState::kEnded;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? TicketState::kAgain : TicketState::kRefused;
    socket.moved += static_cast<size_t>(got);
    const size_t of_magic = std::min(socket.moved, sizeof(socket.received.magic));
    if (std::memcmp(socket.received.magic.data(), socket.preamble.magic.data(), of_magic) != 0) {
      Refuse(state, fd);
      return TicketState::kRefused;
    }
  }
  if (!EqualInConstantTime(socket.received.ticket, socket.preamble.ticket)) {
    Refuse(state, fd);
    return TicketState::kRefused;
  }
  ++state.counters.admitted;
  Forget(state, fd);
  return TicketState::kOpen;
}

bool SendTicket(int fd) {
  State& state = TheState();
  MutexLock lock(state.mutex);
  const auto it = state.marked.find(fd);
  if (it == state.marked.end()) return true;
  Marked& socket = it->second;
  const auto* const bytes = reinterpret_cast<const std::byte*>(&socket.preamble);
  while (socket.moved < sizeof(Preamble)) {
    const ssize_t sent =
        unwrapped::Send(fd, bytes + socket.moved, sizeof(Preamble) - socket.moved, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    socket.moved += static_cast<size_t>(sent);
  }
  ++state.counters.presented;
  Forget(state, fd);
  return true;
}

}  // namespace dovetail::transport::ucx
