#include "control/scheduler_verifier.h"

#include <string>
#include <vector>

#include "control/permissions.h"

namespace dovetail::control {
namespace {

using grpc::experimental::TlsCustomVerificationCheckRequest;

class SchedulerVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  // gRPC's check of names answers at once.
  bool Verify(TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)> callback,
              grpc::Status* status) override {
    names_.Verify(request, std::move(callback), status);
    if (!status->ok()) return true;
    std::vector<std::string> uris;
    for (const grpc::string_ref& uri : request->uri_names()) uris.emplace_back(uri.data(), uri.size());
    if (!PeerRoles::OfUris(uris).Has(PeerRole::kScheduler))
      *status = grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                             absl::StrCat("certificate without ", kRoleUriPrefix, NameOf(PeerRole::kScheduler)));
    return true;
  }
  void Cancel(TlsCustomVerificationCheckRequest*) override {}

 private:
  grpc::experimental::HostNameCertificateVerifier names_;
};

}  // namespace

std::shared_ptr<grpc::experimental::CertificateVerifier> MakeSchedulerVerifier() {
  return grpc::experimental::ExternalCertificateVerifier::Create<SchedulerVerifier>();
}

}  // namespace dovetail::control
