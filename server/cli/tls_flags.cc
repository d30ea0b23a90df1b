#include "server/cli/tls_flags.h"

#include "server/cli/command_line.h"

namespace dovetail::cli {

void AddTlsFlags(CLI::App& command, server::TlsOptions& tls) {
  command
      .add_option("--ssl-certfile", tls.cert_file,
                  "The certificate of the HTTP and gRPC API with its chain, PEM: clients speak TLS. Files are read "
                  "again when they change")
      ->type_name("FILE")
      ->group("API");
  command.add_option("--ssl-keyfile", tls.key_file, "Its private key, PEM")->type_name("FILE")->group("API");
  command.add_option("--ssl-ca-certs", tls.ca_file, "Who may sign the certificates that clients show, PEM")
      ->type_name("FILE")
      ->group("API");
  command
      .add_option("--ssl-cert-reqs", tls.client_certificates,
                  "Certificates of clients: 0 are not asked for, 1 are checked if shown, 2 are required")
      ->check(OneOf({"0", "1", "2"}))
      ->type_name("0|1|2")
      ->group("API");
}

std::vector<std::string> ArgumentsOf(const server::TlsOptions& tls) {
  std::vector<std::string> arguments;
  const auto add = [&](const char* flag, const std::string& value) {
    if (!value.empty()) arguments.insert(arguments.end(), {flag, value});
  };
  add("--ssl-certfile", tls.cert_file);
  add("--ssl-keyfile", tls.key_file);
  add("--ssl-ca-certs", tls.ca_file);
  if (tls.client_certificates != 0) add("--ssl-cert-reqs", std::to_string(tls.client_certificates));
  return arguments;
}

}  // namespace dovetail::cli
