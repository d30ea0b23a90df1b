#include "transport/ucx/worker_sockets.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <ucs/async/async_fwd.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "transport/ucx/socket_marks.h"

namespace dovetail::transport::ucx {
namespace {

int OptionOf(int fd, int option) {
  int value = -1;
  socklen_t length = sizeof(value);
  return getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 ? value : -1;
}

bool IsTcp(int fd) {
  const int domain = OptionOf(fd, SO_DOMAIN);
  return (domain == AF_INET || domain == AF_INET6) && OptionOf(fd, SO_TYPE) == SOCK_STREAM;
}

int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return -1;
  return address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                       : reinterpret_cast<const sockaddr_in&>(address).sin_port;
}

// Those of this process for which wanted(fd), in ascending order.
template <typename Wanted>
std::vector<int> TcpSockets(Wanted&& wanted) {
  std::vector<int> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd >= 0 && IsTcp(fd) && wanted(fd)) found.push_back(fd);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void AddWatched(int epoll_fd, std::vector<int>& found) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll_fd));
  for (std::string line; std::getline(info, line);) {
    int fd = -1;
    if (!line.starts_with("tfd:")) continue;
    const size_t digits = line.find_first_not_of(" \t", 4);
    if (digits == std::string::npos) continue;
    std::from_chars(line.data() + digits, line.data() + line.size(), fd);
    if (fd < 0 || std::find(found.begin(), found.end(), fd) != found.end()) continue;
    found.push_back(fd);
    AddWatched(fd, found);  // finds nothing unless it is a set itself
  }
}

}  // namespace

std::vector<int> WatchedBy(int epoll_fd) {
  std::vector<int> found;
  AddWatched(epoll_fd, found);
  return found;
}

int CountConnections(const std::vector<int>& fds) {
  return static_cast<int>(std::count_if(fds.begin(), fds.end(), [](int fd) {
    return MarkOf(fd) != SocketMark::kAwaitsTicket && MarkOf(fd) != SocketMark::kListener && IsTcp(fd);
  }));
}

void CloseTcpSockets(const std::vector<int>& fds) {
  for (const int fd : fds)
    if (IsTcp(fd)) close(fd);
}

void CloseListeners(const std::vector<GuardedListener>& listeners) {
  for (const auto& [fd, address] : listeners) {
    if (!IsTcp(fd) || ucs_async_remove_handler(fd, 1) != UCS_OK) continue;  // what has none there belongs to others
    const int port = PortOf(fd);
    CloseTcpSockets(TcpSockets([port](int other) { return PortOf(other) == port; }));
  }
}

}  // namespace dovetail::transport::ucx
