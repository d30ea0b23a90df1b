#include "plan/cost.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace dovetail::plan {
namespace {

constexpr double kMillion = 1e6, kSecondsPerHour = 3600;
constexpr int64_t kMostMachines = 1'000'000;

absl::StatusOr<double> UsdOf(const Layout& layout, const Catalogue& catalogue, PriceOf price,
                             std::optional<Role> only = std::nullopt) {
  double usd = 0;
  for (const Machines& machines : layout.machines) {
    if (only.has_value() && machines.role != *only) continue;
    DT_ASSIGN_OR_RETURN(const Device device, catalogue.Find(machines.device));
    usd += static_cast<double>(machines.count) *
           (price == PriceOf::kLow ? device.low_usd_per_hour : device.high_usd_per_hour);
  }
  return usd;
}

absl::StatusOr<Role> RoleOf(const std::string& name) {
  if (name == "compute") return Role::kCompute;
  if (name == "attention") return Role::kAttention;
  if (name == "host") return Role::kHost;
  return InvalidArgument("there is no role '", name, "'; there are compute, attention and host");
}

std::optional<double> PerMillion(double usd_per_hour, double tokens_s, double utilization) {
  if (!(tokens_s > 0)) return std::nullopt;
  return usd_per_hour / (tokens_s * utilization * kSecondsPerHour) * kMillion;
}

}  // namespace

int64_t Layout::Count(Role role) const {
  int64_t count = 0;
  for (const Machines& of_role : machines) count += of_role.role == role ? of_role.count : 0;
  return count;
}

absl::StatusOr<std::vector<Machines>> ParseMachines(const std::string& text) {
  std::vector<Machines> all;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ','))) {
    const size_t dot = part.find('.'), colon = part.rfind(':');
    int64_t count = 1;
    if (dot == std::string::npos || (colon != std::string::npos && colon < dot))
      return InvalidArgument("'", part, "' is not ROLE.DEVICE:COUNT, as compute.h100:2");
    if (colon != std::string::npos &&
        (!absl::SimpleAtoi(part.substr(colon + 1), &count) || count < 1 || count > kMostMachines))
      return InvalidArgument("'", part, "': the count is outside 1..", kMostMachines);
    DT_ASSIGN_OR_RETURN(const Role role, RoleOf(part.substr(0, dot)));
    const size_t end = colon == std::string::npos ? part.size() : colon;
    all.push_back({role, part.substr(dot + 1, end - dot - 1), count});
    if (all.back().device.empty()) return InvalidArgument("'", part, "' names no device");
  }
  return all;
}

absl::StatusOr<double> UsdPerHour(const Layout& layout, const Catalogue& catalogue, PriceOf price) {
  return UsdOf(layout, catalogue, price);
}

absl::StatusOr<TokenCost> CostOf(const Layout& layout, const Throughput& throughput, const Catalogue& catalogue,
                                 PriceOf price, double utilization) {
  if (!(utilization > 0 && utilization <= 1))
    return InvalidArgument("--utilization: ", utilization, " is outside (0, 1]");
  TokenCost cost;
  DT_ASSIGN_OR_RETURN(cost.usd_per_hour, UsdPerHour(layout, catalogue, price));
  const auto per_million = [&](double tokens_s) { return PerMillion(cost.usd_per_hour, tokens_s, utilization); };
  cost.input_usd = per_million(throughput.input_tokens_s);
  cost.output_usd = per_million(throughput.output_tokens_s);
  cost.mixed_usd = per_million(throughput.input_tokens_s + throughput.output_tokens_s);
  if (throughput.good_output_tokens_s.has_value()) cost.good_output_usd = per_million(*throughput.good_output_tokens_s);
  if (cost.usd_per_hour > 0)
    cost.output_tokens_s_per_usd_h = throughput.output_tokens_s * utilization / cost.usd_per_hour;
  return cost;
}

absl::StatusOr<double> BreakEvenRatio(const Layout& whole, const Throughput& of_whole, const Layout& split,
                                      const Throughput& of_split, const Catalogue& catalogue, PriceOf price) {
  const int64_t attention = split.Count(Role::kAttention), compute = split.Count(Role::kCompute);
  if (attention == 0 || compute == 0)
    return InvalidArgument(split.name, ": a break-even needs compute and attention devices in the split layout");
  if (whole.Count(Role::kAttention) > 0)
    return InvalidArgument(whole.name, ": is split itself; a break-even compares with a layout that is not");
  if (!(of_whole.output_tokens_s > 0) || !(of_split.output_tokens_s > 0))
    return InvalidArgument(whole.name, " and ", split.name, ": a break-even needs output tokens of both");
  DT_ASSIGN_OR_RETURN(const double usd_of_whole, UsdPerHour(whole, catalogue, price));
  DT_ASSIGN_OR_RETURN(const double usd_of_compute, UsdOf(split, catalogue, price, Role::kCompute));
  DT_ASSIGN_OR_RETURN(const double usd_of_hosts, UsdOf(split, catalogue, price, Role::kHost));
  if (!(usd_of_compute > 0)) return InvalidArgument(split.name, ": its compute devices cost nothing");
  const double allowed = usd_of_whole * of_split.output_tokens_s / of_whole.output_tokens_s;
  const double attention_price = (allowed - usd_of_compute - usd_of_hosts) / static_cast<double>(attention);
  return attention_price / (usd_of_compute / static_cast<double>(compute));
}

absl::StatusOr<RelativeCost> RelativeCostOf(const Layout& whole, const Throughput& of_whole, const Layout& split,
                                            const Throughput& of_split, const Catalogue& catalogue, PriceOf price) {
  // Checks the layouts as well.
  DT_ASSIGN_OR_RETURN(const double break_even, BreakEvenRatio(whole, of_whole, split, of_split, catalogue, price));
  DT_ASSIGN_OR_RETURN(const double usd_of_whole, UsdPerHour(whole, catalogue, price));
  if (!(usd_of_whole > 0)) return InvalidArgument(whole.name, ": its machines cost nothing");
  DT_ASSIGN_OR_RETURN(const double usd_of_compute, UsdOf(split, catalogue, price, Role::kCompute));
  const double of_attention = usd_of_compute / static_cast<double>(split.Count(Role::kCompute)) *
                              static_cast<double>(split.Count(Role::kAttention));
  RelativeCost cost;
  cost.slope = of_attention / of_split.output_tokens_s / (usd_of_whole / of_whole.output_tokens_s);
  cost.at_zero = 1 - cost.slope * break_even;
  return cost;
}

absl::StatusOr<double> PriceRatio(const Layout& split, const Catalogue& catalogue, PriceOf price) {
  const int64_t attention = split.Count(Role::kAttention), compute = split.Count(Role::kCompute);
  DT_ASSIGN_OR_RETURN(const double usd_of_attention, UsdOf(split, catalogue, price, Role::kAttention));
  DT_ASSIGN_OR_RETURN(const double usd_of_compute, UsdOf(split, catalogue, price, Role::kCompute));
  if (attention == 0 || compute == 0 || usd_of_compute == 0) return 0.0;
  return usd_of_attention / static_cast<double>(attention) / (usd_of_compute / static_cast<double>(compute));
}

}  // namespace dovetail::plan
