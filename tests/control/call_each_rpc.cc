// Calls every RPC of a scheduler's control plane once, and prints what came of it: "Admin.DrainWorker 7 the
// certificate's ...". Arguments: HOST:PORT, certificate, key, CA, the number of a worker to speak for.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "control/security.h"
#include "proto/control/dovetail_admin.grpc.pb.h"
#include "proto/control/dovetail_control.grpc.pb.h"

namespace dovetail::control {
namespace {

void Print(const char* rpc, const grpc::Status& status) {
  std::printf("%s %d %s\n", rpc, static_cast<int>(status.error_code()), status.error_message().c_str());
}

// A context of its own for each call; none goes on for longer than the test waits.
class Call {
 public:
  Call() { context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2)); }
  operator grpc::ClientContext*() { return &context_; }  // NOLINT: stubs take one

 private:
  grpc::ClientContext context_;
};

void CallMembership(v1::Membership::Stub& stub, uint32_t worker) {
  for (const v1::Role role : {v1::ROLE_ATTENTION_WORKER, v1::ROLE_COMPUTE_WORKER}) {
    v1::JoinRequest request;
    request.set_role(role);
    v1::JoinReply reply;
    Print(role == v1::ROLE_COMPUTE_WORKER ? "Join.compute" : "Join.attention", stub.Join(Call(), request, &reply));
  }
  v1::PutModelFilesReply put;
  Call put_call;
  const auto files = stub.PutModelFiles(put_call, &put);
  files->WritesDone();
  Print("PutModelFiles", files->Finish());
  Call attend_call;
  const auto attend = stub.Attend(attend_call);
  v1::WorkerReport report;
  report.set_worker(worker);
  report.mutable_heartbeat();
  attend->Write(report);
  v1::SchedulerOrder order;
  while (attend->Read(&order)) {
  }
  Print("Attend", attend->Finish());
  v1::LeaveRequest leave;
  leave.set_worker(worker);
  v1::LeaveReply left;
  Print("Leave", stub.Leave(Call(), leave, &left));
}

void CallGeneration(v1::Generation::Stub& stub) {
  v1::GetModelReply model;
  Print("GetModel", stub.GetModel(Call(), {}, &model));
  v1::ModelFileChunk chunk;
  Call files_call;
  const auto files = stub.GetModelFiles(files_call, {});
  while (files->Read(&chunk)) {
  }
  Print("GetModelFiles", files->Finish());
  Call open_call;
  const auto open = stub.Open(open_call);
  open->WritesDone();
  v1::GenerationEvents events;
  while (open->Read(&events)) {
  }
  Print("Open", open->Finish());
}

void CallAdmin(admin::v1::Admin::Stub& stub) {
  admin::v1::ClusterStatus status;
  Print("GetStatus", stub.GetStatus(Call(), {}, &status));
  admin::v1::ListWorkersReply workers;
  Print("ListWorkers", stub.ListWorkers(Call(), {}, &workers));
  admin::v1::DrainWorkerRequest drain;
  drain.set_name("no-such-worker");
  admin::v1::DrainWorkerReply drained;
  Print("DrainWorker", stub.DrainWorker(Call(), drain, &drained));
}

int Run(char** arguments) {
  Security security;
  security.cert_file = arguments[1];
  security.key_file = arguments[2];
  security.ca_file = arguments[3];
  const auto channel = MakeChannel("the address", arguments[0], security);
  if (!channel.ok()) return 1;
  CallMembership(*v1::Membership::NewStub(*channel), static_cast<uint32_t>(std::atoi(arguments[4])));
  CallGeneration(*v1::Generation::NewStub(*channel));
  CallAdmin(*admin::v1::Admin::NewStub(*channel));
  return 0;
}

}  // namespace
}  // namespace dovetail::control

int main(int argc, char** argv) { return argc == 6 ? dovetail::control::Run(argv + 1) : 2; }
