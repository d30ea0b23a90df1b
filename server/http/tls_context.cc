#include "server/http/tls_context.h"

#include <openssl/err.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <string_view>

#include "base/log.h"

namespace dovetail::server {
namespace {

constexpr unsigned char kHttp11[] = "\x08http/1.1";
constexpr unsigned kHttp11Bytes = sizeof(kHttp11) - 1;
constexpr unsigned char kSessionContext[] = "dovetail";  // sessions are resumed here and nowhere else

std::string LastError() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = ERR_reason_error_string(code);
  return reason == nullptr ? "unknown" : reason;
}

int ChooseProtocol(SSL*, const unsigned char** out, unsigned char* out_bytes, const unsigned char* in,
                   unsigned in_bytes, void*) {
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_bytes, kHttp11, kHttp11Bytes, in, in_bytes) != OPENSSL_NPN_NEGOTIATED)
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

// Without it OpenSSL asks on the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

absl::Status CheckReadable(const char* flag, const std::string& path) {
  if (path.empty()) return InvalidArgument(flag, ": is missing; TLS needs --ssl-certfile and --ssl-keyfile");
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode) || access(path.c_str(), R_OK) != 0)
    return NotFound(flag, ": ", path, " cannot be read; give a PEM file that this user may read");
  return absl::OkStatus();
}

void WarnOfDates(const std::string& path, const X509* cert) {
  if (X509_cmp_current_time(X509_get0_notAfter(cert)) < 0)
    LogWarning("--ssl-certfile: ", path, " has expired: clients refuse it; renew it, no restart is needed");
  if (X509_cmp_current_time(X509_get0_notBefore(cert)) > 0)
    LogWarning("--ssl-certfile: ", path, " is not valid yet: clients refuse it; is this machine's clock right?");
}

absl::Status UseCertificate(SSL_CTX* context, const TlsOptions& options) {
  DT_RETURN_IF_ERROR(CheckReadable("--ssl-certfile", options.cert_file));
  DT_RETURN_IF_ERROR(CheckReadable("--ssl-keyfile", options.key_file));
  if (SSL_CTX_use_certificate_chain_file(context, options.cert_file.c_str()) != 1)
    return InvalidArgument("--ssl-certfile: ", options.cert_file, " holds no usable PEM certificate (", LastError(),
                           ")");
  if (SSL_CTX_use_PrivateKey_file(context, options.key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    const std::string why = LastError();
    if (why.find("mismatch") != std::string::npos)
      return InvalidArgument("--ssl-keyfile: ", options.key_file, " is not the key of the certificate ",
                             options.cert_file);
    return InvalidArgument("--ssl-keyfile: ", options.key_file, " holds no PEM private key without a passphrase (", why,
                           ")");
  }
  if (SSL_CTX_check_private_key(context) != 1)
    return InvalidArgument("--ssl-keyfile: ", options.key_file, " is not the key of the certificate ",
                           options.cert_file);
  WarnOfDates(options.cert_file, SSL_CTX_get0_certificate(context));
  return absl::OkStatus();
}

absl::Status UseClientAuthority(SSL_CTX* context, const TlsOptions& options) {
  if (options.client_certificates == TlsOptions::kNotAsked) {
    if (options.ca_file.empty()) return absl::OkStatus();
    return InvalidArgument("--ssl-ca-certs: is used for clients' certificates only; give --ssl-cert-reqs 1 or 2 too");
  }
  if (options.ca_file.empty())
    return InvalidArgument("--ssl-cert-reqs: clients' certificates are checked against --ssl-ca-certs; give it too");
  DT_RETURN_IF_ERROR(CheckReadable("--ssl-ca-certs", options.ca_file));
  STACK_OF(X509_NAME)* names = SSL_load_client_CA_file(options.ca_file.c_str());
  if (names == nullptr || SSL_CTX_load_verify_locations(context, options.ca_file.c_str(), nullptr) != 1) {
    sk_X509_NAME_pop_free(names, X509_NAME_free);
    return InvalidArgument("--ssl-ca-certs: ", options.ca_file, " holds no PEM certificate (", LastError(), ")");
  }
  SSL_CTX_set_client_CA_list(context, names);  // takes them over
  const bool required = options.client_certificates == TlsOptions::kRequired;
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | (required ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0), nullptr);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<SSL_CTX>> Load(const TlsOptions& options) {
  ERR_clear_error();
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (context == nullptr) return ResourceExhausted("TLS: ", LastError());
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_cipher_list(context.get(), "ECDHE+AESGCM:ECDHE+CHACHA20");  // of TLS 1.2: forward secret, authenticated
  // A connection that ends without TLS's own end is one that ended: HTTP knows where its messages end.
  SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_default_passwd_cb(context.get(), NoPassphrase);
  SSL_CTX_set_session_id_context(context.get(), kSessionContext, sizeof(kSessionContext) - 1);
  SSL_CTX_set_alpn_select_cb(context.get(), ChooseProtocol, nullptr);
  DT_RETURN_IF_ERROR(UseCertificate(context.get(), options));
  DT_RETURN_IF_ERROR(UseClientAuthority(context.get(), options));
  return context;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsContext>> TlsContext::Create(const TlsOptions& options) {
  if (options.client_certificates < TlsOptions::kNotAsked || options.client_certificates > TlsOptions::kRequired)
    return InvalidArgument("--ssl-cert-reqs: ", options.client_certificates, " is none of 0, 1 and 2");
  std::unique_ptr<TlsContext> tls(new TlsContext(options));
  tls->loaded_ = tls->seen_ = tls->Fingerprint();
  DT_ASSIGN_OR_RETURN(tls->current_, Load(options));
  return tls;
}

std::shared_ptr<SSL_CTX> TlsContext::current() const {
  MutexLock lock(mutex_);
  return current_;
}

int64_t TlsContext::certificate_end() const {
  const std::shared_ptr<SSL_CTX> context = current();
  std::tm end{};
  const X509* const certificate = SSL_CTX_get0_certificate(context.get());
  return certificate != nullptr && ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &end) == 1 ? timegm(&end) : 0;
}

std::string TlsContext::Fingerprint() const {
  std::string all;
  for (const std::string* path : {&options_.cert_file, &options_.key_file, &options_.ca_file}) {
    struct stat info {};
    if (path->empty() || stat(path->c_str(), &info) != 0) info = {};
    absl::StrAppend(&all, info.st_dev, " ", info.st_ino, " ", info.st_size, " ", info.st_mtim.tv_sec, " ",
                    info.st_mtim.tv_nsec, ";");
  }
  return all;
}

void TlsContext::ReloadIfChanged() {
  const std::string now = Fingerprint();
  const bool settled = now == seen_;
  seen_ = now;
  if (now == loaded_ || !settled) return;
  loaded_ = now;
  auto fresh = Load(options_);
  if (!fresh.ok()) {
    LogWarning("TLS: the new certificate is not used, the one before is; ", std::string(fresh.status().message()));
    return;
  }
  LogInfo("TLS: ", options_.cert_file, " has changed and is used for new connections");
  MutexLock lock(mutex_);
  current_ = *std::move(fresh);
}

}  // namespace dovetail::server
