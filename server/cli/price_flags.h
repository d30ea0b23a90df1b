#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "plan/catalogue.h"

// Prices of devices, of the commands that charge for machines.

namespace dovetail::cli {

// Threads: thread-compatible; a value.
struct PriceFlags {
  std::string file;                    // a catalogue; empty: only the overrides
  std::vector<std::string> overrides;  // DEVICE=USD
};

void AddPriceFlags(CLI::App& command, PriceFlags& flags, const std::string& group);

// kInvalidArgument names the flag, or file and field; kNotFound: the file cannot be read.
// Threads: thread-safe; blocks on the file.
absl::StatusOr<plan::Catalogue> ReadPrices(const PriceFlags& flags);

}  // namespace dovetail::cli
