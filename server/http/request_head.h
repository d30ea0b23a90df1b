#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// The head of an HTTP/1.x request, read as strictly as RFC 9112 allows: what two parsers could read in two ways is
// refused, so that nothing can be smuggled past a proxy.
// Threads: plain values and pure functions.

namespace dovetail::server {

struct HeadLimits {
  size_t line_bytes = 8 * 1024;    // of the request line and of each header line
  size_t total_bytes = 16 * 1024;  // all header lines
  int headers = 100;
};

struct RequestHead {
  std::string method;
  std::string path;   // percent-decoded, without the query; "*": the server as a whole (OPTIONS only)
  std::string query;  // as sent
  int minor_version = 1;
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case, values without white space around

  std::optional<uint64_t> content_length;
  bool chunked = false;
  bool keep_alive = true;
  bool expect_continue = false;

  const std::string* Find(std::string_view lower_case_name) const;
};

struct HttpProblem {
  int status = 0;  // 0: none
  std::string message;
};

bool IsTokenChar(unsigned char c);  // of a field's name: RFC 9110, section 5.6.2

// Looks for the empty line that ends the head, resuming at `scanned` (start with 0). Refuses what no later byte could
// make right.
struct HeadScan {
  size_t scanned = 0;  // bytes looked at
  size_t line_begin = 0;
  int lines = 0;   // complete ones
  size_t end = 0;  // > 0: bytes of the head, the empty line included
  HttpProblem problem;
};
void ScanHead(std::string_view bytes, const HeadLimits& limits, HeadScan& scan);

// The path of the request line that `bytes` begin with, as sent and as far as it is there; "" before it begins.
std::string_view PathOf(std::string_view bytes);

// Parses a head that ScanHead found complete.
HttpProblem ParseHead(std::string_view head, RequestHead& out);

}  // namespace dovetail::server
