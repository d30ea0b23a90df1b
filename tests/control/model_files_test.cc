#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/control/dovetail_control.grpc.pb.h"
#include "scheduler/scheduler_main.h"
#include "tests/cluster/inproc_hub.h"

// Files that a stranger sends are not kept.

namespace dovetail::control {
namespace {

TEST(ModelFiles, OfAStrangerAreRefusedAtTheFirstPart) {
  test::InprocHub hub;
  scheduler::SchedulerMainOptions options;
  options.listen = "127.0.0.1:0";
  options.scheduler.max_model_len = 64;
  auto scheduler = scheduler::SchedulerMain::Start(options, Epoch(1), hub.Create(NodeId(0), Epoch(1)));
  ASSERT_TRUE(scheduler.ok()) << scheduler.status();

  const auto channel =
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", (*scheduler)->port()), grpc::InsecureChannelCredentials());
  const auto stub = v1::Membership::NewStub(channel);
  grpc::ClientContext context;
  v1::PutModelFilesReply reply;
  const auto writer = stub->PutModelFiles(&context, &reply);
  v1::ModelFileChunk chunk;
  chunk.set_worker(7);
  chunk.set_epoch(8);
  chunk.set_data(std::string(size_t{1} << 20, 'x'));
  int taken = 0;
  while (taken < 90 && writer->Write(chunk)) ++taken;
  writer->WritesDone();  // else a server that reads on would wait for more, and Finish() for the server
  const grpc::Status end = writer->Finish();
  EXPECT_EQ(end.error_code(), grpc::StatusCode::NOT_FOUND) << end.error_message();
  EXPECT_LT(taken, 45) << "MiB of a stranger were read";
}

}  // namespace
}  // namespace dovetail::control
