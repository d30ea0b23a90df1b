#pragma once
#include <map>
#include <string>

#include "base/status.h"

namespace dovetail::plan {

// What one device, or one host, costs and can do. Prices are dollars for an hour of one of them.
struct Device {
  std::string name;
  double low_usd_per_hour = 0, high_usd_per_hour = 0;
  std::string source;    // of the prices
  double memory_gb = 0;  // 0: not known, here and below
  double read_tb_s = 0;  // of its memory
  double bf16_tflops = 0;
  double link_gb_s = 0;  // to another host, one way
};

// A dated table of prices. No program has one built in: prices of one device differ by a factor of eight between
// sources.
struct Catalogue {
  std::string name;   // of the file, for errors and reports
  std::string dated;  // "2026-11-25"
  std::map<std::string, Device> devices;

  // kNotFound lists what there is.
  absl::StatusOr<Device> Find(const std::string& device) const;

  // Sets both prices of `device`, which need not be in the table.
  void Override(const std::string& device, double usd_per_hour);
};

// From JSON: {"dated": "2026-11-25", "devices": {"h100": {"low_usd_per_hour": 1.3, "high_usd_per_hour": 4.25, "source":
// "...", "memory_gb": 80, ...}}}. kInvalidArgument names `name`, the device and the field: a price that is missing,
// negative, not finite, or low above high; a price without a source; a field that is not known.
// Threads: pure.
absl::StatusOr<Catalogue> ParseCatalogue(const std::string& text, const std::string& name);

}  // namespace dovetail::plan
