#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "transport/doorbell.h"
#include "transport/inproc/inproc_fabric.h"

// Nodes on threads of their own. Nothing here sleeps for a time: a lost frame or wake-up is a test that does not end.

namespace dovetail::transport {
namespace {

constexpr absl::Duration kForever = absl::Hours(1);

proto::FrameHeader Header(uint64_t step, size_t payload_bytes) {
  return proto::MakeHeader(proto::FrameType::kQuery, Epoch(1), StepId(step), MicroBatchId(0), 0, payload_bytes);
}

// Calls a function for each frame.
template <typename F>
class Handler final : public FrameHandler {
 public:
  explicit Handler(F f) : f_(std::move(f)) {}
  void OnFrame(const Delivery& delivery) override { f_(delivery); }

 private:
  F f_;
};

TEST(Doorbell, ARingBeforeTheWaitIsNotLost) {
  Doorbell bell;
  bell.Ring();
  bell.Ring();
  EXPECT_TRUE(bell.Wait(kForever)) << "two rings, one wake-up";
  EXPECT_FALSE(bell.Wait(absl::ZeroDuration()));
  EXPECT_FALSE(bell.Wait(absl::Microseconds(50)));
  bell.Ring();
  EXPECT_TRUE(bell.Wait(absl::InfiniteDuration()));
}

TEST(Doorbell, WakesASleeperEveryTimeAndShowsWhatWasWrittenBefore) {
  constexpr int kRounds = 5000;
  Doorbell there, back;
  int value = 0;  // handed to and fro without any other synchronisation
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      while (!there.Wait(kForever)) {
      }
      ++value;
      back.Ring();
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    ++value;
    there.Ring();
    while (!back.Wait(kForever)) {
    }
    ASSERT_EQ(value, 2 * (i + 1));
  }
  other.join();
}

TEST(Doorbell, ManyMayRingAtOnce) {
  constexpr int kRounds = 2000;
  Doorbell bell;
  std::atomic<int> rung{0};
  std::vector<std::thread> ringers;
  for (int t = 0; t < 3; ++t)
    ringers.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        rung.fetch_add(1);
        bell.Ring();
      }
    });
  while (rung.load() < 3 * kRounds) bell.Wait(kForever);
  for (std::thread& ringer : ringers) ringer.join();
  EXPECT_EQ(rung.load(), 3 * kRounds);
}

TEST(InprocThreads, ManySendersKeepTheirOrderThroughFullRings) {
  constexpr int kSenders = 3;
  constexpr uint64_t kFrames = 20000;
  Doorbell bell;
  InprocFabric fabric;
  const auto receiver = fabric.CreatePort(&bell);
  std::vector<std::unique_ptr<Port>> senders;
  for (int i = 0; i < kSenders; ++i) senders.push_back(fabric.CreatePort(nullptr));
  std::atomic<uint64_t> refused{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kSenders; ++i)
    threads.emplace_back([&, i] {
      for (uint64_t step = 0; step < kFrames; ++step) {
        const std::vector<std::byte> payload(1 + step % 9, std::byte(step % 251));
        while (!senders[i]->SendMessage(receiver->id(), Header(step, payload.size()), payload).ok()) {
          refused.fetch_add(1);
          std::this_thread::yield();
        }
      }
    });

  std::vector<uint64_t> next(kSenders + 1, 0);
  uint64_t wrong = 0, total = 0;
  Handler handler([&](const Delivery& delivery) {
    const uint64_t step = next[delivery.from.value()]++;
    ++total;
    wrong += delivery.header.step != step || delivery.payload.size() != 1 + step % 9 ||
             delivery.payload[step % 9] != std::byte(step % 251);
  });
  while (total < kSenders * kFrames)
    if (receiver->Poll(handler, 64) == 0) bell.Wait(kForever);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(receiver->Poll(handler, 64), 0) << "no frame came twice";
}

// A step's exchange: q, then k and v, lie in the sender's memory until the partial is there, and are then overwritten.
TEST(InprocThreads, TensorsStayAsTheyAreUntilTheyAreAnswered) {
  constexpr uint64_t kOps = 5000;
  Doorbell compute_bell, attention_bell;
  InprocFabric fabric;
  const auto compute = fabric.CreatePort(&compute_bell);
  const auto attention = fabric.CreatePort(&attention_bell);
  std::vector<uint64_t> partial(8);  // outlives the thread: the last answer is read after it
  std::thread worker([&] {
    uint64_t sum = 0, answered = 0;
    Handler handler([&](const Delivery& delivery) {
      const auto* values = reinterpret_cast<const uint64_t*>(delivery.payload.data());
      for (size_t i = 0; i < delivery.payload.size() / 8; ++i) sum += values[i];
      if (delivery.header.op == 0) return;  // q; k and v follow
      partial[0] = sum;
      sum = 0;
      ++answered;
      EXPECT_TRUE(
          attention->SendTensor(compute->id(), Header(delivery.header.step, 64), std::as_bytes(std::span(partial)))
              .ok());
    });
    while (answered < kOps)
      if (attention->Poll(handler, 64) == 0) attention_bell.Wait(kForever);
  });

  std::vector<uint64_t> q(16), key_value(16);
  uint64_t op = 0;
  const auto send = [&] {
    for (size_t i = 0; i < 16; ++i) q[i] = op + i, key_value[i] = op * i;
    auto header = Header(op, 128);
    EXPECT_TRUE(compute->SendTensor(attention->id(), header, std::as_bytes(std::span(q))).ok());
    header.op = 1;
    EXPECT_TRUE(compute->SendTensor(attention->id(), header, std::as_bytes(std::span(key_value))).ok());
  };
  Handler handler([&](const Delivery& delivery) {
    const uint64_t answer = *reinterpret_cast<const uint64_t*>(delivery.payload.data());
    EXPECT_EQ(delivery.header.step, op);
    EXPECT_EQ(answer, 16 * op + 120 + 120 * op);
    if (++op < kOps) send();
  });
  send();
  while (op < kOps)
    if (compute->Poll(handler, 64) == 0) compute_bell.Wait(kForever);
  worker.join();
}

TEST(InprocThreads, APortMayLeaveWhileOthersSendToIt) {
  Doorbell bell;
  InprocFabric fabric;
  auto leaver = fabric.CreatePort(&bell);
  const auto sender = fabric.CreatePort(nullptr);
  std::thread thread([&] {
    uint64_t step = 0;
    while (!absl::IsUnavailable(sender->SendMessage(NodeId(0), Header(step, 8), std::vector<std::byte>(8)))) ++step;
  });
  int seen = 0;
  Handler handler([&](const Delivery&) { ++seen; });
  while (seen < 3000)
    if (leaver->Poll(handler, 64) == 0) bell.Wait(kForever);
  leaver.reset();
  thread.join();
}

}  // namespace
}  // namespace dovetail::transport
