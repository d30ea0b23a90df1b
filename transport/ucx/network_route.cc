#include "transport/ucx/network_route.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <memory>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace dovetail::transport::ucx {
namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string_view host_bytes() const {
    if (storage.ss_family == AF_INET6)
      return {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr), 16};
    return {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr), 4};
  }
  bool IsWildcard() const {
    const std::string_view bytes = host_bytes();
    return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
  }
  std::string ToString() const {
    char text[INET6_ADDRSTRLEN] = "";
    inet_ntop(storage.ss_family, host_bytes().data(), text, sizeof(text));
    return text;
  }
};

absl::StatusOr<Address> Resolve(const std::string& host_and_port) {
  std::string host = host_and_port.substr(0, host_and_port.rfind(':'));
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), "9", &hints, &found); error != 0)
    return absl::UnavailableError(absl::StrCat(host, ": ", gai_strerror(error), "; check the spelling of the name"));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  return address;
}

// The address that this host would send from. Nothing is sent.
absl::StatusOr<Address> SourceTowards(const Address& to) {
  const int fd = socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  Address from;
  from.length = sizeof(from.storage);
  const bool found = fd >= 0 && connect(fd, to.get(), to.length) == 0 && getsockname(fd, from.get(), &from.length) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!found)
    return absl::UnavailableError(absl::StrCat("no route leads to ", to.ToString(), ": ", std::strerror(error)));
  return from;
}

absl::StatusOr<NetworkRoute> RouteOver(const Address& own) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return ResourceExhausted("the interfaces of this host: ", std::strerror(errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(all, freeifaddrs);
  // All of 127.0.0.0/8 belongs to the loopback interface, which lists 127.0.0.1 alone.
  const bool on_loopback_net = own.storage.ss_family == AF_INET && own.host_bytes()[0] == 127;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != own.storage.ss_family) continue;
    Address other;
    const bool v6 = own.storage.ss_family == AF_INET6;
    std::memcpy(&other.storage, entry->ifa_addr, v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    const bool is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (other.host_bytes() != own.host_bytes() && !(on_loopback_net && is_loopback)) continue;
    return NetworkRoute{.loopback = is_loopback, .interface = entry->ifa_name, .address = own.ToString()};
  }
  return absl::UnavailableError(absl::StrCat("no interface of this host has the address ", own.ToString()));
}

int ReadNumber(const std::filesystem::path& path) {
  std::ifstream file(path);
  int number = 0;
  file >> std::setbase(0) >> number;
  return number;
}

}  // namespace

absl::StatusOr<NetworkRoute> RouteTo(const std::string& address) {
  DT_ASSIGN_OR_RETURN(const Address to, Resolve(address));
  DT_ASSIGN_OR_RETURN(const Address from, SourceTowards(to));
  return RouteOver(from);
}

absl::StatusOr<NetworkRoute> RouteAt(const std::string& address) {
  DT_ASSIGN_OR_RETURN(const Address at, Resolve(address));
  if (at.IsWildcard()) return NetworkRoute{.loopback = false, .interface = "", .address = at.ToString()};
  return RouteOver(at);
}

std::string DevicesOf(const std::string& interface) {
  std::vector<std::string> devices = {interface};
  const std::filesystem::path net = std::filesystem::path("/sys/class/net") / interface;
  std::error_code error;
  std::vector<std::string> adapters;
  for (const auto& entry : std::filesystem::directory_iterator(net / "device" / "infiniband", error))
    adapters.push_back(entry.path().filename().string());
  std::sort(adapters.begin(), adapters.end());
  const int port = ReadNumber(net / "dev_port") + 1;
  for (const std::string& adapter : adapters) devices.push_back(absl::StrCat(adapter, ":", port));
  return absl::StrJoin(devices, ",");
}

bool LeaveTheHost(const std::string& devices) {
  const std::vector<std::string> names = absl::StrSplit(devices, ',');
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    const std::filesystem::path classes = "/sys/class", adapter = name.substr(0, name.find(':'));
    std::error_code ignored;
    if (std::filesystem::exists(classes / "infiniband" / adapter, ignored)) return true;
    const std::filesystem::path flags = classes / "net" / name / "flags";
    return std::filesystem::exists(flags, ignored) && (ReadNumber(flags) & IFF_LOOPBACK) == 0;
  });
}

}  // namespace dovetail::transport::ucx
