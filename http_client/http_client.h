#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "http_client/url.h"

namespace boost::asio {
class io_context;
}

namespace dovetail::http_client {

struct HttpRequest {
  std::string method = "POST";
  std::string target;  // "/v1/completions"; the URL's path comes before it
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
};

// What one request meets, in this order: OnStatus once, OnBody any number of times, OnEnd once and last. After a
// failure OnEnd comes alone or next. No call begins another one of the same observer.
// Threads: called on the client's thread.
class HttpObserver {
 public:
  virtual ~HttpObserver() = default;
  virtual void OnStatus(int status, const std::string& reason) = 0;
  virtual void OnBody(std::string_view bytes) = 0;  // without the transfer encoding
  // kUnavailable: no connection, or one that broke; kDeadlineExceeded: no byte for the stall timeout; kCancelled.
  virtual void OnEnd(const absl::Status& status) = 0;
};

struct HttpClientOptions {
  bool verify_certificates = true;
  absl::Duration stall_timeout = absl::Minutes(10);  // without a byte in either direction
  std::string user_agent = "dovetail";
};

// A request under way. Dropping it does not end it.
// Threads: the client's thread only.
class HttpCall {
 public:
  virtual ~HttpCall() = default;
  virtual void Cancel() = 0;  // OnEnd(kCancelled) follows, unless the request has ended
};

// HTTP/1.1 requests to one server, each on a connection of its own among those that are kept open. Written on
// Boost.Beast, which comes with the Boost.Asio that the server uses: libcurl would bring a loop of its own and hide
// when bytes arrived.
// Threads: the one thread that runs io(), or calls Fetch while it does not run.
class HttpClient {
 public:
  // Looks the host up, which blocks. kUnavailable names it.
  static absl::StatusOr<std::unique_ptr<HttpClient>> Create(const Url& url, const HttpClientOptions& options);
  virtual ~HttpClient() = default;

  // `observer` is kept until OnEnd.
  virtual std::shared_ptr<HttpCall> Start(const HttpRequest& request, std::shared_ptr<HttpObserver> observer) = 0;

  // A whole answer, waited for. The status may be any; kResourceExhausted for a body of more than 64 MiB;
  // kDeadlineExceeded if it is not there after `limit`.
  struct Answer {
    int status = 0;
    std::string body;
  };
  absl::StatusOr<Answer> Fetch(const HttpRequest& request, absl::Duration limit = absl::Hours(24));

  virtual const Url& url() const = 0;
  virtual boost::asio::io_context& io() = 0;  // its loop; calls make progress only while it runs
};

}  // namespace dovetail::http_client
