#pragma once
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <random>
#include <thread>
#include <unordered_map>
#include <utility>  // before Boost 1.74's asio, which forgets it in C++20
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "server/http/connection.h"
#include "server/http/log_gate.h"
#include "server/http/open_files.h"
#include "server/http/options.h"
#include "server/http/places.h"
#include "server/http/tls_context.h"

namespace dovetail::server {

// The listening socket, the I/O threads and the connections they hold. When all places are taken (server/http/places.h)
// probes are still answered, and other requests get a 503.
// Threads: thread-safe.
class Listener : private ConnectionOwner {
 public:
  // Both outlive the listener.
  Listener(const HttpServerOptions& options, HttpHandler& handler);
  ~Listener() override;  // Stop()

  // Before Start(): new connections speak TLS. Outlives the listener.
  void SetTls(const TlsContext* tls) { tls_ = tls; }

  // Binds and begins to serve. kUnavailable names the address that cannot be bound; kResourceExhausted: no file may be
  // opened for a connection.
  absl::Status Start();
  int port() const { return port_; }

  // Waits until no request is under way or `limit` is over; then tells those that are left to end and gives them
  // `grace` to be written. Returns whether all ended by themselves. New connections are still accepted: the handler
  // answers them.
  bool Drain(absl::Duration limit, absl::Duration grace);
  void Stop();  // closes everything and joins the threads

  int connections() const;
  HttpStats stats() const;

  // Sets the maximum of connections by the descriptors that are left now: the rest of the process opens some, too.
  void RefreshLimit();
  ConnectionLimit limit() const;

  boost::asio::io_context& context(int io_thread) { return threads_[io_thread]->context; }
  std::string NewRequestId() override;

 private:
  struct IoThread {
    boost::asio::io_context context{1};
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{context.get_executor()};
    std::thread thread;
  };

  void Accept();
  void AcceptOne();
  void OnAccepted(boost::asio::ip::tcp::socket socket, int io_thread);
  void OutOfDescriptors(const boost::system::error_code& error);
  void RefuseConnection(boost::asio::ip::tcp::socket socket);
  void End(Connection* connection);  // under the lock
  std::vector<std::shared_ptr<Connection>> Snapshot();

  void OnClosed(Connection* connection) override;
  void OnIdle(Connection* connection) override;
  void OnBusy(Connection* connection) override;
  bool TakePlace(Connection* connection) override;
  void OnStays(Connection* connection) override;
  void OnExchangeBegan() override;
  void OnExchangeEnded() override;
  void OnTlsFailure(TlsFailure why, const std::string& client, const std::string& what) override;
  HttpCounters& counters() override { return counters_; }
  const std::shared_ptr<BodyBudget>& bodies() override { return bodies_; }

  const HttpServerOptions& options_;
  HttpHandler& handler_;
  HttpCounters counters_;
  const std::shared_ptr<BodyBudget> bodies_;
  const TlsContext* tls_ = nullptr;
  std::vector<std::unique_ptr<IoThread>> threads_;
  std::unique_ptr<boost::asio::ip::tcp::acceptor> acceptor_;
  std::unique_ptr<boost::asio::steady_timer> accept_retry_;
  int port_ = 0;
  int next_thread_ = 0;
  bool started_ = false;

  mutable Mutex mutex_;
  CondVar idle_;
  std::unordered_map<Connection*, std::weak_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
  Places places_ ABSL_GUARDED_BY(mutex_);
  ConnectionLimit limit_ ABSL_GUARDED_BY(mutex_);
  int active_exchanges_ ABSL_GUARDED_BY(mutex_) = 0;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  LogGate full_log_, descriptor_log_, tls_log_;
};

}  // namespace dovetail::server
