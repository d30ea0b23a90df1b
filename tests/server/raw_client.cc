#include "tests/server/raw_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"

namespace dovetail::server::test {
namespace {
constexpr int kWaitMs = 30'000;

std::string_view Trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  return text;
}
absl::string_view A(std::string_view text) { return {text.data(), text.size()}; }
}  // namespace

RawClient::RawClient(int port, int receive_buffer_bytes) {
  fd_ = socket(AF_INET, SOCK_STREAM, 0);
  DT_CHECK(fd_ >= 0);
  if (receive_buffer_bytes > 0)
    setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof receive_buffer_bytes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  DT_CHECK(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "cannot connect to port ", port);
}

RawClient::RawClient(RawClient&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), eof_(other.eof_), buffer_(std::move(other.buffer_)) {}
RawClient::~RawClient() { Close(); }

void RawClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void RawClient::HalfClose() { shutdown(fd_, SHUT_WR); }

void RawClient::Reset() {
  const linger now{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  Close();
}

bool RawClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(sent);
  }
  return true;
}

bool RawClient::Fill() {
  if (eof_) return false;
  pollfd waiting{fd_, POLLIN, 0};
  if (poll(&waiting, 1, kWaitMs) <= 0) return false;
  char chunk[16384];
  const ssize_t got = recv(fd_, chunk, sizeof chunk, 0);
  if (got <= 0) {
    eof_ = true;
    return false;
  }
  buffer_.append(chunk, got);
  return true;
}

bool RawClient::ReadUntil(std::string_view text) {
  while (buffer_.find(text) == std::string::npos)
    if (!Fill()) return false;
  return true;
}

bool RawClient::WaitForClose() {
  while (Fill()) buffer_.clear();
  return eof_;
}

RawResponse RawClient::Read(bool head_only) {
  RawResponse response;
  if (!ReadUntil("\r\n\r\n")) {
    response.closed = eof_;
    return response;
  }
  const size_t end = buffer_.find("\r\n\r\n");
  const std::string head = buffer_.substr(0, end + 2);
  buffer_.erase(0, end + 4);
  response.status = std::stoi(head.substr(9, 3));
  for (size_t at = head.find("\r\n") + 2; at < head.size();) {
    const size_t line_end = head.find("\r\n", at), colon = head.find(':', at);
    response.headers[absl::AsciiStrToLower(head.substr(at, colon - at))] =
        Trim(std::string_view(head).substr(colon + 1, line_end - colon - 1));
    at = line_end + 2;
  }
  if (head_only || response.status == 100) {
    response.complete = true;
  } else if (response.headers.count("content-length") > 0) {
    const size_t length = std::stoul(response.headers["content-length"]);
    while (buffer_.size() < length && Fill()) {
    }
    response.complete = buffer_.size() >= length;
    response.body = buffer_.substr(0, length);
    buffer_.erase(0, length);
  } else if (response.headers.count("transfer-encoding") > 0) {
    while (ReadUntil("\r\n")) {
      const size_t line = buffer_.find("\r\n");
      const size_t size = std::stoul(buffer_.substr(0, line), nullptr, 16);
      while (buffer_.size() < line + 2 + size + 2 && Fill()) {
      }
      if (buffer_.size() < line + 2 + size + 2) break;
      response.body += buffer_.substr(line + 2, size);
      buffer_.erase(0, line + 2 + size + 2);
      if (size == 0) {
        response.complete = true;
        break;
      }
    }
  } else {
    while (Fill()) {
    }
    response.body = std::exchange(buffer_, {});
    response.complete = eof_;
  }
  if (response.headers.count("connection") > 0 && response.headers["connection"] == "close")
    response.closed = WaitForClose();
  return response;
}

std::string Get(std::string_view path, std::string_view headers) {
  return absl::StrCat("GET ", A(path), " HTTP/1.1\r\nHost: test\r\n", A(headers), "\r\n");
}

std::string Post(std::string_view path, std::string_view body, std::string_view headers) {
  return absl::StrCat("POST ", A(path),
                      " HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
                      "\r\n", A(headers), "\r\n", A(body));
}

std::vector<std::string> SseData(const std::string& body) {
  std::vector<std::string> data;
  for (const auto line : absl::StrSplit(body, '\n')) {
    if (absl::StartsWith(line, "data: ")) {
      data.emplace_back(line.substr(6));
    } else if (!line.empty() && !absl::StartsWith(line, "event: ") && !absl::StartsWith(line, ":")) {
      return data;
    }
  }
  return data;
}

}  // namespace dovetail::server::test
