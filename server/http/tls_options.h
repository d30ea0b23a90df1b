#pragma once
#include <string>

namespace dovetail::server {

// TLS of the clients' ports. Files are PEM.
// Threads: thread-compatible; a value.
struct TlsOptions {
  enum ClientCertificates { kNotAsked = 0, kChecked = 1, kRequired = 2 };  // as Python's ssl.CERT_*

  std::string cert_file, key_file;  // the certificate with its chain, and its key; empty: no TLS
  std::string ca_file;              // CAs of clients' certificates; empty: none are asked for
  int client_certificates = kNotAsked;

  bool enabled() const { return !cert_file.empty() || !key_file.empty(); }
};

}  // namespace dovetail::server
