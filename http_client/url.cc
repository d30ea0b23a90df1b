#include "http_client/url.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"

namespace dovetail::http_client {
namespace {

absl::Status Bad(const std::string& text, const std::string& what) {
  return InvalidArgument("'", text.substr(0, 200), "': ", what, "; a URL is like http://127.0.0.1:8000");
}

}  // namespace

std::string Url::HostHeader() const {
  const bool v6 = host.find(':') != std::string::npos;
  return absl::StrCat(v6 ? "[" : "", host, v6 ? "]" : "", ":", port);
}

std::string Url::Text() const { return absl::StrCat(tls ? "https://" : "http://", HostHeader(), path); }

absl::StatusOr<Url> ParseUrl(const std::string& text) {
  Url url;
  std::string rest;
  if (absl::StartsWith(text, "http://")) {
    rest = text.substr(7);
  } else if (absl::StartsWith(text, "https://")) {
    rest = text.substr(8);
    url.tls = true;
    url.port = 443;
  } else {
    return Bad(text, "begins with neither http:// nor https://");
  }
  for (const unsigned char c : rest)
    if (c <= ' ' || c == 0x7f) return Bad(text, "has white space or a control character");
  const size_t slash = rest.find('/');
  std::string authority = rest.substr(0, slash);
  if (slash != std::string::npos) url.path = rest.substr(slash);
  if (url.path.find_first_of("?#") != std::string::npos || authority.find_first_of("?#") != std::string::npos)
    return Bad(text, "has a query or a fragment");
  while (!url.path.empty() && url.path.back() == '/') url.path.pop_back();
  if (authority.find('@') != std::string::npos) return Bad(text, "has a user name");
  size_t colon = authority.rfind(':');
  if (!authority.empty() && authority[0] == '[') {
    const size_t end = authority.find(']');
    if (end == std::string::npos) return Bad(text, "has no ] after the IPv6 address");
    url.host = authority.substr(1, end - 1);
    colon = end + 1 < authority.size() ? end + 1 : std::string::npos;
    if (colon != std::string::npos && authority[colon] != ':') return Bad(text, "has text after the ]");
  } else {
    url.host = authority.substr(0, colon);
  }
  if (url.host.empty()) return Bad(text, "has no host");
  if (colon != std::string::npos) {
    uint32_t port = 0;
    if (!absl::SimpleAtoi(authority.substr(colon + 1), &port) || port == 0 || port > 65535)
      return Bad(text, "has a port outside 1..65535");
    url.port = static_cast<uint16_t>(port);
  }
  return url;
}

}  // namespace dovetail::http_client
