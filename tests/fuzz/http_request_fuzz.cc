#include <algorithm>
#include <string>
#include <string_view>

#include "base/check.h"
#include "server/http/body_decoder.h"
#include "server/http/request_head.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

constexpr size_t kMaxBody = 4096;

struct Outcome {
  int status = 0;  // 0: taken
  std::string method, path, body;
  bool whole = false;
  size_t used = 0;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// Reads one request as a connection does, in pieces of `step` bytes.
Outcome ReadRequest(std::string_view bytes, size_t step) {
  Outcome outcome;
  server::HeadScan scan;
  const server::HeadLimits limits;
  size_t there = 0;
  while (scan.end == 0 && scan.problem.status == 0 && there < bytes.size()) {
    there = std::min(bytes.size(), there + step);
    server::ScanHead(bytes.substr(0, there), limits, scan);
  }
  outcome.status = scan.problem.status;
  if (scan.end == 0 || outcome.status != 0) return outcome;
  DT_CHECK(scan.end <= bytes.size());
  server::RequestHead head;
  if (const auto problem = server::ParseHead(bytes.substr(0, scan.end), head); problem.status != 0) {
    outcome.status = problem.status;
    return outcome;
  }
  DT_CHECK(!head.method.empty());
  DT_CHECK(head.path.front() == '/' || (head.path == "*" && head.method == "OPTIONS"));
  DT_CHECK(!(head.chunked && head.content_length), "two framings");
  DT_CHECK(head.headers.size() <= static_cast<size_t>(limits.headers));
  outcome.method = head.method;
  outcome.path = head.path;
  const auto budget = std::make_shared<server::BodyBudget>(kMaxBody);
  server::BodyDecoder body(head, {.max_bytes = kMaxBody, .budget = budget});
  size_t at = scan.end;
  while (at < bytes.size() && !body.done() && body.problem().status == 0) {
    const size_t used = body.Consume(bytes.substr(at, step));
    DT_CHECK(used > 0 || body.problem().status != 0, "no progress");
    at += used;
  }
  outcome.status = body.problem().status;
  outcome.whole = body.done();
  DT_CHECK(body.body().bytes().size() <= kMaxBody);
  DT_CHECK(budget->held() <= kMaxBody && budget->held() + 15 >= body.body().bytes().size(), "bytes are not counted");
  if (outcome.whole) {
    outcome.body = body.body().bytes();
    outcome.used = at;
  }
  return outcome;
}

}  // namespace

// Any bytes as what a client sends: the same request, or the same refusal, wherever the network cuts it.
void FuzzHttpRequest(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Outcome whole = ReadRequest(bytes, bytes.size() + 1);
  for (const size_t step : {size_t{1}, size_t{7}}) DT_CHECK(ReadRequest(bytes, step) == whole, "cuts matter");
  DT_CHECK(whole.status == 0 || (whole.status >= 400 && whole.status <= 505));
}

}  // namespace dovetail::fuzz
