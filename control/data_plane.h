#pragma once
#include <string>

#include "base/status.h"
#include "control/security.h"
#include "control/worker_main.h"

namespace dovetail::control {

// The data plane of a role as its operator asks for it: what carries tensors, over which devices, and which hosts reach
// it.
// Threads: thread-compatible; a value.
struct DataPlane {
  std::string lanes = "any";  // shm, tcp, rc, any
  std::string devices;        // network devices, comma-separated; empty: those of the way to the scheduler
  std::string ports;          // of TCP, FIRST-LAST; empty: any
  bool trust_network = false;
  int spin_us = 0;  // how long the event loop watches for frames before it sleeps; 0: transport::ucx::UcxOptions::spin
};

// Where this role meets the others, from which devices are chosen that no option names.
struct MeetingPoint {
  std::string address;   // HOST:PORT of the scheduler
  bool listens = false;  // this role is the scheduler
};

// Makes connectors of such a data plane. By default they use the network devices over which this role reaches the
// scheduler, or is reached. Where that is the loopback interface, `any` means shared memory alone: no port is opened.
//
// Errors of this call:    kInvalidArgument names the flag.
// Errors of the factory:  kUnavailable while no route leads to the scheduler; kFailedPrecondition if ports would be
//   opened to a network without mutual TLS on the control plane and the network is not trusted; those of the connector.
// Threads: thread-safe. The factory is thread-safe, too, and blocks while the address of the scheduler is resolved.
absl::StatusOr<WorkerMain::ConnectorFactory> ConnectorsOf(const DataPlane& plane, const Security& security,
                                                          const MeetingPoint& meeting);

}  // namespace dovetail::control
