#include "control/listening.h"

#include <grpc/support/log.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/log.h"

namespace dovetail::control {
namespace {

// 0: it can be bound. Negative: the name is not known.
int ErrorOfBinding(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  int error = 0;
  for (const addrinfo* at = found; at != nullptr && error == 0; at = at->ai_next) {
    const int tried = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (tried < 0) continue;
    // As gRPC does: a port whose former connections are still being closed is free.
    const int on = 1;
    setsockopt(tried, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(tried, at->ai_addr, at->ai_addrlen) != 0 || listen(tried, 1) != 0) error = errno;
    close(tried);
  }
  freeaddrinfo(found);
  return error;
}

}  // namespace

void TameGrpc() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function([](gpr_log_func_args* line) {
      LogLine(LogLevel::kDebug, absl::StrCat("gRPC: ", std::string(line->message).substr(0, 512)));
    });
  });
}

absl::Status WhyNotListening(const std::string& flag, const std::string& listen) {
  const size_t colon = listen.rfind(':');
  std::string host = listen.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string port = colon == std::string::npos ? "" : listen.substr(colon + 1);
  switch (const int error = ErrorOfBinding(host, port)) {
    case EADDRINUSE:
      return absl::AlreadyExistsError(absl::StrCat(flag, " ", listen,
                                                   ": cannot listen there; the port is taken by "
                                                   "another process (a second scheduler or server?): stop that one, "
                                                   "or choose another port"));
    case EADDRNOTAVAIL:
      return InvalidArgument(flag, " ", listen, ": cannot listen there; ", host,
                             " is no address of this host: give one of its own, or 0.0.0.0 for all");
    case EACCES:
      return FailedPrecondition(flag, " ", listen, ": cannot listen there; this user may not have port ", port,
                                ": choose one above 1023");
    case -1: return InvalidArgument(flag, " ", listen, ": the host name is not known; check its spelling");
    default:
      return absl::UnavailableError(
          absl::StrCat(flag, " ", listen, ": cannot listen there; ", error == 0 ? "try again" : std::strerror(error)));
  }
}

}  // namespace dovetail::control
