#include "server/grpc/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

namespace dovetail::server {
namespace {

constexpr unsigned kReloadSeconds = 1;

grpc_ssl_client_certificate_request_type RequestType(int client_certificates) {
  switch (client_certificates) {
    case TlsOptions::kChecked: return GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY;
    case TlsOptions::kRequired: return GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
    default: return GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
  }
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeListenerCredentials(const TlsOptions& tls) {
  if (!tls.enabled()) return grpc::InsecureServerCredentials();
  using Watcher = grpc::experimental::FileWatcherCertificateProvider;
  const bool clients = tls.client_certificates != TlsOptions::kNotAsked;
  const auto provider = clients ? std::make_shared<Watcher>(tls.key_file, tls.cert_file, tls.ca_file, kReloadSeconds)
                                : std::make_shared<Watcher>(tls.key_file, tls.cert_file, kReloadSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (clients) options.watch_root_certs();
  options.set_cert_request_type(RequestType(tls.client_certificates));
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace dovetail::server
