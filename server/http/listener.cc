#include "server/http/listener.h"

#include <array>
#include <boost/asio/post.hpp>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/thread_name.h"

namespace dovetail::server {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::milliseconds kAcceptRetry{50};  // after running out of file descriptors
constexpr std::chrono::seconds kLogEvery{10};

std::chrono::nanoseconds Chrono(absl::Duration duration) { return absl::ToChronoNanoseconds(duration); }

// An address, or the first one of a name: of IPv4, if it has such.
absl::StatusOr<asio::ip::address> AddressOf(const std::string& host) {
  error_code error;
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const asio::ip::address address = asio::ip::make_address(bracketed ? host.substr(1, host.size() - 2) : host, error);
  if (!error) return address;
  asio::io_context context;
  const auto found = tcp::resolver(context).resolve(host, "", error);
  if (error || found.empty())
    return InvalidArgument("--host: ", host, " is no IP address, and no name that this host can resolve (",
                           error.message(), ")");
  for (const auto& entry : found)
    if (entry.endpoint().address().is_v4()) return entry.endpoint().address();
  return found.begin()->endpoint().address();
}

}  // namespace

Listener::Listener(const HttpServerOptions& options, HttpHandler& handler)
    : options_(options),
      handler_(handler),
      bodies_(std::make_shared<BodyBudget>(options.max_unfinished_body_bytes)),
      places_(options.max_connections),
      full_log_(kLogEvery),
      descriptor_log_(kLogEvery),
      tls_log_(kLogEvery) {
  std::random_device device;
  std::seed_seq seed{device(), device(), device(), device()};
  random_.seed(seed);
  for (int i = 0; i < options_.io_threads; ++i) threads_.push_back(std::make_unique<IoThread>());
}

Listener::~Listener() { Stop(); }

absl::Status Listener::Start() {
  error_code error;
  DT_ASSIGN_OR_RETURN(const auto address, AddressOf(options_.host));
  const tcp::endpoint endpoint(address, static_cast<uint16_t>(options_.port));
  acceptor_ = std::make_unique<tcp::acceptor>(threads_[0]->context);
  accept_retry_ = std::make_unique<asio::steady_timer>(threads_[0]->context);
  acceptor_->open(endpoint.protocol(), error);
  if (!error) acceptor_->set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor_->bind(endpoint, error);
  if (!error) acceptor_->listen(asio::socket_base::max_listen_connections, error);
  if (!error) acceptor_->non_blocking(true, error);
  if (error)
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options_.host, ":", options_.port, ": ",
                                               error.message(), "; choose another --port"));
  port_ = acceptor_->local_endpoint().port();
  RefreshLimit();
  if (limit_.connections < 1) return ResourceExhausted("HTTP: ", limit_.why);
  Accept();
  for (auto& io : threads_) {
    io->thread = std::thread([&context = io->context] {
      NameThread("dt-http");
      context.run();
    });
  }
  started_ = true;
  return absl::OkStatus();
}

// A descriptor is asked for only once a connection waits: accept4 gives EMFILE also when none does, and then an idle
// connection would end for nothing.
void Listener::Accept() {
  acceptor_->async_wait(tcp::acceptor::wait_read, [this](const error_code& error) {
    if (error == asio::error::operation_aborted) return;
    AcceptOne();
  });
}

void Listener::AcceptOne() {
  const int thread = next_thread_;
  tcp::socket socket(threads_[thread]->context);
  error_code error;
  acceptor_->accept(socket, error);
  if (error == asio::error::would_block || error == asio::error::connection_aborted)
    return Accept();  // it left already
  if (error) {
    OutOfDescriptors(error);
    accept_retry_->expires_after(kAcceptRetry);
    accept_retry_->async_wait([this](const error_code& cancelled) {
      if (!cancelled) Accept();
    });
    return;
  }
  next_thread_ = (next_thread_ + 1) % static_cast<int>(threads_.size());
  OnAccepted(std::move(socket), thread);
  Accept();
}

void Listener::OnAccepted(tcp::socket socket, int io_thread) {
  std::shared_ptr<Connection> connection;
  bool placed = false;
  {
    MutexLock lock(mutex_);
    if (!places_.Full()) {
      ConnectionOwner& owner = *this;
      connection = std::make_shared<Connection>(std::move(socket), io_thread, options_, handler_, owner,
                                                tls_ == nullptr ? nullptr : tls_->current());
      connections_.emplace(connection.get(), connection);
      const Places::Admission admission = places_.Add(connection.get(), std::chrono::steady_clock::now());
      if (admission.end != nullptr) End(admission.end);
      placed = admission.placed;
    }
  }
  if (connection) {
    connection->Post([connection, placed] { connection->Start(placed); });
  } else {
    RefuseConnection(std::move(socket));  // NOLINT(bugprone-use-after-move): it went into no connection
  }
}

void Listener::OutOfDescriptors(const error_code& error) {
  RefreshLimit();
  MutexLock lock(mutex_);
  if (Connection* const one = places_.EndOne()) End(one);
  if (const auto more = descriptor_log_.Pass(std::chrono::steady_clock::now()))
    LogWarning("HTTP: no connection can be accepted (", error.message(), "; ", *more,
               " more times since the last such line): ", limit_.why);
}

void Listener::End(Connection* connection) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  if (const auto held = found->second.lock()) held->Post([held] { held->MakeRoom(); });
}

void Listener::RefuseConnection(tcp::socket socket) {
  if (tls_ != nullptr) return;  // a handshake costs more than the answer is worth
  counters_.Ended(ForRoom::kRefused);
  const std::string id = NewRequestId();
  const HttpResponse response =
      handler_.ProtocolError(503, "Too many connections are open; try again shortly.", "", id);
  const std::string text = absl::StrCat(
      "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: ", response.body.size(),
      "\r\nRetry-After: 1\r\nX-Request-Id: ", id, "\r\nConnection: close\r\n\r\n", response.body);
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(text), ignored);  // fits the empty send buffer, or is not worth waiting for
  socket.shutdown(tcp::socket::shutdown_send, ignored);
  std::array<char, 4096> sink;
  socket.read_some(asio::buffer(sink), ignored);  // unread input would turn the close into a reset
}

std::string Listener::NewRequestId() {
  MutexLock lock(mutex_);
  return absl::StrFormat("%016x%016x", random_(), random_());
}

void Listener::OnClosed(Connection* connection) {
  MutexLock lock(mutex_);
  connections_.erase(connection);
  places_.Remove(connection);
}

void Listener::OnIdle(Connection* connection) {
  MutexLock lock(mutex_);
  places_.Idle(connection, std::chrono::steady_clock::now());
}

void Listener::OnBusy(Connection* connection) {
  MutexLock lock(mutex_);
  places_.Busy(connection);
}

void Listener::OnStays(Connection* connection) {
  MutexLock lock(mutex_);
  places_.Keep(connection);
}

bool Listener::TakePlace(Connection* connection) {
  const auto now = std::chrono::steady_clock::now();
  MutexLock lock(mutex_);
  const Places::Place place = places_.Take(connection, now, options_.min_idle);
  if (place.end != nullptr) End(place.end);
  if (place.placed) return true;
  counters_.Ended(ForRoom::kRefused);
  if (const auto more = full_log_.Pass(now))
    LogWarning("HTTP: a request was refused, as all connections are taken (", *more,
               " more since the last such line): ", limit_.why);
  return false;
}

// Those that leave are counted only: load balancers look in this way whether a port is open.
void Listener::OnTlsFailure(TlsFailure why, const std::string& client, const std::string& what) {
  counters_.Failed(why);
  if (why == TlsFailure::kClientLeft) return;
  if (const auto more = tls_log_.Pass(std::chrono::steady_clock::now()))
    LogWarning("TLS: the handshake with ", client, " failed (", kTlsFailures[static_cast<size_t>(why)], "): ", what,
               "; ", *more, " more since the last such line");
}

void Listener::RefreshLimit() {
  OpenFiles files = CountOpenFiles();
  MutexLock lock(mutex_);
  files.in_use = std::max<int64_t>(files.in_use - static_cast<int64_t>(connections_.size()), 0);
  limit_ = LimitConnections(options_.max_connections, files);
  places_.SetLimit(static_cast<int>(std::max<int64_t>(limit_.connections, 1)));
}

ConnectionLimit Listener::limit() const {
  MutexLock lock(mutex_);
  return limit_;
}

void Listener::OnExchangeBegan() {
  MutexLock lock(mutex_);
  ++active_exchanges_;
}

void Listener::OnExchangeEnded() {
  MutexLock lock(mutex_);
  if (--active_exchanges_ == 0) idle_.notify_all();
}

int Listener::connections() const {
  MutexLock lock(mutex_);
  return static_cast<int>(connections_.size());
}

HttpStats Listener::stats() const {
  HttpStats stats;
  {
    MutexLock lock(mutex_);
    stats.connections = static_cast<int>(connections_.size());
    stats.max_connections = places_.limit();
    stats.active_requests = active_exchanges_;
  }
  stats.body_bytes = bodies_->held();
  counters_.AddTo(stats);
  return stats;
}

std::vector<std::shared_ptr<Connection>> Listener::Snapshot() {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Connection>> all;
  for (const auto& [key, weak] : connections_)
    if (auto connection = weak.lock()) all.push_back(std::move(connection));
  return all;
}

bool Listener::Drain(absl::Duration limit, absl::Duration grace) {
  const auto idle = [this] { return active_exchanges_ == 0; };
  bool ended = false;
  {
    MutexLock lock(mutex_);
    ended = idle_.wait_for(lock, Chrono(limit), idle);
  }
  if (ended) return true;
  for (const auto& connection : Snapshot()) connection->Post([connection] { connection->ShutdownExchange(); });
  MutexLock lock(mutex_);
  idle_.wait_for(lock, Chrono(grace), idle);
  return false;
}

void Listener::Stop() {
  if (!started_) return;
  started_ = false;
  // On the accepting thread, so that every connection there will ever be is in the snapshot; each thread stops after
  // what was posted to it.
  asio::post(threads_[0]->context, [this] {
    error_code ignored;
    acceptor_->close(ignored);
    accept_retry_->cancel();
    for (const auto& connection : Snapshot()) connection->Post([connection] { connection->Close(); });
    for (auto& io : threads_)
      asio::post(io->context, [&io] {
        io->work.reset();
        io->context.stop();
      });
  });
  for (auto& io : threads_) io->thread.join();
}

}  // namespace dovetail::server
