#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "base/status.h"
#include "control/security.h"
#include "control/worker_main.h"

namespace dovetail::cli {

// The data plane of a role: what carries tensors, over which devices, and who can reach it.

struct DataFlags {
  std::string lanes = "any";
  std::string devices;  // empty: those of the way to the scheduler
  std::string ports;    // FIRST-LAST
  bool trust_network = false;
};
void AddDataFlags(CLI::App& command, DataFlags& flags);
void AddTrustNetworkFlag(CLI::App& command, bool& trust);

// Where the devices are taken from if no flag names them.
struct Meeting {
  std::string address;    // HOST:PORT of the scheduler
  bool listens = false;   // this role is the scheduler
};

// Connectors by these flags. By default they use the network devices over which this role reaches the scheduler, or is
// reached. Where that is the loopback interface, `any` means shared memory alone: no port is opened.
//
// Errors of this call: kInvalidArgument names the flag.
// Errors of the factory: kUnavailable while no route leads to the scheduler; kFailedPrecondition if the lanes would open
//   ports to a network without mutual TLS on the control plane (--trust-network overrides); those of the connector.
absl::StatusOr<control::WorkerMain::ConnectorFactory> ConnectorsOf(const DataFlags& flags,
                                                                   const control::Security& security,
                                                                   const Meeting& meeting);

}  // namespace dovetail::cli
