#pragma once
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/messages.h"
#include "control/security.h"

// Which callers may call what on the control plane. With mutual TLS a caller's certificate says its roles, as URIs
// among its subject alternative names: dovetail://role/attention-worker. Without TLS the join token is all there is,
// and every caller may do everything.
// Threads: thread-safe.

namespace dovetail::control {

enum class PeerRole : uint8_t { kScheduler, kAttentionWorker, kComputeWorker, kServer, kOperator };
inline constexpr int kPeerRoles = 5;
inline constexpr char kRoleUriPrefix[] = "dovetail://role/";
const char* NameOf(PeerRole role);  // "scheduler", "attention-worker", "compute-worker", "server", "operator"

enum class Rpc : uint8_t {
  kJoin,
  kPutModelFiles,
  kAttend,
  kLeave,  // Membership
  kGetModel,
  kGetModelFiles,
  kOpen,  // Generation
  kGetStatus,
  kListWorkers,
  kDrainWorker,  // Admin
};
inline constexpr int kRpcs = 10;
const char* NameOf(Rpc rpc);  // "Admin.DrainWorker"

// The roles of one certificate: several where a host runs several roles under one.
class PeerRoles {
 public:
  static PeerRoles All() { return PeerRoles((1u << kPeerRoles) - 1); }
  // Other URIs than those of roles are ignored.
  static PeerRoles OfUris(const std::vector<std::string>& uris);

  bool Has(PeerRole role) const { return (bits_ >> static_cast<int>(role) & 1) != 0; }
  bool none() const { return bits_ == 0; }
  std::string Names() const;  // "attention-worker, server"

  // kPermissionDenied names these roles, the call and the roles that may make it.
  absl::Status Permit(Rpc rpc) const;
  // The same for a call in the name of a member with this role.
  absl::Status PermitAs(Role member, Rpc rpc) const;

 private:
  explicit PeerRoles(unsigned bits) : bits_(bits) {}
  absl::Status Denied(Rpc rpc, const PeerRoles& needed) const;
  unsigned bits_ = 0;
};

// Of a server's call. Without TLS: all.
PeerRoles RolesOf(const Security& security, const grpc::ServerContextBase& context);

// The token (CheckToken), then the roles. kUnauthenticated, kPermissionDenied.
absl::Status CheckCaller(const Security& security, const grpc::ServerContextBase& context, Rpc rpc);

}  // namespace dovetail::control
