#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "plan/catalogue.h"

// What tokens cost in a layout whose throughput is known, measured or predicted.
// Threads: plain values and pure functions.

namespace dovetail::plan {

// What a machine is for. Hosts are machines that are paid for and hold neither weights nor KV: schedulers, servers.
enum class Role : uint8_t { kCompute, kAttention, kHost };

struct Machines {
  Role role = Role::kCompute;
  std::string device;
  int64_t count = 1;
};

// All that is paid for, idle machines too.
struct Layout {
  std::string name;
  std::vector<Machines> machines;

  int64_t Count(Role role) const;
};

// "compute.h100:2,attention.h20:4,host.epyc:1". kInvalidArgument says which part is not understood.
absl::StatusOr<std::vector<Machines>> ParseMachines(const std::string& text);

// Tokens per second while the layout is under its load.
struct Throughput {
  double input_tokens_s = 0, output_tokens_s = 0;
  // Of requests that met their service level objective; absent where none was given.
  std::optional<double> good_output_tokens_s;
};

enum class PriceOf : uint8_t { kLow, kHigh };

// Dollars for an hour of all machines. kNotFound names a device without a price.
absl::StatusOr<double> UsdPerHour(const Layout& layout, const Catalogue& catalogue, PriceOf price);

// What a million tokens cost: dollars of an hour over the tokens of an hour, of which the layout is under load for the
// share `utilization`, in (0, 1]. Each of input, output and mixed (both) carries all of the cost, as InferenceX reports
// it: they are three ways to say one price, not three prices to add. A rate of 0 has no price.
struct TokenCost {
  double usd_per_hour = 0;
  std::optional<double> input_usd, output_usd, mixed_usd;  // per million tokens
  std::optional<double> good_output_usd;                   // per million output tokens at the objective
  double output_tokens_s_per_usd_h = 0;
};
absl::StatusOr<TokenCost> CostOf(const Layout& layout, const Throughput& throughput, const Catalogue& catalogue,
                                 PriceOf price, double utilization);

// The price ratio P_attention / P_compute of one device each below which output tokens of `split` are cheaper than
// those of `whole`: (n_a P_a + C_s) / T_s = C_w / T_w solved for P_a, where C_w is what `whole` costs, C_s what `split`
// costs without its attention devices, and T their output tokens per second. P_compute is the mean price of the compute
// devices of `split`. Not positive: no price of attention devices makes the split pay.
// kInvalidArgument: `split` has no attention or no compute device, `whole` has attention devices, or a rate is 0.
absl::StatusOr<double> BreakEvenRatio(const Layout& whole, const Throughput& of_whole, const Layout& split,
                                      const Throughput& of_split, const Catalogue& catalogue, PriceOf price);

// What an output token of a split layout costs over one of a whole layout: a straight line in the price ratio
// P_attention / P_compute, all other prices as they are.
struct RelativeCost {
  double at_zero = 0;  // where attention devices cost nothing
  double slope = 0;    // above 0

  double At(double ratio) const { return at_zero + slope * ratio; }
  double BreakEven() const { return (1 - at_zero) / slope; }  // as BreakEvenRatio
};

// Errors as BreakEvenRatio; also kInvalidArgument where `whole` costs nothing.
absl::StatusOr<RelativeCost> RelativeCostOf(const Layout& whole, const Throughput& of_whole, const Layout& split,
                                            const Throughput& of_split, const Catalogue& catalogue, PriceOf price);

// Price ratios that papers on split layouts had, to compare with.
struct KnownRatio {
  const char* whose;
  double ratio;
  const char* prices;
};
inline constexpr KnownRatio kKnownRatios[] = {{"Lamina", 0.42, "H20 at 4.63, H100 at 11.06 $/h"},
                                              {"Step-3", 0.40, "its own devices"}};

// The ratio that the catalogue has: the mean price of attention devices over that of compute devices. 0 without both.
absl::StatusOr<double> PriceRatio(const Layout& split, const Catalogue& catalogue, PriceOf price);

}  // namespace dovetail::plan
