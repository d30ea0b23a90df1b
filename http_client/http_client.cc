#include "http_client/http_client.h"

#include <sys/socket.h>

#include <array>
#include <chrono>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>  // before Boost 1.74's asio, which forgets it in C++20

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl.hpp>

namespace dovetail::http_client {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;
using PlainStream = beast::tcp_stream;
using TlsStream = beast::ssl_stream<beast::tcp_stream>;

constexpr size_t kReadBytes = size_t{64} << 10;
constexpr size_t kMaxAnswerBytes = size_t{64} << 20;
constexpr uint32_t kMaxHeaderBytes = 64 << 10;

bool IsClosed(error_code error) {
  return error == http::error::end_of_stream || error == http::error::partial_message || error == asio::error::eof ||
         error == asio::ssl::error::stream_truncated || error == asio::error::connection_reset ||
         error == asio::error::broken_pipe;
}

// One connection, used by one call at a time.
template <typename Stream>
struct Connection {
  Stream stream;
  beast::flat_buffer buffer;

  explicit Connection(asio::io_context& io, asio::ssl::context& tls) : stream(Make(io, tls)) {}
  static Stream Make(asio::io_context& io, asio::ssl::context& tls) {
    if constexpr (std::is_same_v<Stream, TlsStream>)
      return TlsStream(io, tls);
    else
      return PlainStream(io);
  }
  beast::tcp_stream& socket() { return beast::get_lowest_layer(stream); }

  // Nothing has come since the last answer, not even its end.
  bool Fresh() {
    char byte = 0;
    const ssize_t got = recv(socket().socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && buffer.size() == 0;
  }
};

template <typename Stream>
struct Pool {
  asio::io_context io{1};
  asio::ssl::context tls{asio::ssl::context::tls_client};
  Url url;
  HttpClientOptions options;
  tcp::resolver::results_type endpoints;
  std::vector<std::unique_ptr<Connection<Stream>>> idle;

  std::unique_ptr<Connection<Stream>> Take() {
    while (!idle.empty()) {
      auto connection = std::move(idle.back());
      idle.pop_back();
      if (connection->Fresh()) return connection;
    }
    return nullptr;
  }
};

template <typename Stream>
class Call final : public HttpCall, public std::enable_shared_from_this<Call<Stream>> {
 public:
  Call(std::shared_ptr<Pool<Stream>> pool, const HttpRequest& request, std::shared_ptr<HttpObserver> observer)
      : pool_(std::move(pool)), observer_(std::move(observer)) {
    message_.method_string(request.method);
    message_.target(absl::StrCat(pool_->url.path, request.target));
    message_.set(http::field::host, pool_->url.HostHeader());
    message_.set(http::field::user_agent, pool_->options.user_agent);
    for (const auto& [name, value] : request.headers) message_.set(name, value);
    message_.body() = request.body;
    message_.prepare_payload();
  }

  void Begin() {
    connection_ = pool_->Take();
    reused_ = connection_ != nullptr;
    if (reused_) return Write();
    Connect();
  }

  void Cancel() override {
    if (observer_ == nullptr) return;
    cancelled_ = true;
    if (connection_ != nullptr) connection_->socket().cancel();
  }

 private:
  using Done = void (Call::*)();

  // What every operation ends in: the next one, or the end.
  auto Then(Done next) {
    return [self = this->shared_from_this(), next](error_code error, auto&&...) {
      if (error || self->cancelled_) return self->Fail(error);
      (self.get()->*next)();
    };
  }
  void Arm() { connection_->socket().expires_after(absl::ToChronoNanoseconds(pool_->options.stall_timeout)); }

  void Connect() {
    connection_ = std::make_unique<Connection<Stream>>(pool_->io, pool_->tls);
    connecting_ = true;
    Arm();
    connection_->socket().async_connect(pool_->endpoints, Then(&Call::OnConnected));
  }

  void OnConnected() {
    error_code ignored;
    connection_->socket().socket().set_option(tcp::no_delay(true), ignored);
    if constexpr (std::is_same_v<Stream, TlsStream>) {
      SSL_set_tlsext_host_name(connection_->stream.native_handle(), pool_->url.host.c_str());
      if (pool_->options.verify_certificates)
        connection_->stream.set_verify_callback(asio::ssl::host_name_verification(pool_->url.host));
      Arm();
      connection_->stream.async_handshake(asio::ssl::stream_base::client, Then(&Call::Write));
    } else {
      Write();
    }
  }

  void Write() {
    connecting_ = false;
    Arm();
    http::async_write(connection_->stream, message_, Then(&Call::ReadHead));
  }

  void ReadHead() {
    parser_.emplace();
    parser_->body_limit(std::numeric_limits<uint64_t>::max());  // boost::none refuses every length in Boost 1.74
    parser_->header_limit(kMaxHeaderBytes);
    Arm();
    http::async_read_header(connection_->stream, connection_->buffer, *parser_, Then(&Call::OnHead));
  }

  void OnHead() {
    answered_ = true;
    observer_->OnStatus(parser_->get().result_int(), std::string(parser_->get().reason()));
    ReadBody();
  }

  void ReadBody() {
    if (cancelled_) return Fail({});
    if (parser_->is_done()) return Finish();
    auto& body = parser_->get().body();
    body.data = chunk_.data();
    body.size = chunk_.size();
    Arm();
    http::async_read_some(connection_->stream, connection_->buffer, *parser_,
                          [self = this->shared_from_this()](error_code error, size_t) { self->OnBody(error); });
  }

  void OnBody(error_code error) {
    if (error == http::error::need_buffer) error = {};
    const size_t got = chunk_.size() - parser_->get().body().size;
    if (got > 0) observer_->OnBody(std::string_view(chunk_.data(), got));
    if (error) return Fail(error);
    ReadBody();
  }

  void Finish() {
    if (parser_->keep_alive()) pool_->idle.push_back(std::move(connection_));
    End(absl::OkStatus());
  }

  // A connection that was kept open may have been closed while the request was on its way: once, a new one is taken.
  bool MayRetry(error_code error) const { return reused_ && !answered_ && !cancelled_ && IsClosed(error); }

  void Fail(error_code error) {
    if (observer_ == nullptr) return;
    if (MayRetry(error)) {
      reused_ = false;
      return Connect();
    }
    End(StatusOf(error));
  }

  absl::Status StatusOf(error_code error) const {
    if (cancelled_) return absl::CancelledError("cancelled");
    const std::string where = pool_->url.HostHeader();
    if (error == beast::error::timeout)
      return absl::DeadlineExceededError(
          absl::StrCat("the server stalled: no byte for ", absl::FormatDuration(pool_->options.stall_timeout)));
    if (connecting_) return absl::UnavailableError(absl::StrCat(where, ": cannot connect: ", error.message()));
    const char* const when = answered_ ? "in the middle of its answer" : "before it answered";
    if (IsClosed(error)) return absl::UnavailableError(absl::StrCat("the server closed the connection ", when));
    return absl::UnavailableError(absl::StrCat("the connection failed ", when, ": ", error.message()));
  }

  void End(const absl::Status& status) {
    connection_ = nullptr;
    const auto observer = std::exchange(observer_, nullptr);
    observer->OnEnd(status);
  }

  std::shared_ptr<Pool<Stream>> pool_;
  std::shared_ptr<HttpObserver> observer_;  // null: the call has ended
  http::request<http::string_body> message_{http::verb::post, "/", 11};
  std::unique_ptr<Connection<Stream>> connection_;
  std::optional<http::response_parser<http::buffer_body>> parser_;
  std::array<char, kReadBytes> chunk_;
  bool reused_ = false, connecting_ = false, answered_ = false, cancelled_ = false;
};

template <typename Stream>
class Client final : public HttpClient {
 public:
  explicit Client(std::shared_ptr<Pool<Stream>> pool) : pool_(std::move(pool)) {}
  ~Client() override { pool_->idle.clear(); }

  std::shared_ptr<HttpCall> Start(const HttpRequest& request, std::shared_ptr<HttpObserver> observer) override {
    auto call = std::make_shared<Call<Stream>>(pool_, request, std::move(observer));
    call->Begin();
    return call;
  }
  const Url& url() const override { return pool_->url; }
  asio::io_context& io() override { return pool_->io; }

 private:
  std::shared_ptr<Pool<Stream>> pool_;
};

template <typename Stream>
absl::StatusOr<std::unique_ptr<HttpClient>> Make(const Url& url, const HttpClientOptions& options) {
  auto pool = std::make_shared<Pool<Stream>>();
  pool->url = url;
  pool->options = options;
  error_code error;
  tcp::resolver resolver(pool->io);
  pool->endpoints = resolver.resolve(url.host, std::to_string(url.port), error);
  if (error) return absl::UnavailableError(absl::StrCat(url.Text(), ": the host is not known: ", error.message()));
  if (url.tls) {
    pool->tls.set_verify_mode(options.verify_certificates ? asio::ssl::verify_peer : asio::ssl::verify_none);
    pool->tls.set_default_verify_paths(error);
  }
  return std::make_unique<Client<Stream>>(std::move(pool));
}

class Collector final : public HttpObserver {
 public:
  void OnStatus(int status, const std::string&) override { answer.status = status; }
  void OnBody(std::string_view bytes) override {
    if (answer.body.size() + bytes.size() > kMaxAnswerBytes)
      too_long = true;
    else
      answer.body.append(bytes);
  }
  void OnEnd(const absl::Status& status) override { ended = status; }

  HttpClient::Answer answer;
  bool too_long = false;
  std::optional<absl::Status> ended;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpClient>> HttpClient::Create(const Url& url, const HttpClientOptions& options) {
  return url.tls ? Make<TlsStream>(url, options) : Make<PlainStream>(url, options);
}

absl::StatusOr<HttpClient::Answer> HttpClient::Fetch(const HttpRequest& request, absl::Duration limit) {
  const auto collector = std::make_shared<Collector>();
  const auto call = Start(request, collector);
  const auto end = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(limit);
  bool late = false;
  while (!collector->ended.has_value()) {
    io().restart();
    if (late) {
      io().run_one();
    } else if (io().run_one_until(end) == 0) {
      late = true;
      call->Cancel();
    }
  }
  if (late && absl::IsCancelled(*collector->ended))
    return absl::DeadlineExceededError(
        absl::StrCat(url().Text(), request.target, ": no whole answer within ", absl::FormatDuration(limit)));
  DT_RETURN_IF_ERROR(Annotate(*collector->ended, absl::StrCat(request.method, " ", url().Text(), request.target)));
  if (collector->too_long)
    return ResourceExhausted(request.target, ": the answer has more than ", kMaxAnswerBytes >> 20, " MiB");
  return std::move(collector->answer);
}

}  // namespace dovetail::http_client
