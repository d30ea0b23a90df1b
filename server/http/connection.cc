#include "server/http/connection.h"

#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>

#include <array>

#include "absl/strings/str_cat.h"

namespace dovetail::server {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr size_t kReadChunk = 16 * 1024;
constexpr size_t kMaxPipelined = 64 * 1024;  // read while a request is handled; the rest waits in TCP
constexpr size_t kMaxLingerBytes = 8 * 1024 * 1024;
constexpr uint64_t kSmallBody = 64 * 1024;  // read to the end even when refused, so that the connection lives on
constexpr size_t kMaxRequestId = 128;
constexpr std::chrono::milliseconds kPatienceForProbes{1000};  // for the head, on a connection without a place

std::string_view Reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 411: return "Length Required";
    case 413: return "Content Too Large";
    case 414: return "URI Too Long";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "Status";
  }
}

// A client's own id is echoed only if it can do no harm in a header, a log line or a JSON text.
bool IsGoodRequestId(const std::string& id) {
  if (id.empty() || id.size() > kMaxRequestId) return false;
  for (const unsigned char c : id)
    if (!(std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == ':')) return false;
  return true;
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, int io_thread, const HttpServerOptions& options,
                       HttpHandler& handler, ConnectionOwner& owner, const std::shared_ptr<SSL_CTX>& tls)
    : socket_(std::move(socket)),
      tls_(tls == nullptr ? nullptr : std::make_unique<TlsSession>(tls, socket_.native_handle())),
      deadline_(socket_.get_executor()),
      quiet_(socket_.get_executor()),
      request_end_(socket_.get_executor()),
      io_thread_(io_thread),
      options_(options),
      handler_(handler),
      owner_(owner) {}

Connection::~Connection() = default;

void Connection::Start(bool has_place) {
  has_place_ = has_place;
  error_code ignored;
  socket_.non_blocking(true, ignored);
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  if (options_.socket_send_buffer_bytes > 0)
    socket_.set_option(asio::socket_base::send_buffer_size(options_.socket_send_buffer_bytes), ignored);
  if (tls_) {
    state_ = State::kHandshake;
    Arm(options_.tls_handshake_timeout);
    return Handshake();
  }
  Arm(HeaderTimeout());
  Watch();
}

void Connection::Handshake() {
  switch (tls_->Handshake()) {
    case TlsSession::Outcome::kDone: break;
    case TlsSession::Outcome::kWaitRead: return WaitForHandshake(asio::socket_base::wait_read);
    case TlsSession::Outcome::kWaitWrite: return WaitForHandshake(asio::socket_base::wait_write);
    case TlsSession::Outcome::kPlainHttp:
      HandshakeFailed(tls_->failure());
      tls_.reset();
      return ProtocolFailure({400, "This port speaks HTTPS: ask https:// in place of http://."});
    default: HandshakeFailed(tls_->failure()); return Close();
  }
  state_ = State::kHead;
  Arm(HeaderTimeout());
  OnReadable();
}

void Connection::WaitForHandshake(asio::socket_base::wait_type what) {
  socket_.async_wait(what, [self = shared_from_this()](const error_code& error) {
    if (self->state_ == State::kClosed || error == asio::error::operation_aborted) return;
    if (error) return self->Close();
    self->Handshake();
  });
}

void Connection::HandshakeFailed(const TlsSession::Failure& failure) {
  error_code unknown;
  const auto client = socket_.remote_endpoint(unknown);
  owner_.OnTlsFailure(failure.why, unknown ? "a client that has left" : client.address().to_string(), failure.what);
}

void Connection::Post(std::function<void()> task) { asio::post(socket_.get_executor(), std::move(task)); }

void Connection::Close() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  body_ = BodyDecoder();
  Disarm();
  quiet_.Stop();
  request_end_.cancel();
  if (tls_) tls_->SendEnd();
  error_code ignored;
  socket_.close(ignored);
  if (const auto exchange = std::move(exchange_)) {
    exchange_.reset();
    exchange->Gone();
    owner_.OnExchangeEnded();
  }
  owner_.OnClosed(this);
}

void Connection::MakeRoom() {
  if (state_ == State::kClosed) return;
  error_code ignored;
  if (!has_place_) {
    if (state_ == State::kHead && !tls_) {
      request_id_ = owner_.NewRequestId();
      keep_alive_ = false;
      const HttpResponse response = NoPlace();
      std::array<char, kReadChunk> sink;
      socket_.read_some(asio::buffer(sink), ignored);  // unread input would turn the close into a reset
      socket_.write_some(asio::buffer(ResponseHead(response, /*stream=*/false) + response.body), ignored);
    }
    owner_.counters().Ended(ForRoom::kDisplaced);
    return Close();
  }
  const bool idle = state_ == State::kHandshake || (state_ == State::kHead && !head_began_);
  if (!idle || socket_.available(ignored) > 0) return owner_.OnStays(this);
  owner_.counters().Ended(ForRoom::kIdle);
  Close();
}

void Connection::ShutdownExchange() {
  if (exchange_ && !finishing_ && exchange_->on_shutdown) {
    const auto callback = exchange_->on_shutdown;
    callback();
  }
}

// ---- reading ----

void Connection::Watch() {
  if (watching_ || read_ended_ || state_ == State::kClosed) return;
  // A client that leaves behind so much input is noticed when its answer is written. EndExchange reads on.
  if (HoldsEnough()) return;
  watching_ = true;
  socket_.async_wait(asio::ip::tcp::socket::wait_read, [self = shared_from_this()](const error_code& error) {
    self->watching_ = false;
    if (error) {
      if (error != asio::error::operation_aborted) self->Close();
      return;
    }
    if (self->state_ != State::kClosed) self->OnReadable();
  });
}

// Of what a client sends ahead of the answer to its request.
bool Connection::HoldsEnough() const { return state_ == State::kHandling && input_.size() >= kMaxPipelined; }

void Connection::OnReadable() {
  while (!HoldsEnough() && ReadOnce())
    if (!tls_ || !tls_->HasUnread()) return Watch();
}

bool Connection::ReadOnce() {
  std::array<char, kReadChunk> chunk;
  error_code error;
  const size_t bytes = Receive(chunk.data(), chunk.size(), error);
  if (error == asio::error::would_block || error == asio::error::try_again) return Watch(), false;
  if (error == asio::error::eof) return OnEndOfInput(), false;
  if (error) return Close(), false;
  if (state_ == State::kLinger) {
    linger_bytes_ += bytes;
    if (linger_bytes_ > kMaxLingerBytes) Close();
    return state_ != State::kClosed;
  }
  input_.append(chunk.data(), bytes);
  Advance();
  return state_ != State::kClosed;
}

// Behind the end of TLS what still comes is not looked at.
size_t Connection::Receive(char* data, size_t room, error_code& error) {
  if (!tls_ || state_ == State::kLinger) return socket_.read_some(asio::buffer(data, room), error);
  const TlsSession::Result result = tls_->Read(data, room);
  switch (result.outcome) {
    case TlsSession::Outcome::kDone: break;
    case TlsSession::Outcome::kWaitRead:
    case TlsSession::Outcome::kWaitWrite: error = asio::error::would_block; break;
    case TlsSession::Outcome::kEnd: error = asio::error::eof; break;
    default: error = asio::error::connection_reset;
  }
  return result.bytes;
}

// The client sends nothing more. Whether it has left cannot be told from that. One that said that this request is its
// last is answered, and so is one whose answer is complete; any other is taken to have left.
void Connection::OnEndOfInput() {
  read_ended_ = true;
  if (state_ != State::kHandling || HasLeft()) return Close();
  // A client that has left answers what is written to it with a reset.
  socket_.async_wait(asio::socket_base::wait_error, [self = shared_from_this()](const error_code& error) {
    if (error != asio::error::operation_aborted && self->state_ != State::kClosed) self->Close();
  });
}

bool Connection::HasLeft() const { return read_ended_ && !finishing_ && !last_request_; }

void Connection::Advance() {
  while ((state_ == State::kHead && AdvanceHead()) || (state_ == State::kBody && AdvanceBody())) {
  }
}

// Returns whether the state changed.
bool Connection::AdvanceHead() {
  if (input_.empty()) return false;
  const bool only_empty_line = input_ == "\r" || input_ == "\r\n";
  if (!head_began_ && !only_empty_line) {
    head_began_ = true;
    Arm(HeaderTimeout());
    if (has_place_) owner_.OnBusy(this);
  }
  ScanHead(input_, options_.head, scan_);
  if (scan_.problem.status != 0) return ProtocolFailure(scan_.problem), false;
  if (scan_.end == 0) return false;

  head_ = RequestHead();
  const HttpProblem problem = ParseHead(std::string_view(input_).substr(0, scan_.end), head_);
  input_.erase(0, scan_.end);
  const std::string* id = head_.Find("x-request-id");
  request_id_ = id != nullptr && IsGoodRequestId(*id) ? *id : owner_.NewRequestId();
  if (problem.status != 0) return ProtocolFailure(problem), false;
  common_headers_ = handler_.CommonHeaders(head_);
  keep_alive_ = head_.keep_alive;
  last_request_ = !head_.keep_alive || head_.minor_version == 0;
  head_only_ = head_.method == "HEAD";
  if (!has_place_ && handler_.IsProbe(head_)) {
    keep_alive_ = false;  // another may wait for its descriptor
  } else if (!has_place_ && !(has_place_ = owner_.TakePlace(this))) {
    return Refuse(NoPlace(), /*body_follows=*/true), false;
  }
  if (head_.method == "POST" && !head_.chunked && !head_.content_length)
    return ProtocolFailure({411, "A POST needs a Content-Length, or chunked transfer encoding."}), false;

  refusal_ = handler_.OnHead(head_, request_id_);
  if (refusal_ && (head_.chunked || head_.expect_continue || head_.content_length.value_or(0) > kSmallBody)) {
    Refuse(*std::move(refusal_), /*body_follows=*/true);
    return false;
  }
  body_ =
      BodyDecoder(head_, {.max_bytes = options_.max_body_bytes, .budget = owner_.bodies(), .trailers = options_.head},
                  refusal_ ? BodyDecoder::Use::kDrop : BodyDecoder::Use::kKeep);
  if (body_.problem().status != 0) return BodyFailure(body_.problem()), false;
  if (head_.expect_continue && !body_.done()) Send("HTTP/1.1 100 Continue\r\n\r\n", 0);
  state_ = State::kBody;
  pace_ = BodyPace(std::chrono::steady_clock::now(), options_.body_grace, options_.min_body_bytes_per_s);
  ArmUntil(pace_.deadline());
  return true;
}

bool Connection::AdvanceBody() {
  const uint64_t before = body_.payload();
  input_.erase(0, body_.Consume(input_));
  if (body_.problem().status != 0) return BodyFailure(body_.problem()), false;
  if (body_.done()) {
    BeginRequest();
    return true;
  }
  pace_.Received(body_.payload() - before, std::chrono::steady_clock::now());
  ArmUntil(pace_.deadline());
  return false;
}

void Connection::BeginRequest() {
  state_ = State::kHandling;
  finishing_ = false;
  Disarm();
  exchange_ = std::make_shared<Exchange>(shared_from_this(), std::move(head_), std::move(body_.body()), request_id_);
  owner_.OnExchangeBegan();
  const auto exchange = exchange_;
  if (refusal_) {
    const HttpResponse response = *std::move(refusal_);
    refusal_.reset();
    exchange->Respond(response);
  } else {
    handler_.OnRequest(exchange);
  }
  if (state_ == State::kHandling && HasLeft()) Close();
}

// ---- refusing ----

HttpResponse Connection::NoPlace() {
  return handler_.ProtocolError(503, "Too many connections are open; try again shortly.", head_.path, request_id_);
}

void Connection::BodyFailure(const HttpProblem& problem) {
  if (problem.status == 413) owner_.counters().Refused(BodyRefusal::kTooLarge);
  if (problem.status == 503) owner_.counters().Refused(BodyRefusal::kNoRoom);
  if (problem.status == 408) owner_.counters().Refused(BodyRefusal::kTooSlow);
  ProtocolFailure(problem);
}

void Connection::ProtocolFailure(const HttpProblem& problem) {
  if (request_id_.empty()) request_id_ = owner_.NewRequestId();
  const std::string_view path = head_.path.empty() ? PathOf(input_) : std::string_view(head_.path);
  Refuse(handler_.ProtocolError(problem.status, problem.message, path, request_id_), /*body_follows=*/true);
}

void Connection::Refuse(HttpResponse response, bool body_follows) {
  refusal_.reset();
  body_ = BodyDecoder();
  response.close = response.close || body_follows;
  keep_alive_ = false;
  state_ = State::kHandling;
  finishing_ = true;
  input_.clear();
  std::string bytes = ResponseHead(response, /*stream=*/false);
  if (!head_only_) bytes += response.body;
  Send(std::move(bytes), 0);
}

// Closing with unread input would make the kernel discard the answer on its way: say goodbye, then read on for a while.
void Connection::EnterLinger() {
  if (read_ended_) return Close();  // nothing unread is left
  state_ = State::kLinger;
  input_.clear();
  if (tls_) tls_->SendEnd();
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  Arm(options_.linger_timeout);
  Watch();
}

// ---- responding ----

std::string Connection::ResponseHead(const HttpResponse& response, bool stream) const {
  std::string head = absl::StrCat("HTTP/1.1 ", response.status, " ",
                                  absl::string_view(Reason(response.status).data(), Reason(response.status).size()),
                                  "\r\nContent-Type: ", response.content_type, "\r\n");
  if (!stream) {
    absl::StrAppend(&head, "Content-Length: ", response.body.size(), "\r\n");
  } else if (chunked_) {
    head += "Transfer-Encoding: chunked\r\n";
  }
  for (const auto* headers : {&response.headers, &common_headers_})
    for (const auto& [name, value] : *headers) absl::StrAppend(&head, name, ": ", value, "\r\n");
  absl::StrAppend(&head, "X-Request-Id: ", request_id_, "\r\n");
  const bool alive = keep_alive_ && !response.close;
  head += alive ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
  return head;
}

void Connection::Respond(Exchange* exchange, const HttpResponse& response) {
  if (exchange != exchange_.get()) return;
  if (response.close) keep_alive_ = false;
  std::string bytes = ResponseHead(response, /*stream=*/false);
  if (!head_only_) bytes += response.body;
  finishing_ = true;
  Send(std::move(bytes), 0);
}

void Connection::BeginStream(Exchange* exchange) {
  if (exchange != exchange_.get()) return;
  chunked_ = exchange->head().minor_version == 1;
  if (!chunked_) keep_alive_ = false;
  HttpResponse response;
  response.content_type = "text/event-stream; charset=utf-8";
  response.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  Send(ResponseHead(response, /*stream=*/true), 0);
}

void Connection::WriteStream(Exchange* exchange, const std::string& frames, int tokens) {
  if (exchange != exchange_.get()) return;
  if (!chunked_) return Send(frames, tokens);
  Send(absl::StrCat(absl::Hex(frames.size()), "\r\n", frames, "\r\n"), tokens);
}

void Connection::EndStream(Exchange* exchange) {
  if (exchange != exchange_.get()) return;
  finishing_ = true;
  if (chunked_)
    Send("0\r\n\r\n", 0);
  else if (!writing_ && output_.empty())
    OnAllWritten();
}

Exchange::Backlog Connection::backlog() const {
  return {static_cast<size_t>(queued_total_ - sent_total_), backlog_tokens_};
}

void Connection::Send(std::string bytes, int tokens) {
  if (state_ == State::kClosed) return;
  quiet_.Sent();
  queued_total_ += bytes.size();
  if (output_.empty())
    output_ = std::move(bytes);
  else
    output_ += bytes;
  if (tokens > 0) {
    token_marks_.push_back({queued_total_, tokens});
    backlog_tokens_ += tokens;
  }
  if (!writing_) {
    Arm(options_.write_stall_timeout);
    Flush();
  }
}

void Connection::Flush() {
  if (in_flight_sent_ == in_flight_.size()) {
    in_flight_.clear();
    std::swap(in_flight_, output_);
    in_flight_sent_ = 0;
  }
  writing_ = true;
  if (tls_) return WriteTls();
  const auto rest = asio::buffer(in_flight_.data() + in_flight_sent_, in_flight_.size() - in_flight_sent_);
  socket_.async_write_some(
      rest, [self = shared_from_this()](const error_code& error, size_t bytes) { self->OnWritten(error, bytes); });
}

// Never at once, so that a caller of Send does not find the connection closed.
void Connection::WriteTls() {
  socket_.async_wait(asio::socket_base::wait_write, [self = shared_from_this()](const error_code& error) {
    if (self->state_ == State::kClosed) return;
    if (error) return self->OnWritten(error, 0);
    const TlsSession::Result result = self->tls_->Write(self->in_flight_.data() + self->in_flight_sent_,
                                                        self->in_flight_.size() - self->in_flight_sent_);
    if (result.outcome == TlsSession::Outcome::kWaitWrite) return self->WriteTls();
    const bool done = result.outcome == TlsSession::Outcome::kDone;
    self->OnWritten(done ? error_code() : asio::error::connection_reset, result.bytes);
  });
}

void Connection::OnWritten(const error_code& error, size_t bytes) {
  writing_ = false;
  if (state_ == State::kClosed) return;
  if (error) return Close();
  in_flight_sent_ += bytes;
  sent_total_ += bytes;
  while (!token_marks_.empty() && token_marks_.front().end <= sent_total_) {
    backlog_tokens_ -= token_marks_.front().tokens;
    token_marks_.pop_front();
  }
  if (in_flight_sent_ < in_flight_.size() || !output_.empty()) {
    Arm(options_.write_stall_timeout);
    return Flush();
  }
  in_flight_.clear();
  in_flight_sent_ = 0;
  if (in_flight_.capacity() > kMaxPipelined) in_flight_.shrink_to_fit();
  OnAllWritten();
}

void Connection::OnAllWritten() {
  if (state_ == State::kHandling) {
    Disarm();
    if (finishing_) return EndExchange(keep_alive_);
    if (exchange_ && exchange_->on_drained) {
      const auto callback = exchange_->on_drained;
      callback();
    }
  }
}

void Connection::EndExchange(bool keep_alive) {
  if (const auto exchange = std::move(exchange_)) {
    exchange_.reset();
    exchange->on_gone = exchange->on_drained = exchange->on_shutdown = exchange->on_timeout = nullptr;
    owner_.OnExchangeEnded();
  }
  quiet_.Stop();
  request_end_.cancel();
  if (!keep_alive) return EnterLinger();
  state_ = State::kHead;
  scan_ = HeadScan();
  head_ = RequestHead();
  head_began_ = false;
  request_id_.clear();
  common_headers_.clear();
  Arm(options_.idle_timeout);
  owner_.OnIdle(this);
  Advance();
  if (read_ended_ && (state_ == State::kHead || state_ == State::kBody)) return Close();
  if (!tls_ || !tls_->HasUnread()) return Watch();
  // What TLS has read already makes the socket readable no more.
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    if (self->state_ != State::kClosed && !self->watching_ && !self->read_ended_) self->OnReadable();
  });
}

// ---- time ----

std::chrono::milliseconds Connection::HeaderTimeout() const {
  return has_place_ ? options_.header_timeout : std::min(options_.header_timeout, kPatienceForProbes);
}

void Connection::Arm(std::chrono::milliseconds after) {
  const uint64_t serial = ++deadline_serial_;
  deadline_.expires_after(after);
  deadline_.async_wait([self = shared_from_this(), serial](const error_code& error) {
    if (!error && serial == self->deadline_serial_ && self->state_ != State::kClosed) self->OnDeadline();
  });
}

void Connection::ArmUntil(std::chrono::steady_clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
  Arm(std::max(left, std::chrono::milliseconds(1)));
}

void Connection::Disarm() {
  ++deadline_serial_;
  deadline_.cancel();
}

void Connection::OnDeadline() {
  switch (state_) {
    case State::kHandshake:
      HandshakeFailed(
          {TlsFailure::kTimeout, absl::StrCat("not complete after ", options_.tls_handshake_timeout.count(), " ms")});
      return Close();
    case State::kHead:
      if (!head_began_ && has_place_) return Close();
      if (!head_began_) {
        request_id_ = owner_.NewRequestId();
        owner_.counters().Ended(ForRoom::kRefused);
        return Refuse(NoPlace(), /*body_follows=*/true);
      }
      return ProtocolFailure({408, "The request's headers did not arrive in time."});
    case State::kBody:
      return BodyFailure({408, absl::StrCat("The request's body arrived at less than ", options_.min_body_bytes_per_s,
                                            " bytes a second.")});
    default: return Close();  // the client did not read, or did not leave
  }
}

void Connection::KeepAlive(Exchange* exchange, std::chrono::milliseconds quiet, std::string frame) {
  if (exchange != exchange_.get()) return;
  quiet_.Watch(quiet, [self = shared_from_this(), frame = std::move(frame)] {
    if (self->exchange_ == nullptr || self->finishing_ || self->backlog().bytes > 0) return;
    const auto current = self->exchange_;
    current->StartStream();
    current->Write(frame, 0);
  });
}

// The exchange is kept until then, so that another one is not taken for it.
void Connection::LimitTime(Exchange* exchange, std::chrono::milliseconds limit) {
  if (exchange != exchange_.get()) return;
  request_end_.expires_after(limit);
  request_end_.async_wait([self = shared_from_this(), limited = exchange_](const error_code& error) {
    if (error || self->exchange_ != limited || limited->complete() || !limited->on_timeout) return;
    const auto callback = std::exchange(limited->on_timeout, nullptr);
    callback();
  });
}

}  // namespace dovetail::server
