#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/http/exchange.h"
#include "server/http/request_head.h"

namespace dovetail::server {

// Which web pages a browser allows to use the API, in addition to those of the API's own origin.
// Source: the Fetch standard, "CORS protocol". It keeps pages from using a browser; it keeps no other client from
// anything.
struct CorsOptions {
  std::vector<std::string> origins;          // "https://chat.example.com"; {"*"}: every page; empty: none
  std::vector<std::string> methods = {"*"};  // that a page may use; "*": those of the API
  std::vector<std::string> headers = {"*"};  // that a page may send; "*": all that it asks for
  bool credentials = false;                  // cookies and client certificates of the browser

  // kInvalidArgument names the flag and what it may be.
  absl::Status Validate() const;
};

// Threads: immutable.
class Cors {
 public:
  explicit Cors(CorsOptions options) : options_(std::move(options)) {}

  // The headers of every answer to this request, errors and streams included.
  std::vector<std::pair<std::string, std::string>> HeadersFor(const RequestHead& head) const;

  // The answer to a browser's question before the request itself: it carries no key. nullopt: this is no such question.
  std::optional<HttpResponse> Preflight(const RequestHead& head) const;

 private:
  bool AllowsOrigin(const std::string& origin) const;
  bool AnyOrigin() const { return options_.origins.size() == 1 && options_.origins[0] == "*"; }
  const CorsOptions options_;
};

}  // namespace dovetail::server
