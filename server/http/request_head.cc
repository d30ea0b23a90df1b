#include "server/http/request_head.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dovetail::server {
namespace {

bool IsToken(std::string_view text) { return !text.empty() && std::all_of(text.begin(), text.end(), IsTokenChar); }

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  absl::AsciiStrToLower(&lower);
  return lower;
}

HttpProblem Bad(std::string message) { return {400, std::move(message)}; }

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool PercentDecode(std::string_view text, std::string& out) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    if (i + 2 >= text.size()) return false;
    const int high = HexDigit(text[i + 1]), low = HexDigit(text[i + 2]);
    if (high < 0 || low < 0 || high * 16 + low < 0x20) return false;
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return true;
}

// Of a target in absolute form (RFC 9112, section 3.2.2) takes the scheme and the host away and returns the host; empty
// for any other target.
std::string_view TakeAuthority(std::string_view& target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (Lower(target.substr(0, scheme.size())) != scheme) continue;
    const size_t end = std::min(target.find_first_of("/?", scheme.size()), target.size());
    const std::string_view authority = target.substr(scheme.size(), end - scheme.size());
    if (authority.empty()) return {};
    target.remove_prefix(end);
    return authority;
  }
  return {};
}

// `authority` points into `line`; empty unless the target is in absolute form.
HttpProblem ParseRequestLine(std::string_view line, RequestHead& out, std::string_view& authority) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return Bad("The request line is not METHOD TARGET VERSION.");
  const std::string_view method = line.substr(0, first), version = line.substr(last + 1);
  std::string_view target = line.substr(first + 1, last - first - 1);
  if (!IsToken(method) || method.size() > 32) return Bad("The request method is not a token.");
  if (version == "HTTP/1.1") {
    out.minor_version = 1;
  } else if (version == "HTTP/1.0") {
    out.minor_version = 0;
  } else if (version.size() == 8 && version.substr(0, 5) == "HTTP/" && absl::ascii_isdigit(version[5]) &&
             version[6] == '.' && absl::ascii_isdigit(version[7])) {
    return {505, "This server speaks HTTP/1.1 and HTTP/1.0."};
  } else {
    return Bad("The request line does not end with an HTTP version.");
  }
  authority = TakeAuthority(target);
  out.method = method;
  // Of the server as a whole: RFC 9112, section 3.2.4.
  if (method == "OPTIONS" && (authority.empty() ? target == "*" : target.empty())) {
    out.path = "*";
    return {};
  }
  const bool no_path = !authority.empty() && (target.empty() || target.front() == '?');
  if (!no_path && (target.empty() || target.front() != '/')) return Bad("The request target must begin with a slash.");
  for (const unsigned char c : target)
    if (c <= 0x20 || c >= 0x7f || c == '#')
      return Bad("The request target has a character that must be percent-encoded.");
  const size_t question = target.find('?');
  if (!PercentDecode(target.substr(0, question), out.path))
    return Bad("The request target has a bad percent-encoding.");
  if (no_path) out.path.push_back('/');
  if (question != std::string_view::npos) out.query = target.substr(question + 1);
  return {};
}

HttpProblem ParseContentLength(std::string_view value, RequestHead& out) {
  if (out.content_length) return Bad("Content-Length comes twice.");
  if (value.empty() || value.size() > 18 ||
      !std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; }))
    return Bad("Content-Length is not a plain decimal number.");
  uint64_t length = 0;
  for (const char c : value) length = length * 10 + (c - '0');
  out.content_length = length;
  return {};
}

HttpProblem ParseHeader(std::string_view line, RequestHead& out) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return Bad("A header line has no colon.");
  const std::string_view name = line.substr(0, colon);
  if (!IsToken(name))
    return Bad("A header name is not a token (white space, folding and control characters are refused).");
  const std::string_view value = Trim(line.substr(colon + 1));
  const std::string lower = Lower(name);
  if (lower == "content-length") {
    if (HttpProblem problem = ParseContentLength(value, out); problem.status != 0) return problem;
  } else if (lower == "transfer-encoding") {
    if (out.chunked) return Bad("Transfer-Encoding comes twice.");
    if (Lower(value) != "chunked") return Bad("Transfer-Encoding may only be chunked.");
    out.chunked = true;
  } else if (lower == "host") {
    if (out.Find("host") != nullptr) return Bad("Host comes twice.");
    for (const unsigned char c : value)
      if (c <= 0x20 || c >= 0x7f || c == '/' || c == '@' || c == ',') return Bad("Host is not a host and port.");
  } else if (lower == "expect") {
    if (Lower(value) != "100-continue") return {417, "Expect may only be 100-continue."};
    out.expect_continue = true;
  } else if (lower == "authorization" || lower == "content-type" || lower == "x-api-key") {
    if (out.Find(lower) != nullptr) return Bad(absl::StrCat(lower, " comes twice."));
  }
  out.headers.emplace_back(lower, value);
  return {};
}

HttpProblem CheckTogether(std::string_view authority, RequestHead& out) {
  if (out.chunked && out.content_length) return Bad("Content-Length and Transfer-Encoding exclude each other.");
  if (out.chunked && out.minor_version == 0) return Bad("HTTP/1.0 has no Transfer-Encoding.");
  if (out.minor_version == 1 && out.Find("host") == nullptr) return Bad("HTTP/1.1 requires a Host header.");
  const std::string* host = out.Find("host");
  if (!authority.empty() && host != nullptr && Lower(*host) != Lower(authority))
    return Bad("Host differs from the host in the request target.");
  if (out.minor_version == 0) out.expect_continue = false;  // RFC 9110, section 10.1.1
  out.keep_alive = out.minor_version == 1;
  for (const auto& [name, value] : out.headers) {
    if (name != "connection") continue;
    for (const auto option : absl::StrSplit(value, ',')) {
      const std::string lower = Lower(Trim({option.data(), option.size()}));
      if (lower == "close") out.keep_alive = false;
      if (lower == "keep-alive" && out.minor_version == 0) out.keep_alive = true;
    }
  }
  return {};
}

}  // namespace

bool IsTokenChar(unsigned char c) {
  constexpr std::string_view kOther = "!#$%&'*+-.^_`|~";
  return absl::ascii_isalnum(c) || kOther.find(static_cast<char>(c)) != std::string_view::npos;
}

const std::string* RequestHead::Find(std::string_view lower_case_name) const {
  for (const auto& [name, value] : headers)
    if (name == lower_case_name) return &value;
  return nullptr;
}

void ScanHead(std::string_view bytes, const HeadLimits& limits, HeadScan& scan) {
  for (size_t& i = scan.scanned; i < bytes.size(); ++i) {
    const unsigned char c = bytes[i];
    if (c == '\n') {
      if (i == 0 || bytes[i - 1] != '\r') return void(scan.problem = Bad("A line ends without a carriage return."));
      const size_t length = i + 1 - scan.line_begin;
      scan.line_begin = i + 1;
      if (length == 2) {
        if (i == 1) continue;  // one empty line before a request is ignored: RFC 9112, section 2.2
        if (scan.lines == 0) return void(scan.problem = Bad("The request begins with two empty lines."));
        scan.end = i + 1;
        return;
      }
      if (++scan.lines > limits.headers + 1)
        return void(scan.problem = {431, absl::StrCat("More than ", limits.headers, " headers.")});
      continue;
    }
    if (i > 0 && bytes[i - 1] == '\r') return void(scan.problem = Bad("A carriage return stands inside a line."));
    if ((c < 0x20 && c != '\t' && c != '\r') || c == 0x7f)
      return void(scan.problem = Bad("The request head has a control character."));
    if (i - scan.line_begin >= limits.line_bytes) {
      if (scan.lines == 0)
        return void(
            scan.problem = {414, absl::StrCat("The request line is longer than ", limits.line_bytes, " bytes.")});
      return void(scan.problem = {431, absl::StrCat("A header line is longer than ", limits.line_bytes, " bytes.")});
    }
    if (i >= limits.total_bytes)
      return void(scan.problem = {431, absl::StrCat("The headers are longer than ", limits.total_bytes, " bytes.")});
  }
}

std::string_view PathOf(std::string_view bytes) {
  const std::string_view line = bytes.substr(0, bytes.find_first_of("\r\n"));
  const size_t method = line.find(' ');
  if (method == std::string_view::npos) return {};
  const std::string_view rest = line.substr(method + 1);
  return rest.substr(0, rest.find_first_of(" ?"));
}

HttpProblem ParseHead(std::string_view head, RequestHead& out) {
  size_t begin = head.substr(0, 2) == "\r\n" ? 2 : 0;
  bool first = true;
  std::string_view authority;
  while (begin + 2 < head.size()) {
    const size_t end = head.find("\r\n", begin);
    const std::string_view line = head.substr(begin, end - begin);
    HttpProblem problem = first ? ParseRequestLine(line, out, authority) : ParseHeader(line, out);
    if (problem.status != 0) return problem;
    first = false;
    begin = end + 2;
  }
  return CheckTogether(authority, out);
}

}  // namespace dovetail::server
