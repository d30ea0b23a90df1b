#include "plan/catalogue.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_join.h"

namespace dovetail::plan {
namespace {

using nlohmann::json;

constexpr double kMostUsdPerHour = 1e6;

struct NumberField {
  const char* name;
  double Device::*value;
  bool required;
};
constexpr NumberField kNumbers[] = {{"low_usd_per_hour", &Device::low_usd_per_hour, true},
                                    {"high_usd_per_hour", &Device::high_usd_per_hour, true},
                                    {"memory_gb", &Device::memory_gb, false},
                                    {"read_tb_s", &Device::read_tb_s, false},
                                    {"bf16_tflops", &Device::bf16_tflops, false},
                                    {"link_gb_s", &Device::link_gb_s, false}};

absl::StatusOr<Device> ParseDevice(const json& fields, const std::string& name, const std::string& place) {
  if (!fields.is_object()) return InvalidArgument(place, ": is not an object");
  Device device;
  device.name = name;
  for (const NumberField& number : kNumbers) {
    const auto found = fields.find(number.name);
    if (found == fields.end()) {
      if (number.required) return InvalidArgument(place, ": has no ", number.name);
      continue;
    }
    const double value = found->is_number() ? found->get<double>() : std::nan("");
    if (!std::isfinite(value) || value < 0 || value > kMostUsdPerHour)
      return InvalidArgument(place, ": ", number.name, ": ", found->dump(), " is not a number of at least 0");
    device.*number.value = value;
  }
  for (const auto& [key, value] : fields.items()) {
    if (key == "source" && value.is_string()) device.source = value.get<std::string>();
    const bool known = key == "source" || std::any_of(std::begin(kNumbers), std::end(kNumbers),
                                                      [&](const NumberField& number) { return key == number.name; });
    if (!known) return InvalidArgument(place, ": there is no field ", key);
  }
  if (device.source.empty()) return InvalidArgument(place, ": source: says where the prices are from, and is missing");
  if (device.low_usd_per_hour > device.high_usd_per_hour)
    return InvalidArgument(place, ": low_usd_per_hour ", device.low_usd_per_hour, " is more than high_usd_per_hour ",
                           device.high_usd_per_hour);
  return device;
}

}  // namespace

absl::StatusOr<Device> Catalogue::Find(const std::string& device) const {
  if (const auto found = devices.find(device); found != devices.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [key, value] : devices) names.push_back(key);
  return NotFound(name, ": has no device '", device, "'; it has ", absl::StrJoin(names, ", "), "; --price ", device,
                  "=USD gives a price for it");
}

void Catalogue::Override(const std::string& device, double usd_per_hour) {
  Device& priced = devices[device];
  priced.name = device;
  priced.low_usd_per_hour = priced.high_usd_per_hour = usd_per_hour;
  priced.source = "the command line";
}

absl::StatusOr<Catalogue> ParseCatalogue(const std::string& text, const std::string& name) {
  Catalogue catalogue;
  catalogue.name = name;
  json parsed;
  try {
    parsed = json::parse(text);
  } catch (const json::exception& error) {
    return InvalidArgument(name, ": is not JSON: ", error.what());
  }
  const auto dated = parsed.is_object() ? parsed.find("dated") : parsed.end();
  if (!parsed.is_object() || dated == parsed.end() || !dated->is_string())
    return InvalidArgument(name, ": dated: says of which day the prices are, and is missing");
  catalogue.dated = dated->get<std::string>();
  const auto devices = parsed.find("devices");
  if (devices == parsed.end() || !devices->is_object() || devices->empty())
    return InvalidArgument(name, ": devices: has to name at least one");
  for (const auto& [key, fields] : devices->items()) {
    DT_ASSIGN_OR_RETURN(catalogue.devices[key], ParseDevice(fields, key, absl::StrCat(name, ": devices.", key)));
  }
  return catalogue;
}

}  // namespace dovetail::plan
