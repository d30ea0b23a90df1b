#pragma once
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <utility>

namespace dovetail::server {

// Notices that nothing was sent for a while. What it calls keeps its owner alive, until Stop().
// Threads: the I/O thread of its executor only.
class QuietTimer {
 public:
  explicit QuietTimer(const boost::asio::any_io_executor& executor) : timer_(executor) {}

  void Sent() { last_ = std::chrono::steady_clock::now(); }
  // Calls `on_quiet` each time that nothing was sent for `quiet`, counted from now.
  void Watch(std::chrono::milliseconds quiet, std::function<void()> on_quiet) {
    Sent();
    Wait(quiet, std::move(on_quiet));
  }
  void Stop() {
    ++serial_;
    timer_.cancel();
  }

 private:
  void Wait(std::chrono::milliseconds quiet, std::function<void()> on_quiet) {
    timer_.expires_at(last_ + quiet);
    timer_.async_wait([this, quiet, serial = serial_,
                       on_quiet = std::move(on_quiet)](const boost::system::error_code& error) mutable {
      if (error || serial != serial_) return;
      if (std::chrono::steady_clock::now() - last_ >= quiet) {
        on_quiet();
        if (serial != serial_) return;  // it ended what was watched
        Sent();
      }
      Wait(quiet, std::move(on_quiet));
    });
  }

  boost::asio::steady_timer timer_;
  std::chrono::steady_clock::time_point last_;
  uint64_t serial_ = 0;  // of what is watched: a wait that is over already cannot be cancelled
};

}  // namespace dovetail::server
