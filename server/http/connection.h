#pragma once
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <memory>
#include <string>
#include <utility>  // before Boost 1.74's asio, which forgets it in C++20

#include "server/http/body_decoder.h"
#include "server/http/body_pace.h"
#include "server/http/exchange.h"
#include "server/http/http_counters.h"
#include "server/http/options.h"
#include "server/http/quiet_timer.h"
#include "server/http/tls_session.h"

namespace dovetail::server {

class Connection;

// What connections share: the listener.
// Threads: thread-safe; called on the I/O threads.
class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;
  virtual void OnClosed(Connection* connection) = 0;
  // Of a connection with a place: between requests, and no longer. New ones are idle.
  virtual void OnIdle(Connection* connection) = 0;
  virtual void OnBusy(Connection* connection) = 0;
  // For a connection without a place that has a request; may end another that is idle.
  virtual bool TakePlace(Connection* connection) = 0;
  virtual void OnStays(Connection* connection) = 0;  // it could not make room
  virtual void OnExchangeBegan() = 0;
  virtual void OnExchangeEnded() = 0;
  virtual std::string NewRequestId() = 0;
  // `client`: its address; `what`: of the log.
  virtual void OnTlsFailure(TlsFailure why, const std::string& client, const std::string& what) = 0;
  virtual HttpCounters& counters() = 0;
  virtual const std::shared_ptr<BodyBudget>& bodies() = 0;
};

// One accepted socket: reads heads and bodies within limits and deadlines, hands requests to the handler one after the
// other, writes what they answer. The read side is always watched, so that a client that leaves is noticed while its
// answer is made.
// Threads: its I/O thread only.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // `tls`: what new sessions are made of; null: plain TCP.
  Connection(boost::asio::ip::tcp::socket socket, int io_thread, const HttpServerOptions& options, HttpHandler& handler,
             ConnectionOwner& owner, const std::shared_ptr<SSL_CTX>& tls);
  ~Connection();

  void Start(bool has_place);  // without a place it answers probes only
  void Close();                // at once
  void MakeRoom();             // closes it, unless it has a place and a request is under way
  void ShutdownExchange();     // tells the request under way to end

  // For Exchange.
  void Respond(Exchange* exchange, const HttpResponse& response);
  void BeginStream(Exchange* exchange);
  void WriteStream(Exchange* exchange, const std::string& frames, int tokens);
  void EndStream(Exchange* exchange);
  void KeepAlive(Exchange* exchange, std::chrono::milliseconds quiet, std::string frame);
  void LimitTime(Exchange* exchange, std::chrono::milliseconds limit);
  Exchange::Backlog backlog() const;
  int io_thread() const { return io_thread_; }
  void Post(std::function<void()> task);

 private:
  enum class State { kHandshake, kHead, kBody, kHandling, kLinger, kClosed };

  void Handshake();
  void HandshakeFailed(const TlsSession::Failure& failure);
  void WaitForHandshake(boost::asio::socket_base::wait_type what);
  void Watch();  // waits for the socket to be readable
  void OnReadable();
  bool HoldsEnough() const;
  bool ReadOnce();  // false: nothing more for now
  size_t Receive(char* data, size_t room, boost::system::error_code& error);
  void OnEndOfInput();
  bool HasLeft() const;
  void Advance();
  bool AdvanceHead();
  bool AdvanceBody();
  void BeginRequest();
  void Refuse(HttpResponse response, bool body_follows);
  void ProtocolFailure(const HttpProblem& problem);
  void BodyFailure(const HttpProblem& problem);
  HttpResponse NoPlace();
  void EndExchange(bool keep_alive);
  void EnterLinger();

  std::string ResponseHead(const HttpResponse& response, bool stream) const;
  void Send(std::string bytes, int tokens);
  void Flush();
  void WriteTls();
  void OnWritten(const boost::system::error_code& error, size_t bytes);
  void OnAllWritten();

  std::chrono::milliseconds HeaderTimeout() const;
  void Arm(std::chrono::milliseconds after);
  void ArmUntil(std::chrono::steady_clock::time_point end);
  void Disarm();
  void OnDeadline();

  boost::asio::ip::tcp::socket socket_;
  std::unique_ptr<TlsSession> tls_;
  boost::asio::steady_timer deadline_;
  QuietTimer quiet_;
  boost::asio::steady_timer request_end_;  // of exchange_, where its time has a limit
  uint64_t deadline_serial_ = 0;
  const int io_thread_;
  const HttpServerOptions& options_;
  HttpHandler& handler_;
  ConnectionOwner& owner_;

  State state_ = State::kHead;
  bool has_place_ = true;
  bool watching_ = false;
  bool read_ended_ = false;  // the client sends nothing more
  std::string input_;        // read, not yet used
  bool head_began_ = false;

  HeadScan scan_;
  RequestHead head_;
  BodyDecoder body_;
  BodyPace pace_;
  std::optional<HttpResponse> refusal_;  // to send once the body was read

  std::shared_ptr<Exchange> exchange_;
  std::string request_id_;
  std::vector<std::pair<std::string, std::string>> common_headers_;  // of every answer to this request
  bool keep_alive_ = true;
  bool last_request_ = false;  // the client said so: a half-closed connection is still answered
  bool head_only_ = false;     // HEAD: headers without the body
  bool chunked_ = false;       // the stream's framing
  bool finishing_ = false;     // the response is complete, its bytes are not all out

  std::string output_;  // to be written after in_flight_
  std::string in_flight_;
  size_t in_flight_sent_ = 0;
  bool writing_ = false;
  uint64_t queued_total_ = 0, sent_total_ = 0;  // bytes ever
  struct TokenMark {
    uint64_t end = 0;
    int tokens = 0;
  };
  std::deque<TokenMark> token_marks_;
  int backlog_tokens_ = 0;
  size_t linger_bytes_ = 0;
};

}  // namespace dovetail::server
