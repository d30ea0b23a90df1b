#pragma once
#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "base/mutex.h"
#include "base/status.h"
#include "server/http/tls_options.h"

namespace dovetail::server {

// The server's side of TLS 1.2 and 1.3 for HTTP/1.1: certificate, key, and which clients are accepted.
// Threads: thread-safe.
class TlsContext {
 public:
  // Errors name the flag, the file and what is wrong: kInvalidArgument, kNotFound. A certificate that expired is only
  // warned of, so that a restart does not end a service whose clients still accept it.
  static absl::StatusOr<std::unique_ptr<TlsContext>> Create(const TlsOptions& options);

  // For new connections; sessions keep theirs.
  std::shared_ptr<SSL_CTX> current() const;

  // When the certificate of new connections expires, in seconds since 1970.
  int64_t certificate_end() const;

  // Takes over files that have changed since they were read and did not change between two calls: certificate and key
  // are replaced one after the other. Files that do not fit are warned of once, and those before stay in use. Reads
  // files; called every second.
  void ReloadIfChanged();

 private:
  explicit TlsContext(TlsOptions options) : options_(std::move(options)) {}
  std::string Fingerprint() const;  // of the files: when, which, how large

  const TlsOptions options_;
  std::string loaded_, seen_;  // fingerprints
  mutable Mutex mutex_;
  std::shared_ptr<SSL_CTX> current_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
