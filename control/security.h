#pragma once
#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "base/status.h"

namespace dovetail::control {

// What protects the control plane. Mutual TLS when the three files are given: PEM, looked at again every second, so
// that renewed certificates are used without a restart. The join token is a secret of the cluster that every call must
// carry.
// Threads: thread-compatible; a value. The functions below are thread-safe.
struct Security {
  std::string cert_file, key_file, ca_file;  // all or none
  std::string server_name;                   // of clients: expected in the scheduler's certificate, if not its address
  std::string join_token;                    // empty: none is asked for

  bool tls() const { return !cert_file.empty(); }

  // kInvalidArgument, kNotFound, kFailedPrecondition name the flag and the file: not all three given, unreadable, no
  // PEM, expired or not yet valid, a key of another certificate.
  absl::Status Validate() const;
};

// kInvalidArgument: --tls-cert, --tls-key and --tls-ca belong together.
absl::Status NotAllTlsFiles();

// The first line of a file, at least 16 characters. Errors name the flag and the file.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const Security& security);
std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const Security& security);

// A channel to HOST:PORT. kInvalidArgument names `flag` for what is no address. Does not connect yet.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& flag, const std::string& address,
                                                           const Security& security);

// Checks HOST:PORT; port 0 only if `may_be_free`.
absl::Status CheckAddress(const std::string& flag, const std::string& address, bool may_be_free);

// A client's call: puts the token into its metadata. A server's call: kUnauthenticated without the right one, compared
// in constant time.
void AddToken(const Security& security, grpc::ClientContext& context);
absl::Status CheckToken(const Security& security, const grpc::ServerContextBase& context);

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// Why a call to `address` failed, in one line with the remedy.
absl::Status ExplainCallFailure(const std::string& who, const std::string& address, const Security& security,
                                const grpc::Status& status);

}  // namespace dovetail::control
