#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"

// A server whose every byte and moment a test decides.

namespace dovetail::loadgen::test {

// A clock that stands still between the moves of a test. Thread-safe.
class ManualClock final : public Clock {
 public:
  absl::Time Now() override {
    ++reads_;
    return absl::UnixEpoch() + absl::Nanoseconds(ns_.load());
  }
  void Advance(absl::Duration duration) { ns_ += absl::ToInt64Nanoseconds(duration); }
  int64_t reads() const { return reads_; }

 private:
  std::atomic<int64_t> ns_ = 0, reads_ = 0;
};

// One request that the server has read, and the way back.
class Visit {
 public:
  Visit(int socket, std::string head, std::string body)
      : socket_(socket), head_(std::move(head)), body_(std::move(body)) {}

  const std::string& head() const { return head_; }  // request line and fields
  const std::string& body() const { return body_; }

  void Send(std::string_view bytes);
  void Answer(int status, const std::string& body);  // a whole answer of JSON
  void BeginStream();
  void Chunk(std::string_view data);  // one chunk of the transfer encoding
  void EndStream();
  // Advances `clock`, sends one event and waits until the client has looked at the clock for it.
  void EventAfter(ManualClock& clock, absl::Duration duration, const std::string& data);
  void Event(const std::string& data);
  void Close();            // the connection, at once: no later request of it is served
  void WaitUntilClosed();  // by the client
  bool closed() const { return closed_; }

 private:
  const int socket_;
  bool closed_ = false;
  const std::string head_, body_;
};

// Accepts on a free port of the loopback until it is destroyed. `serve` runs on a thread of the connection, once for
// each of its requests.
class ScriptServer {
 public:
  explicit ScriptServer(std::function<void(Visit&)> serve);
  ~ScriptServer();
  int port() const { return port_; }
  int connections() const { return connections_; }

 private:
  void Accept();
  void Serve(int socket);

  const std::function<void(Visit&)> serve_;
  int listener_ = -1, port_ = 0;
  std::atomic<int> connections_ = 0;
  std::mutex mutex_;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::thread acceptor_;
};

std::string TextChunk(const std::string& text);                            // of a completion
std::string ChatChunk(const std::string& text);                            // of a chat completion
std::string UsageChunk(int64_t prompt_tokens, int64_t completion_tokens);  // without choices

}  // namespace dovetail::loadgen::test
