#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_split.h"
#include "server/cli/cost_report.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;

std::optional<double> NumberIn(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  const double value = found->get<double>();
  return std::isfinite(value) && value >= 0 ? std::optional(value) : std::nullopt;
}

void AddRate(const json& result, ResultDetails& details) {
  const auto rate = NumberIn(result, "request_rate");
  const auto ttft = NumberIn(result, "median_ttft_ms"), ttft_p99 = NumberIn(result, "p99_ttft_ms");
  const auto tpot = NumberIn(result, "median_tpot_ms"), tpot_p99 = NumberIn(result, "p99_tpot_ms");
  if (rate.has_value() && ttft.has_value() && ttft_p99.has_value() && tpot.has_value() && tpot_p99.has_value())
    details.rates.push_back({*rate, *ttft, *ttft_p99, *tpot, *tpot_p99});
}

// The sum of the gaps between chunks, in seconds.
std::optional<double> SumOf(const json& gaps) {
  if (!gaps.is_array()) return std::nullopt;
  double sum = 0;
  for (const json& gap : gaps) {
    if (!gap.is_number() || !(gap.get<double>() >= 0)) return std::nullopt;
    sum += gap.get<double>();
  }
  return sum;
}

void AddRequests(const json& result, ResultDetails& details) {
  const auto array = [&](const char* name) -> const json* {
    const auto found = result.find(name);
    return found != result.end() && found->is_array() ? &*found : nullptr;
  };
  const json *ttfts = array("ttfts"), *gaps = array("itls"), *lengths = array("output_lens");
  if (ttfts == nullptr || gaps == nullptr || lengths == nullptr) return;
  const size_t count = std::min({ttfts->size(), gaps->size(), lengths->size()});
  for (size_t i = 0; i < count; ++i) {
    const json &ttft = (*ttfts)[i], &length = (*lengths)[i];
    const auto later = SumOf((*gaps)[i]);
    // Requests that failed have no output.
    if (!ttft.is_number() || !length.is_number_integer() || length.get<int64_t>() < 1 || !later.has_value()) continue;
    const int64_t tokens = length.get<int64_t>();
    details.requests.push_back(
        {1e3 * ttft.get<double>(), tokens > 1 ? 1e3 * *later / static_cast<double>(tokens - 1) : 0, tokens});
  }
}

}  // namespace

ResultDetails ReadDetails(const std::string& text) {
  ResultDetails details;
  json last;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n', absl::SkipWhitespace()))) {
    json result = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!result.is_object()) continue;
    AddRate(result, details);
    last = std::move(result);
  }
  if (!last.is_object()) last = json::parse(text, nullptr, /*allow_exceptions=*/false);  // one result in many lines
  if (!last.is_object()) return details;
  if (details.rates.empty()) AddRate(last, details);
  details.seconds = NumberIn(last, "duration").value_or(0);
  details.mean_ttft_ms = NumberIn(last, "mean_ttft_ms");
  details.mean_e2el_ms = NumberIn(last, "mean_e2el_ms");
  AddRequests(last, details);
  const auto by_rate = [](const auto& a, const auto& b) { return a.rate < b.rate; };
  std::stable_sort(details.rates.begin(), details.rates.end(), by_rate);
  return details;
}

}  // namespace dovetail::cli
