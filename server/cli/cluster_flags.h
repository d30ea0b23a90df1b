#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "base/status.h"
#include "control/data_plane.h"
#include "control/security.h"

namespace dovetail::cli {

// Flags that all roles of a cluster share.

// Threads: thread-compatible; a value. The functions below are for the main thread.
struct ControlFlags {  // the control plane
  std::string scheduler = "127.0.0.1:7100";
  std::string tls_cert, tls_key, tls_ca, tls_server_name;
  std::string join_token_file;
};
void AddSchedulerAddressFlag(CLI::App& command, ControlFlags& flags);
void AddSecurityFlags(CLI::App& command, ControlFlags& flags);
absl::StatusOr<control::Security> SecurityOf(const ControlFlags& flags);  // validated

// --check-flags: the role checks its flags and ends, without opening a file, a device or a port.
void AddCheckFlagsFlag(CLI::App& command, bool& check_flags);
// What the flags of the control plane say by themselves. kInvalidArgument names the flag. Reads no file.
absl::Status CheckControlFlags(const ControlFlags& flags);
// The same, and those of the data plane.
absl::Status CheckPlanes(const ControlFlags& flags, const control::DataPlane& plane);

void AddDataFlags(CLI::App& command, control::DataPlane& plane);
void AddTrustNetworkFlag(CLI::App& command, bool& trust);
// --exchange: auto, device or host (engine/exchange_choice.h).
void AddExchangeFlag(CLI::App& command, std::string& how);

// "attention-hostname-4711": unique enough for a cluster.
std::string DefaultName(const std::string& role);

}  // namespace dovetail::cli
