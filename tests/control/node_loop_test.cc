#include "control/node_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/time/clock.h"
#include "base/clock.h"

namespace dovetail::control {
namespace {

// A connector whose Wait() may take as long as it likes, as on a machine that gives the loop no time.
class StarvedConnector final : public transport::Connector {
 public:
  NodeId id() const override { return NodeId(1); }
  std::string address() const override { return ""; }
  std::string version() const override { return ""; }
  absl::Status AddPeer(NodeId, Epoch, const std::string&) override { return absl::OkStatus(); }
  void RemovePeer(NodeId) override {}
  std::vector<Failure> TakeFailures() override { return {}; }
  bool Connected(NodeId) const override { return false; }
  std::vector<Silence> SilentPeers() const override { return {}; }
  Bytes BytesTo(NodeId) const override { return {}; }
  std::string LanesTo(NodeId) const override { return ""; }
  absl::Status SendMessage(NodeId, const proto::FrameHeader&, std::vector<std::byte>) override {
    return absl::OkStatus();
  }
  absl::Status SendTensor(NodeId, const proto::FrameHeader&, transport::LentBytes) override { return absl::OkStatus(); }
  int Poll(transport::FrameHandler&, int) override { return 0; }

  void Wait(absl::Duration) override {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return given_ > 0; });
    --given_;
    waiting_ = false;
  }
  void Wake() override {}

  void AwaitSleep() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return waiting_; });
  }
  void GiveTime(int turns) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_ += turns;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int given_ = 0;
  bool waiting_ = false;
};

// Whether the loop tells of a turn longer than the limit within 10 s.
bool BecomesBusierThan(NodeLoop& loop, absl::Duration limit) {
  const absl::Time end = SystemClock().Now() + absl::Seconds(10);
  while (SystemClock().Now() < end)
    if (loop.TakeBusiest() > limit) return true;
  return false;
}

TEST(NodeLoop, IsBusyWhileItsSleepLastsLongerThanItShould) {
  StarvedConnector connector;
  std::atomic<bool> soon{true};
  NodeLoop loop(connector);
  loop.Post([&] {
    loop.SetNode({[] { return 0; },
                  [&] { return SystemClock().Now() + (soon ? absl::Milliseconds(1) : absl::Milliseconds(400)); }});
  });
  connector.GiveTime(1);  // it may have slept before the work was posted
  connector.AwaitSleep();
  EXPECT_TRUE(BecomesBusierThan(loop, absl::Milliseconds(100)));
  soon = false;
  connector.GiveTime(1);
  while (loop.TakeBusiest() > absl::Milliseconds(100)) {
  }
  EXPECT_TRUE(BecomesBusierThan(loop, absl::Milliseconds(100))) << "that sleep is too long as well";
  connector.GiveTime(1 << 20);
}

TEST(NodeLoop, IsNotBusyBeforeItsSleepShouldHaveEnded) {
  for (absl::Duration took = absl::InfiniteDuration(); took > absl::Milliseconds(500);) {  // else it was due
    const absl::Time begun = SystemClock().Now();
    StarvedConnector connector;
    NodeLoop loop(connector);
    connector.AwaitSleep();  // for half a second
    loop.TakeBusiest();      // the turn before
    const absl::Duration busy = loop.TakeBusiest();
    took = SystemClock().Now() - begun;
    if (took <= absl::Milliseconds(500)) {
      EXPECT_EQ(busy, absl::ZeroDuration());
    }
    connector.GiveTime(1 << 20);
  }
}

TEST(NodeLoop, IsBusyWhileATurnLasts) {
  StarvedConnector connector;
  std::atomic<bool> at_work{false}, end{false};
  NodeLoop loop(connector);
  loop.Post([&] {
    at_work = true;
    while (!end) {
    }
  });
  connector.GiveTime(1);
  while (!at_work) {
  }
  EXPECT_TRUE(BecomesBusierThan(loop, absl::Milliseconds(20)));
  end = true;
  connector.GiveTime(1 << 20);
}

TEST(NodeLoop, TellsOnceOfATurnThatHasEnded) {
  StarvedConnector connector;
  std::atomic<bool> ended{false};
  NodeLoop loop(connector);
  loop.Post([] { absl::SleepFor(absl::Milliseconds(30)); });
  loop.Post([&] { ended = true; });
  connector.GiveTime(1);
  while (!ended) {
  }
  connector.AwaitSleep();
  EXPECT_GE(loop.TakeBusiest(), absl::Milliseconds(30));
  EXPECT_LT(loop.TakeBusiest(), absl::Milliseconds(30)) << "it was told already, and the sleep lasts half a second";
  connector.GiveTime(1 << 20);
}

}  // namespace
}  // namespace dovetail::control
