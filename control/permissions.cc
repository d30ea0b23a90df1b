#include "control/permissions.h"

#include <grpc/grpc_security_constants.h>

#include "absl/strings/str_join.h"

namespace dovetail::control {
namespace {

constexpr const char* kRoleNames[kPeerRoles] = {"scheduler", "attention-worker", "compute-worker", "server",
                                                "operator"};

constexpr unsigned Bit(PeerRole role) { return 1u << static_cast<int>(role); }

struct Permission {
  const char* name;
  unsigned roles;
};

const Permission& PermissionOf(Rpc rpc) {
  constexpr unsigned kWorkers = Bit(PeerRole::kAttentionWorker) | Bit(PeerRole::kComputeWorker);
  static constexpr Permission kPermissions[kRpcs] = {
      {"Membership.Join", kWorkers},
      {"Membership.PutModelFiles", Bit(PeerRole::kComputeWorker)},
      {"Membership.Attend", kWorkers},
      {"Membership.Leave", kWorkers},
      {"Generation.GetModel", Bit(PeerRole::kServer)},
      {"Generation.GetModelFiles", Bit(PeerRole::kServer)},
      {"Generation.Open", Bit(PeerRole::kServer)},
      {"Admin.GetStatus", Bit(PeerRole::kOperator)},
      {"Admin.ListWorkers", Bit(PeerRole::kOperator)},
      {"Admin.DrainWorker", Bit(PeerRole::kOperator)},
  };
  return kPermissions[static_cast<int>(rpc)];
}

}  // namespace

const char* NameOf(PeerRole role) { return kRoleNames[static_cast<int>(role)]; }
const char* NameOf(Rpc rpc) { return PermissionOf(rpc).name; }

PeerRoles PeerRoles::OfUris(const std::vector<std::string>& uris) {
  unsigned bits = 0;
  for (const std::string& uri : uris)
    for (int role = 0; role < kPeerRoles; ++role)
      if (uri == absl::StrCat(kRoleUriPrefix, kRoleNames[role])) bits |= 1u << role;
  return PeerRoles(bits);
}

std::string PeerRoles::Names() const {
  std::vector<std::string> names;
  for (int role = 0; role < kPeerRoles; ++role)
    if (Has(static_cast<PeerRole>(role))) names.emplace_back(kRoleNames[role]);
  return absl::StrJoin(names, ", ");
}

absl::Status PeerRoles::Denied(Rpc rpc, const PeerRoles& needed) const {
  const std::string has = none() ? "the certificate has no role" : absl::StrCat("the certificate's role is ", Names());
  return absl::PermissionDeniedError(absl::StrCat(has, ", and ", NameOf(rpc), " is for ", needed.Names(),
                                                  "; a role is a URI in the certificate, as ", kRoleUriPrefix,
                                                  "attention-worker"));
}

absl::Status PeerRoles::Permit(Rpc rpc) const {
  const PeerRoles needed(PermissionOf(rpc).roles);
  return (bits_ & needed.bits_) != 0 ? absl::OkStatus() : Denied(rpc, needed);
}

absl::Status PeerRoles::PermitAs(Role member, Rpc rpc) const {
  const PeerRole role = member == Role::kComputeWorker ? PeerRole::kComputeWorker : PeerRole::kAttentionWorker;
  return Has(role) ? absl::OkStatus() : Denied(rpc, PeerRoles(Bit(role)));
}

PeerRoles RolesOf(const Security& security, const grpc::ServerContextBase& context) {
  if (!security.tls()) return PeerRoles::All();
  std::vector<std::string> uris;
  const auto peer = context.auth_context();
  if (peer != nullptr && peer->IsPeerAuthenticated())
    for (const grpc::string_ref& uri : peer->FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME))
      uris.emplace_back(uri.data(), uri.size());
  return PeerRoles::OfUris(uris);
}

absl::Status CheckCaller(const Security& security, const grpc::ServerContextBase& context, Rpc rpc) {
  DT_RETURN_IF_ERROR(CheckToken(security, context));
  return RolesOf(security, context).Permit(rpc);
}

}  // namespace dovetail::control
