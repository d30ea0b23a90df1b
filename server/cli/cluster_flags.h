#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "base/status.h"
#include "control/data_plane.h"
#include "control/security.h"

namespace dovetail::cli {

// Flags that all roles of a cluster share.

struct ControlFlags {  // the control plane
  std::string scheduler = "127.0.0.1:7100";
  std::string tls_cert, tls_key, tls_ca, tls_server_name;
  std::string join_token_file;
};
void AddSchedulerAddressFlag(CLI::App& command, ControlFlags& flags);
void AddSecurityFlags(CLI::App& command, ControlFlags& flags);
absl::StatusOr<control::Security> SecurityOf(const ControlFlags& flags);  // validated

void AddDataFlags(CLI::App& command, control::DataPlane& plane);
void AddTrustNetworkFlag(CLI::App& command, bool& trust);
// --exchange: auto, device or host (engine/exchange_choice.h).
void AddExchangeFlag(CLI::App& command, std::string& how);

// "attention-hostname-4711": unique enough for a cluster.
std::string DefaultName(const std::string& role);

}  // namespace dovetail::cli
