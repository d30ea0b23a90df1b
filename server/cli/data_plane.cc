#include "server/cli/data_plane.h"

#include <cstdio>
#include <memory>
#include <utility>

#include "control/ucx_connector.h"
#include "server/cli/command_line.h"
#include "transport/ucx/network_route.h"

namespace dovetail::cli {
namespace {

using transport::ucx::Lanes;
using transport::ucx::NetworkRoute;
using transport::ucx::UcxOptions;

absl::Status SetPorts(const std::string& ports, UcxOptions& options) {
  int used = 0;
  if (ports.empty() || (std::sscanf(ports.c_str(), "%d-%d%n", &options.first_port, &options.last_port, &used) == 2 &&
                        used == static_cast<int>(ports.size()) && options.first_port >= 1 &&
                        options.last_port <= 65535 && options.first_port <= options.last_port))
    return absl::OkStatus();
  return InvalidArgument("--data-ports: '", ports,
                         "' is no range of ports; write FIRST-LAST within 1..65535, as 7200-7299");
}

// Fills in what the flags leave open. Returns whether the data plane stays on this host.
absl::StatusOr<bool> ChooseDevices(const Meeting& meeting, UcxOptions& options) {
  if (options.lanes == Lanes::kShm) return true;
  if (!options.devices.empty()) return !transport::ucx::LeaveTheHost(options.devices);
  absl::StatusOr<NetworkRoute> found = meeting.listens ? transport::ucx::RouteAt(meeting.address)
                                                       : transport::ucx::RouteTo(meeting.address);
  if (!found.ok()) return Annotate(found.status(), meeting.listens ? "--listen" : "--scheduler");
  const NetworkRoute& route = *found;
  if (route.loopback && options.lanes == Lanes::kAny) options.lanes = Lanes::kShm;
  // RDMA finds its devices by itself: they do not always belong to an interface.
  if (!route.interface.empty() && options.lanes != Lanes::kRc && options.lanes != Lanes::kShm)
    options.devices = transport::ucx::DevicesOf(route.interface);
  return route.loopback;
}

absl::Status CheckWhoCanReach(const UcxOptions& options, const control::Security& security, bool trusted) {
  if (security.tls() || trusted) return absl::OkStatus();
  return FailedPrecondition(
      "the data plane would listen ",
      options.devices.empty() ? "on every network of this host" : absl::StrCat("on ", options.devices),
      ", and without mutual TLS the control plane gives its addresses and keys to every host that asks: give --tls-cert, "
      "--tls-key and --tls-ca, or --trust-network if only hosts of this cluster reach that network");
}

}  // namespace

void AddDataFlags(CLI::App& command, DataFlags& flags) {
  command
      .add_option("--lanes", flags.lanes,
                  "What may carry tensors: shm (one host), tcp, rc (RDMA), or any, which is shm where the scheduler is "
                  "on the loopback interface; others are refused, never used silently")
      ->check(OneOf({"any", "shm", "tcp", "rc", "cuda_ipc"}))
      ->type_name("LANES")
      ->group("Data plane");
  command
      .add_option("--data-devices", flags.devices,
                  "Network devices for tensors, as eth0,eth1; else those that lead to the scheduler")
      ->type_name("NAMES")
      ->group("Data plane");
  command.add_option("--data-ports", flags.ports, "TCP ports for tensors, as 7200-7299; else any")
      ->type_name("FIRST-LAST")
      ->group("Data plane");
  AddTrustNetworkFlag(command, flags.trust_network);
}

void AddTrustNetworkFlag(CLI::App& command, bool& trust) {
  command
      .add_flag("--trust-network", trust,
                "Open the data plane to a network without mutual TLS: only hosts of this cluster reach it [off]")
      ->group("Data plane");
}

absl::StatusOr<control::WorkerMain::ConnectorFactory> ConnectorsOf(const DataFlags& flags,
                                                                   const control::Security& security,
                                                                   const Meeting& meeting) {
  UcxOptions options;
  DT_ASSIGN_OR_RETURN(options.lanes, transport::ucx::ParseLanes(flags.lanes));
  options.devices = flags.devices;
  DT_RETURN_IF_ERROR(SetPorts(flags.ports, options));
  return [options, flags, security, meeting](NodeId node,
                                             Epoch epoch) -> absl::StatusOr<std::unique_ptr<transport::Connector>> {
    UcxOptions chosen = options;
    chosen.node = node;
    chosen.epoch = epoch;
    DT_ASSIGN_OR_RETURN(const bool stays_on_host, ChooseDevices(meeting, chosen));
    if (!stays_on_host) DT_RETURN_IF_ERROR(CheckWhoCanReach(chosen, security, flags.trust_network));
    DT_ASSIGN_OR_RETURN(std::unique_ptr<transport::Connector> connector, control::UcxConnector::Create(chosen));
    return connector;
  };
}

}  // namespace dovetail::cli
