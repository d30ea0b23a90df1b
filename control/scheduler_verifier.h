#pragma once
#include <grpcpp/security/tls_certificate_verifier.h>

#include <memory>

namespace dovetail::control {

// Of a client's channel: what answers must have the address's name in its certificate and the role of a scheduler, so
// that another member of the cluster cannot stand in for it.
// Threads: thread-safe; does not block.
std::shared_ptr<grpc::experimental::CertificateVerifier> MakeSchedulerVerifier();

}  // namespace dovetail::control
