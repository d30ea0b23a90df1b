#pragma once
#include <CLI/CLI.hpp>
#include <csignal>
#include <functional>
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

// SIGTERM and SIGINT of this process. Constructed before any thread begins: they inherit that both are blocked.
class StopSignal {
 public:
  StopSignal();
  bool Raised();  // has one come?
  void Wait();    // until one comes
  // Runs `work` on this thread; calls `stop` once, on another, when a signal comes before it ends.
  absl::Status RunUntil(const std::function<absl::Status()>& work, const std::function<void()>& stop);
  void RestoreDefault();  // from here on the default action: the process ends

 private:
  bool TakeWithin(absl::Duration timeout);
  sigset_t signals_;
  bool raised_ = false;
};

// "attention-hostname-4711": unique enough for a cluster.
std::string DefaultName(const std::string& role);

}  // namespace dovetail::cli
