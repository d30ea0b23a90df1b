#pragma once
#include <cstdint>
#include <string>

#include "base/status.h"

namespace dovetail::http_client {

// Where a server is: http or https, a host, a port, and what every path begins with.
// Threads: thread-compatible; a value.
struct Url {
  bool tls = false;
  std::string host;  // without the brackets of an IPv6 address
  uint16_t port = 80;
  std::string path;  // "" or "/prefix", without a slash at the end

  std::string HostHeader() const;  // "host:port", IPv6 in brackets
  std::string Text() const;        // "http://host:port/prefix"
};

// kInvalidArgument says what is missing or not understood: another scheme, no host, a port outside 1..65535, a user
// name, a query.
// Threads: pure.
absl::StatusOr<Url> ParseUrl(const std::string& text);

}  // namespace dovetail::http_client
