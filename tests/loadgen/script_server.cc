#include "tests/loadgen/script_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace dovetail::loadgen::test {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

}  // namespace

void Visit::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

void Visit::Answer(int status, const std::string& body) {
  Send(absl::StrCat("HTTP/1.1 ", status, " Said\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
                    "\r\n\r\n", body));
}

void Visit::BeginStream() {
  Send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
}
void Visit::Chunk(std::string_view data) { Send(absl::StrFormat("%x\r\n%s\r\n", data.size(), data)); }
void Visit::EndStream() { Send("0\r\n\r\n"); }
void Visit::Event(const std::string& data) { Chunk(absl::StrCat("data: ", data, "\n\n")); }

void Visit::EventAfter(ManualClock& clock, absl::Duration duration, const std::string& data) {
  clock.Advance(duration);
  const int64_t before = clock.reads();
  Event(data);
  const absl::Time give_up = absl::Now() + kPatience;
  while (clock.reads() == before && absl::Now() < give_up) std::this_thread::yield();
}

void Visit::Close() {
  closed_ = true;
  shutdown(socket_, SHUT_RDWR);
}

void Visit::WaitUntilClosed() {
  char byte;
  while (recv(socket_, &byte, 1, 0) > 0) {
  }
}

ScriptServer::ScriptServer(std::function<void(Visit&)> serve) : serve_(std::move(serve)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  DT_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  DT_CHECK(listen(listener_, 64) == 0);
  socklen_t size = sizeof address;
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

ScriptServer::~ScriptServer() {
  shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  {
    std::lock_guard lock(mutex_);
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }
  for (std::thread& thread : threads_) thread.join();
  for (const int socket : sockets_) close(socket);
  close(listener_);
}

void ScriptServer::Accept() {
  while (true) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) return;
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ++connections_;
    std::lock_guard lock(mutex_);
    sockets_.push_back(socket);
    threads_.emplace_back([this, socket] { Serve(socket); });
  }
}

void ScriptServer::Serve(int socket) {
  std::string buffer;
  char bytes[65536];
  while (true) {
    size_t end = buffer.find("\r\n\r\n");
    size_t length = 0;
    if (end != std::string::npos) {
      const size_t field = buffer.find("Content-Length: ");
      if (field != std::string::npos && field < end)
        length = static_cast<size_t>(std::atoll(buffer.c_str() + field + 16));
    }
    if (end == std::string::npos || buffer.size() < end + 4 + length) {
      const ssize_t got = recv(socket, bytes, sizeof bytes, 0);
      if (got <= 0) return;
      buffer.append(bytes, static_cast<size_t>(got));
      continue;
    }
    Visit visit(socket, buffer.substr(0, end), buffer.substr(end + 4, length));
    buffer.erase(0, end + 4 + length);
    serve_(visit);
    if (visit.closed()) return;  // a request that came before the shutdown could still be read
  }
}

std::string TextChunk(const std::string& text) {
  return nlohmann::json{{"choices", {{{"index", 0}, {"text", text}}}}}.dump();
}
std::string ChatChunk(const std::string& text) {
  return nlohmann::json{{"choices", {{{"index", 0}, {"delta", {{"content", text}}}}}}}.dump();
}
std::string UsageChunk(int64_t prompt_tokens, int64_t completion_tokens) {
  return nlohmann::json{{"choices", nlohmann::json::array()},
                        {"usage", {{"prompt_tokens", prompt_tokens}, {"completion_tokens", completion_tokens}}}}
      .dump();
}

}  // namespace dovetail::loadgen::test
