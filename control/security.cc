#include "control/security.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/crypto.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "control/listening.h"
#include "control/messages.h"
#include "control/scheduler_verifier.h"
#include "control/table_limits.h"

namespace dovetail::control {
namespace {

constexpr const char* kTokenKey = "dovetail-join-token";
constexpr unsigned kReloadSeconds = 1;
constexpr size_t kLeastTokenBytes = 16, kMostTokenBytes = 4096;

struct Closer {
  void operator()(FILE* file) const { std::fclose(file); }
  void operator()(X509* cert) const { X509_free(cert); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Closer>;

absl::StatusOr<Owned<FILE>> OpenFile(const char* flag, const std::string& path) {
  Owned<FILE> file(std::fopen(path.c_str(), "r"));
  if (file == nullptr) return NotFound(flag, ": ", path, " cannot be read; give a PEM file that this user may read");
  return file;
}

std::string DateOf(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "an unreadable date";
  char text[64];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &parts);
  return text;
}

absl::StatusOr<Owned<X509>> ReadCertificate(const char* flag, const std::string& path) {
  DT_ASSIGN_OR_RETURN(const Owned<FILE> file, OpenFile(flag, path));
  Owned<X509> cert(PEM_read_X509(file.get(), nullptr, nullptr, nullptr));
  if (cert == nullptr) return InvalidArgument(flag, ": ", path, " holds no PEM certificate");
  if (X509_cmp_current_time(X509_get0_notAfter(cert.get())) < 0)
    return FailedPrecondition(flag, ": ", path, " expired on ", DateOf(X509_get0_notAfter(cert.get())),
                              "; renew the certificate");
  if (X509_cmp_current_time(X509_get0_notBefore(cert.get())) > 0)
    return FailedPrecondition(flag, ": ", path, " is not valid before ", DateOf(X509_get0_notBefore(cert.get())),
                              "; is this machine's clock right?");
  return cert;
}

std::shared_ptr<grpc::experimental::CertificateProviderInterface> ProviderOf(const Security& security) {
  return std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(security.key_file, security.cert_file,
                                                                              security.ca_file, kReloadSeconds);
}

}  // namespace

absl::Status NotAllTlsFiles() {
  return InvalidArgument("--tls-cert, --tls-key and --tls-ca: give all three for mutual TLS, or none");
}

absl::Status Security::Validate() const {
  const int given = !cert_file.empty() + !key_file.empty() + !ca_file.empty();
  if (given == 0) return absl::OkStatus();
  if (given != 3) return NotAllTlsFiles();
  DT_ASSIGN_OR_RETURN(const Owned<X509> cert, ReadCertificate("--tls-cert", cert_file));
  DT_RETURN_IF_ERROR(ReadCertificate("--tls-ca", ca_file).status());
  DT_ASSIGN_OR_RETURN(const Owned<FILE> file, OpenFile("--tls-key", key_file));
  const Owned<EVP_PKEY> key(PEM_read_PrivateKey(file.get(), nullptr, nullptr, nullptr));
  if (key == nullptr) return InvalidArgument("--tls-key: ", key_file, " holds no PEM private key without a passphrase");
  if (X509_check_private_key(cert.get(), key.get()) != 1)
    return InvalidArgument("--tls-key: ", key_file, " is not the key of the certificate ", cert_file);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  std::ifstream in(path);
  std::string token;
  if (!in.good()) return NotFound("--join-token-file: ", path, " cannot be read");
  std::getline(in, token);
  while (!token.empty() && (token.back() == '\r' || token.back() == ' ')) token.pop_back();
  if (token.size() < kLeastTokenBytes || token.size() > kMostTokenBytes)
    return InvalidArgument("--join-token-file: the first line of ", path, " has ", token.size(),
                           " characters; a token has ", kLeastTokenBytes, "..", kMostTokenBytes);
  for (const char c : token)
    if (c < 0x20 || c > 0x7e)
      return InvalidArgument("--join-token-file: ", path, " holds a character that is not printable ASCII");
  return token;
}

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const Security& security) {
  if (!security.tls()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions options(ProviderOf(security));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const Security& security) {
  if (!security.tls()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(ProviderOf(security));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(MakeSchedulerVerifier());
  return grpc::experimental::TlsCredentials(options);
}

absl::Status CheckAddress(const std::string& flag, const std::string& address, bool may_be_free) {
  const size_t colon = address.rfind(':');
  int port = -1;
  const bool good = colon != std::string::npos && colon > 0 && address.find('/') == std::string::npos &&
                    absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= (may_be_free ? 0 : 1) &&
                    port <= 65535;
  if (good) return absl::OkStatus();
  return InvalidArgument(flag, ": '", address, "' is no address; write HOST:PORT, as 10.0.0.5:7100");
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& flag, const std::string& address,
                                                           const Security& security) {
  DT_RETURN_IF_ERROR(CheckAddress(flag, address, /*may_be_free=*/false));
  TameGrpc();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxChannelBytes);
  arguments.SetMaxSendMessageSize(kMaxChannelBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Channels of one process share no connection: a member's end must be seen as its own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (!security.server_name.empty()) arguments.SetSslTargetNameOverride(security.server_name);
  return grpc::CreateCustomChannel(address, MakeChannelCredentials(security), arguments);
}

void AddToken(const Security& security, grpc::ClientContext& context) {
  if (!security.join_token.empty()) context.AddMetadata(kTokenKey, security.join_token);
}

absl::Status CheckToken(const Security& security, const grpc::ServerContextBase& context) {
  if (security.join_token.empty()) return absl::OkStatus();
  const auto found = context.client_metadata().find(kTokenKey);
  const bool good = found != context.client_metadata().end() && found->second.size() == security.join_token.size() &&
                    CRYPTO_memcmp(found->second.data(), security.join_token.data(), security.join_token.size()) == 0;
  if (good) return absl::OkStatus();
  return absl::UnauthenticatedError(
      "the join token is missing or another one; start with the --join-token-file of this cluster");
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status ExplainCallFailure(const std::string& who, const std::string& address, const Security& security,
                                const grpc::Status& status) {
  const std::string& text = status.error_message();
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED)
    return FailedPrecondition(who, " ", address, ": speaks gRPC, but is not what was asked for (", text,
                              "); check the port");
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE &&
      status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED)
    return Annotate(FromGrpc(status), absl::StrCat(who, " ", address));
  const char* remedy = "is it running, and may this host reach the port?";
  if (absl::StrContains(text, "DNS resolution failed") || absl::StrContains(text, "ares") ||
      absl::StrContains(text, "Name or service"))
    remedy = "the host name is not known; check its spelling";
  else if (absl::StrContains(text, "parsing HTTP/2") || absl::StrContains(text, "SETTINGS frame") ||
           absl::StrContains(text, "http1.x server"))
    remedy = "something answers there that is none; check the port, and whether another program holds it";
  else if (security.tls() && (absl::StrContains(text, "certificate") || absl::StrContains(text, "andshake") ||
                              absl::StrContains(text, "SSL") || absl::StrContains(text, "Peer")))
    remedy =
        "the TLS handshake failed: an expired certificate, another --tls-ca, a name that the certificate does not "
        "have (--tls-server-name), or one without the role of a scheduler";
  else if (!security.tls() && (absl::StrContains(text, "Socket closed") || absl::StrContains(text, "reset") ||
                               absl::StrContains(text, "Broken pipe")))
    remedy = "it may ask for TLS: give --tls-cert, --tls-key and --tls-ca";
  return absl::UnavailableError(
      absl::StrCat(who, " ", address, ": cannot be reached; ", remedy, " (", text.substr(0, 200), ")"));
}

}  // namespace dovetail::control
