#pragma once
#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/http/tls_options.h"

namespace dovetail::server {

// Of the port of the gRPC API: the files of the HTTP API, which has checked them. Looked at again every second. Without
// TLS: none.
// Threads: thread-safe.
std::shared_ptr<grpc::ServerCredentials> MakeListenerCredentials(const TlsOptions& tls);

}  // namespace dovetail::server
