#pragma once
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dovetail::server::test {

struct RawResponse {
  int status = 0;                              // 0: the connection closed before a whole head
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // unchunked
  bool complete = false;                       // the framing says so
  bool closed = false;                         // the server closed behind it
};

// A TCP client that sends exactly what it is told, for what HTTP libraries refuse to send. Every wait ends after 30 s.
class RawClient {
 public:
  explicit RawClient(int port, int receive_buffer_bytes = 0);
  ~RawClient();
  RawClient(RawClient&& other) noexcept;

  bool Send(std::string_view bytes);  // false: the server closed
  void HalfClose();                   // sends FIN, goes on reading
  void Reset();                       // closes with RST
  void Close();

  RawResponse Read(bool head_only = false);  // one response
  // Reads at least until the received, not yet consumed bytes contain `text`; false at the end of the stream.
  bool ReadUntil(std::string_view text);
  bool WaitForClose();  // reads and drops until the server closes
  int fd() const { return fd_; }

 private:
  bool Fill();
  int fd_ = -1;
  bool eof_ = false;
  std::string buffer_;
};

std::string Get(std::string_view path, std::string_view headers = "");
std::string Post(std::string_view path, std::string_view body, std::string_view headers = "");

// The payloads of the "data: " lines of a stream, up to a line that belongs to no stream.
std::vector<std::string> SseData(const std::string& body);

}  // namespace dovetail::server::test
