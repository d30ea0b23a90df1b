#include "control/data_plane.h"

#include <cstdio>
#include <memory>
#include <utility>

#include "control/ucx_connector.h"
#include "transport/ucx/network_route.h"

namespace dovetail::control {
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
absl::StatusOr<bool> ChooseDevices(const MeetingPoint& meeting, UcxOptions& options) {
  if (options.lanes == Lanes::kShm) return true;
  if (!options.devices.empty()) return !transport::ucx::LeaveTheHost(options.devices);
  absl::StatusOr<NetworkRoute> found =
      meeting.listens ? transport::ucx::RouteAt(meeting.address) : transport::ucx::RouteTo(meeting.address);
  if (!found.ok()) return Annotate(found.status(), meeting.listens ? "--listen" : "--scheduler");
  const NetworkRoute& route = *found;
  if (route.loopback && options.lanes == Lanes::kAny) options.lanes = Lanes::kShm;
  // RDMA finds its devices by itself: they do not always belong to an interface.
  if (!route.interface.empty() && options.lanes != Lanes::kRc && options.lanes != Lanes::kShm)
    options.devices = transport::ucx::DevicesOf(route.interface);
  return route.loopback;
}

absl::Status CheckWhoCanReach(const UcxOptions& options, const Security& security, bool trusted) {
  if (security.tls() || trusted) return absl::OkStatus();
  return FailedPrecondition(
      "the data plane would listen ",
      options.devices.empty() ? "on every network of this host" : absl::StrCat("on ", options.devices),
      ", and without mutual TLS the control plane gives its addresses and keys to every host that asks: give "
      "--tls-cert, "
      "--tls-key and --tls-ca, or --trust-network if only hosts of this cluster reach that network");
}

}  // namespace

absl::StatusOr<WorkerMain::ConnectorFactory> ConnectorsOf(const DataPlane& plane, const Security& security,
                                                          const MeetingPoint& meeting) {
  UcxOptions options;
  DT_ASSIGN_OR_RETURN(options.lanes, transport::ucx::ParseLanes(plane.lanes));
  options.devices = plane.devices;
  if (plane.spin_us > 0) options.spin = options.most_spin = absl::Microseconds(plane.spin_us);
  DT_RETURN_IF_ERROR(SetPorts(plane.ports, options));
  return [options, plane, security, meeting](NodeId node,
                                             Epoch epoch) -> absl::StatusOr<std::unique_ptr<transport::Connector>> {
    UcxOptions chosen = options;
    chosen.node = node;
    chosen.epoch = epoch;
    DT_ASSIGN_OR_RETURN(const bool stays_on_host, ChooseDevices(meeting, chosen));
    if (!stays_on_host) DT_RETURN_IF_ERROR(CheckWhoCanReach(chosen, security, plane.trust_network));
    DT_ASSIGN_OR_RETURN(std::unique_ptr<transport::Connector> connector, UcxConnector::Create(chosen));
    return connector;
  };
}

}  // namespace dovetail::control
