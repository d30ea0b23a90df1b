#include "loadgen/server_times.h"

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "loadgen/openai.h"

namespace dovetail::loadgen {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);

// The sum over all label sets of one sample; nullopt where there is none.
std::optional<double> SumOf(const std::vector<std::string>& lines, const std::string& name) {
  std::optional<double> sum;
  for (const std::string& line : lines) {
    if (line.compare(0, name.size(), name) != 0 || line.size() <= name.size()) continue;
    const char next = line[name.size()];
    const size_t end = next == '{' ? line.rfind('}') : name.size();
    if ((next != '{' && next != ' ') || end == std::string::npos) continue;
    double value = 0;
    const size_t begin = next == '{' ? end + 1 : end;
    // A time of day may follow the value.
    const std::vector<std::string> words = absl::StrSplit(line.substr(begin), ' ', absl::SkipEmpty());
    if (words.empty() || !absl::SimpleAtod(words[0], &value) || !std::isfinite(value)) continue;
    sum = sum.value_or(0) + value;
  }
  return sum;
}

}  // namespace

absl::StatusOr<ServerTimes> ServerTimes::Since(const ServerTimes& before) const {
  const ServerTimes out{queue_s - before.queue_s, prefill_s - before.prefill_s, decode_s - before.decode_s,
                        requests - before.requests};
  if (out.queue_s < 0 || out.prefill_s < 0 || out.decode_s < 0 || out.requests < 0)
    return absl::UnavailableError("/metrics: the server has counted from 0 again meanwhile");
  return out;
}

absl::StatusOr<ServerTimes> ParseServerTimes(std::string_view metrics) {
  const std::vector<std::string> lines = absl::StrSplit(std::string(metrics), '\n');
  const auto find = [&](const char* name) -> absl::StatusOr<double> {
    const auto sum = SumOf(lines, name);
    if (!sum.has_value()) return absl::UnavailableError(absl::StrCat("/metrics: has no ", name));
    return *sum;
  };
  ServerTimes times;
  DT_ASSIGN_OR_RETURN(times.queue_s, find("vllm:request_queue_time_seconds_sum"));
  DT_ASSIGN_OR_RETURN(times.prefill_s, find("vllm:request_prefill_time_seconds_sum"));
  DT_ASSIGN_OR_RETURN(times.decode_s, find("vllm:request_decode_time_seconds_sum"));
  DT_ASSIGN_OR_RETURN(const double count, find("vllm:request_decode_time_seconds_count"));
  times.requests = std::llround(count);
  return times;
}

absl::StatusOr<ServerTimes> AskForServerTimes(http_client::HttpClient& client, const Headers& headers) {
  http_client::HttpRequest request;
  request.method = "GET";
  request.target = "/metrics";
  request.headers = headers;
  auto answer = client.Fetch(request, kPatience);
  if (!answer.ok()) return absl::UnavailableError(absl::StrCat("/metrics: ", std::string(answer.status().message())));
  if (answer->status != 200)
    return absl::UnavailableError(absl::StrCat("/metrics: HTTP ", answer->status, ": ", ErrorText(answer->body)));
  return ParseServerTimes(answer->body);
}

}  // namespace dovetail::loadgen
