#include "server/cli/cluster_flags.h"

#include <unistd.h>

#include "kernels/device.h"
#include "server/cli/command_line.h"

namespace dovetail::cli {

void AddSchedulerAddressFlag(CLI::App& command, ControlFlags& flags) {
  command.add_option("--scheduler", flags.scheduler, "Where `dovetail scheduler` listens")
      ->type_name("HOST:PORT")
      ->group("Control plane");
}

void AddSecurityFlags(CLI::App& command, ControlFlags& flags) {
  command
      .add_option("--tls-cert", flags.tls_cert,
                  "This role's certificate, PEM; with key and CA the control plane is mutual TLS. Files are read "
                  "again when they change")
      ->type_name("FILE")
      ->group("Control plane");
  command.add_option("--tls-key", flags.tls_key, "Its private key, PEM")->type_name("FILE")->group("Control plane");
  command.add_option("--tls-ca", flags.tls_ca, "Who may sign the others' certificates, PEM")
      ->type_name("FILE")
      ->group("Control plane");
  command
      .add_option("--tls-server-name", flags.tls_server_name,
                  "The name in the scheduler's certificate, if not its address")
      ->type_name("NAME")
      ->group("Control plane");
  command
      .add_option("--join-token-file", flags.join_token_file,
                  "A file with the cluster's secret, the same for all roles")
      ->type_name("FILE")
      ->group("Control plane");
}

absl::StatusOr<control::Security> SecurityOf(const ControlFlags& flags) {
  control::Security security;
  security.cert_file = flags.tls_cert;
  security.key_file = flags.tls_key;
  security.ca_file = flags.tls_ca;
  security.server_name = flags.tls_server_name;
  if (!flags.join_token_file.empty()) {
    DT_ASSIGN_OR_RETURN(security.join_token, control::ReadTokenFile(flags.join_token_file));
  }
  DT_RETURN_IF_ERROR(security.Validate());
  return security;
}

void AddCheckFlagsFlag(CLI::App& command, bool& check_flags) {
  command
      .add_flag("--check-flags", check_flags,
                "Check these flags and end, without opening a file, a device or a port [off]")
      ->group("Control plane");
}

absl::Status CheckControlFlags(const ControlFlags& flags) {
  DT_RETURN_IF_ERROR(control::CheckAddress("--scheduler", flags.scheduler, /*may_be_free=*/false));
  const int given = !flags.tls_cert.empty() + !flags.tls_key.empty() + !flags.tls_ca.empty();
  return given == 0 || given == 3 ? absl::OkStatus() : control::NotAllTlsFiles();
}

absl::Status CheckPlanes(const ControlFlags& flags, const control::DataPlane& plane) {
  DT_RETURN_IF_ERROR(CheckControlFlags(flags));
  return control::ConnectorsOf(plane, control::Security(), {.address = flags.scheduler}).status();
}

void AddDataFlags(CLI::App& command, control::DataPlane& plane) {
  command
      .add_option("--lanes", plane.lanes,
                  "What may carry tensors: shm (one host), tcp, rc (RDMA), or any, which is shm where the scheduler is "
                  "on the loopback interface; others are refused, never used silently")
      ->check(OneOf({"any", "shm", "tcp", "rc", "cuda_ipc"}))
      ->type_name("LANES")
      ->group("Data plane");
  command
      .add_option("--data-devices", plane.devices,
                  "Network devices for tensors, as eth0,eth1; else those that lead to the scheduler")
      ->type_name("NAMES")
      ->group("Data plane");
  command.add_option("--data-ports", plane.ports, "TCP ports for tensors, as 7200-7299; else any")
      ->type_name("FIRST-LAST")
      ->group("Data plane");
  AddTrustNetworkFlag(command, plane.trust_network);
  command
      .add_option(
          "--spin-us", plane.spin_us,
          "Microseconds for which threads without work watch for it before they sleep. A wake-up takes 20 to 50, "
          "in every layer; 0: 50 on a CPU, and up to a millisecond while waits are as short as that; a millisecond on "
          "a "
          "host whose GPU runs the layers")
      ->check(WholeNumber(0, kernels::kMaxSpinUs))
      ->type_name("N")
      ->group("Data plane");
}

void AddTrustNetworkFlag(CLI::App& command, bool& trust) {
  command
      .add_flag("--trust-network", trust,
                "Open the data plane to a network without mutual TLS: only hosts of this cluster reach it [off]")
      ->group("Data plane");
}

void AddExchangeFlag(CLI::App& command, std::string& how) {
  command
      .add_option("--exchange", how,
                  "How GPUs of two processes exchange layers, and what compute workers that divide a prompt give each "
                  "other: device: layers by themselves; host: through the hosts; auto: by themselves where that is "
                  "possible")
      ->check(OneOf({"auto", "device", "host"}))
      ->type_name("HOW")
      ->group("Data plane");
}

std::string DefaultName(const std::string& role) {
  char host[65] = "host";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat(role, "-", host, "-", getpid());
}

}  // namespace dovetail::cli
