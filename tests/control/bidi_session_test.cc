#include "control/bidi_session.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/control/dovetail_control.grpc.pb.h"

// What waits for a peer that does not read is bounded, by messages and by bytes.

namespace dovetail::control {
namespace {

using Session = BidiSession<v1::GenerationCommands, v1::GenerationEvents>;
constexpr size_t kMiB = size_t{1} << 20;
constexpr std::chrono::seconds kLongEnough(60);

v1::GenerationEvents Message(size_t bytes) {
  v1::GenerationEvents message;
  message.add_updates()->set_error(std::string(bytes, 'x'));
  return message;
}

// Gives each session to the test, which may send; answers each message with one of a MiB.
class Service final : public v1::Generation::CallbackService {
 public:
  explicit Service(QueueLimits limits) : limits_(limits) {}

  std::promise<std::shared_ptr<Session>> opened;
  std::promise<void> closed;

  grpc::ServerBidiReactor<v1::GenerationCommands, v1::GenerationEvents>* Open(
      grpc::CallbackServerContext* call) override {
    const auto session = Session::Start(call, limits_);
    const std::weak_ptr<Session> weak = session;
    session->Begin({[weak](const v1::GenerationCommands&) {
                      if (const auto open = weak.lock()) open->Send(Message(kMiB));
                    },
                    [this] { closed.set_value(); }});
    opened.set_value(session);
    return session.get();
  }

 private:
  const QueueLimits limits_;
};

// One stream between a session and a client that reads when the test says so.
struct Stream {
  explicit Stream(QueueLimits limits) : service(limits) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    server = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    const auto channel =
        grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), arguments);
    stub = v1::Generation::NewStub(channel);
    stream = stub->Open(&context);
    session = service.opened.get_future().get();
  }
  ~Stream() {
    context.TryCancel();
    v1::GenerationEvents events;
    while (stream->Read(&events)) {
    }
    stream->Finish();
    session.reset();
    server->Shutdown();
  }
  bool Closes() { return service.closed.get_future().wait_for(kLongEnough) == std::future_status::ready; }

  Service service;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<v1::Generation::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::GenerationCommands, v1::GenerationEvents>> stream;
  std::shared_ptr<Session> session;
};

TEST(BidiSession, APeerThatDoesNotReadIsDroppedByTheBytesThatWait) {
  constexpr size_t kLimit = 4 * kMiB;
  Stream stream({.messages = 1000, .bytes = kLimit});
  size_t most = 0;
  for (int i = 0; i < 200; ++i) {
    stream.session->Send(Message(kMiB));
    most = std::max(most, stream.session->QueuedBytes());
  }
  EXPECT_LE(most, kLimit);
  EXPECT_GE(most, kLimit / 2) << "nothing waited: the test says nothing";
  EXPECT_EQ(stream.session->QueuedBytes(), 0u) << "a dropped peer holds nothing";
  EXPECT_TRUE(stream.Closes()) << "200 MiB wait for it";
}

TEST(BidiSession, APeerThatDoesNotReadIsDroppedByTheMessagesThatWait) {
  Stream stream({.messages = 4, .bytes = 1000 * kMiB});
  for (int i = 0; i < 200; ++i) stream.session->Send(Message(kMiB));
  EXPECT_EQ(stream.session->QueuedBytes(), 0u);
  EXPECT_TRUE(stream.Closes());
}

TEST(BidiSession, APeerThatReadsGetsMoreThanMayWait) {
  Stream stream({.messages = 4, .bytes = 2 * kMiB});
  v1::GenerationEvents events;
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(stream.stream->Write({}));
    ASSERT_TRUE(stream.stream->Read(&events)) << "message " << i;
    EXPECT_EQ(events.updates(0).error().size(), kMiB);
  }
}

TEST(BidiSession, AMessageThatIsLargerThanMayWaitWaitsAlone) {
  Stream stream({.messages = 4, .bytes = kMiB});
  stream.session->Send(Message(kMiB / 2));
  stream.session->Send(Message(8 * kMiB));
  v1::GenerationEvents events;
  ASSERT_TRUE(stream.stream->Read(&events));
  ASSERT_TRUE(stream.stream->Read(&events));
  EXPECT_EQ(events.updates(0).error().size(), 8 * kMiB);
}

}  // namespace
}  // namespace dovetail::control
