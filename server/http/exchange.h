#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/http/body_budget.h"
#include "server/http/request_head.h"
#include "server/openai/api_error.h"

namespace dovetail::server {

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  bool close = false;             // end the connection afterwards
  std::optional<ApiError> error;  // what the body says, for APIs that say it in a way of their own
};

class Connection;

// One request on a connection, until its response is complete. Calls after the client has left, or after the response
// is complete, do nothing.
// Threads: the connection's I/O thread only, except Post(), which is thread-safe, and body(), as it says.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<Connection> connection, RequestHead head, RequestBody body, std::string id);

  const RequestHead& head() const { return head_; }
  // A thread other than the I/O thread may read it only before any other part of the exchange is used.
  const std::string& body() const { return body_.bytes(); }
  void DropBody() { body_.Free(); }                // as soon as it is not needed: others may wait for its memory
  const std::string& id() const { return id_; }    // X-Request-Id, the client's or ours
  absl::Time arrived() const { return arrived_; }  // when its body was there
  int io_thread() const;

  void Respond(const HttpResponse& response);

  // A stream of server-sent events: the head goes out with the first bytes. `tokens` counts towards the backlog.
  void StartStream();
  void Write(const std::string& frames, int tokens);
  void EndStream();
  // From now on `frame` goes out whenever nothing did for `quiet`, until the response is complete; the first one starts
  // the stream. Where the client has not read what went out before, nothing is added.
  void KeepAlive(std::chrono::milliseconds quiet, std::string frame);
  bool streaming() const { return streaming_; }
  // on_timeout is called so long from now, unless the response is complete then. Once for an exchange.
  void LimitTime(std::chrono::milliseconds limit);

  struct Backlog {
    size_t bytes = 0;
    int tokens = 0;
  };
  Backlog backlog() const;  // written and not yet taken by the client's kernel

  // The client left, or did not read for too long; nothing can be sent any more. At most once, before the response is
  // complete.
  std::function<void()> on_gone;
  // The backlog is empty again.
  std::function<void()> on_drained;
  // The server is about to end: answer with an error now.
  std::function<void()> on_shutdown;
  // The time of the request is over: answer with an error now.
  std::function<void()> on_timeout;
  bool gone() const { return gone_; }
  bool complete() const { return complete_; }  // nothing more can be answered
  void Abort();                                // drops the connection

  void Post(std::function<void()> task);  // runs it on the I/O thread; from any thread

 private:
  friend class Connection;
  void Gone();

  std::shared_ptr<Connection> connection_;
  const RequestHead head_;
  RequestBody body_;
  const std::string id_;
  const absl::Time arrived_;
  bool streaming_ = false;
  bool complete_ = false;
  bool gone_ = false;
};

// What a server does with requests. Must not block.
// Threads: thread-safe; called on the I/O threads.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Of every answer to this request, errors that the protocol layer finds after the head included.
  virtual std::vector<std::pair<std::string, std::string>> CommonHeaders(const RequestHead& head) = 0;
  // After the head, before the body: a response to refuse it, or nothing.
  virtual std::optional<HttpResponse> OnHead(const RequestHead& head, const std::string& request_id) = 0;
  virtual void OnRequest(std::shared_ptr<Exchange> exchange) = 0;
  // Whether this request asks for the server's state: it is answered at once, also when all connections are taken.
  virtual bool IsProbe(const RequestHead& head) const = 0;
  // The answer to what the protocol layer refuses (malformed, too large, too slow). `path`: as far as it was read.
  virtual HttpResponse ProtocolError(int status, const std::string& message, std::string_view path,
                                     const std::string& request_id) = 0;
};

}  // namespace dovetail::server
