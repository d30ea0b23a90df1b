#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "transport/ucx/frame_ring.h"

// That the ring orders its memory accesses. Processors seldom reorder just where it hurts, so the ring runs over a
// machine that does so whenever it may; what the machine takes on trust, what a fence of this processor does, is tried
// on the processor.

namespace dovetail::transport::ucx {
namespace {

// Two agents with a store buffer each, over one memory. Stores leave a buffer in any order, or never by themselves; a
// releasing one after all before it; a fence and an exchange empty the buffer. An agent sees its own stores.
class Machine {
 public:
  // Before access number `at` of this agent, `run` happens.
  void Interrupt(int agent, int at, std::function<void()> run) {
    interrupted_ = agent;
    left_ = at;
    run_ = std::move(run);
  }
  bool Interrupted() const { return run_ == nullptr; }

  void Store(int agent, void* to, const void* from, size_t bytes, bool release) {
    Access(agent);
    Pending store{static_cast<char*>(to), {}, bytes, release};
    std::memcpy(store.value, from, bytes);
    buffers_[agent].push_back(store);
  }
  void Load(int agent, void* to, const void* from, size_t bytes) {
    Access(agent);
    std::memcpy(to, from, bytes);
    for (const Pending& store : buffers_[agent])
      if (store.to == from && store.bytes == bytes) std::memcpy(to, store.value, bytes);
  }
  void Drain(int agent) {
    Access(agent);
    for (const Pending& store : buffers_[agent]) Land(store);
    buffers_[agent].clear();
  }

  // One store that may, chosen at random, reaches memory. False: there is none.
  bool DrainOne(int agent, std::mt19937& random) {
    auto& buffer = buffers_[agent];
    if (buffer.empty()) return false;
    while (true) {
      const size_t i = random() % buffer.size();
      if (buffer[i].release && i > 0) continue;
      Land(buffer[i]);
      buffer.erase(buffer.begin() + static_cast<int64_t>(i));
      return true;
    }
  }

 private:
  struct Pending {
    char* to;
    char value[8];
    size_t bytes;
    bool release;
  };

  static void Land(const Pending& store) { std::memcpy(store.to, store.value, store.bytes); }

  void Access(int agent) {
    if (agent != interrupted_ || run_ == nullptr || left_-- > 0) return;
    std::exchange(run_, nullptr)();
  }

  std::vector<Pending> buffers_[2];
  int interrupted_ = -1, left_ = 0;
  std::function<void()> run_;
};

struct ModelMemory {
  Machine* machine;
  int agent;

  void Write(void* to, const void* from, size_t bytes) const {
    for (size_t at = 0; at < bytes; at += 8)
      machine->Store(agent, static_cast<char*>(to) + at, static_cast<const char*>(from) + at, 8, false);
  }
  void Read(void* to, const void* from, size_t bytes) const {
    for (size_t at = 0; at < bytes; at += 8)
      machine->Load(agent, static_cast<char*>(to) + at, static_cast<const char*>(from) + at, 8);
  }
  void StoreRelease(uint64_t& word, uint64_t value) const { machine->Store(agent, &word, &value, 8, true); }
  uint64_t LoadAcquire(uint64_t& word) const { return LoadOf(word); }
  void Store(uint32_t& word, uint32_t value) const { machine->Store(agent, &word, &value, 4, false); }
  uint32_t Load(uint32_t& word) const { return LoadOf(word); }
  uint32_t Exchange(uint32_t& word, uint32_t value) const {
    machine->Drain(agent);
    return std::exchange(word, value);
  }
  void Fence() const { machine->Drain(agent); }

 private:
  template <typename T>
  T LoadOf(T& word) const {
    T value;
    machine->Load(agent, &value, &word, sizeof(value));
    return value;
  }
};

struct Ends {
  Machine machine;
  std::unique_ptr<RegionFront> front = std::make_unique<RegionFront>();
  BasicRingWriter<ModelMemory> writer{front.get(), {&machine, 0}};
  BasicRingReader<ModelMemory> reader{front.get(), {&machine, 1}};
};

WireHeader Numbered(uint64_t sequence) {
  WireHeader header;
  header.kind = WireKind::kPlaced;
  header.sequence = header.offset = header.delivered = header.key = sequence;
  Seal(header);
  return header;
}

constexpr int kMostAccesses = 64;  // more than an operation of either end makes

// The owner goes to sleep in the middle of a push, wherever that is.
TEST(FrameRingOrder, APushAroundAnOwnerThatFallsAsleepIsSeenOrWakesIt) {
  int tried = 0;
  for (int at = 0; at < kMostAccesses; ++at) {
    Ends ends;
    bool seen = false;
    const auto fall_asleep = [&] {
      ends.reader.SetAsleep(true);
      seen = ends.reader.Ready();
    };
    ends.machine.Interrupt(0, at, fall_asleep);
    const bool wakes = ends.writer.Push(Numbered(1));
    tried += ends.machine.Interrupted();
    if (!ends.machine.Interrupted()) fall_asleep();  // when the push is done
    EXPECT_TRUE(seen || wakes) << "the owner fell asleep before access " << at << " of the push and sleeps for ever";
  }
  EXPECT_GE(tried, static_cast<int>(sizeof(WireHeader) / 8) + 3);
}

TEST(FrameRingOrder, AnOwnerThatFallsAsleepAroundAPushSeesItOrIsWoken) {
  int tried = 0;
  for (int at = 0; at < kMostAccesses; ++at) {
    Ends ends;
    bool wakes = false;
    ends.machine.Interrupt(1, at, [&] { wakes = ends.writer.Push(Numbered(1)); });
    ends.reader.SetAsleep(true);
    const bool seen = ends.reader.Ready();
    if (!ends.machine.Interrupted()) continue;
    ++tried;
    EXPECT_TRUE(seen || wakes) << "pushed before access " << at << " of the owner, which sleeps for ever";
  }
  EXPECT_GE(tried, 3);
}

// Header words reach memory in any order, and the owner looks after each of them.
TEST(FrameRingOrder, AHeaderThatIsReadyIsWholeInWhateverOrderItsWordsArrive) {
  // A push ends with a fence: the owner looks from within it, while stores leave one by one.
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    Ends ends;
    for (uint64_t frame = 1; frame <= 3; ++frame) {
      int ready = 0;
      const auto look = [&] {
        while (ready == 0 && ends.machine.DrainOne(0, random)) {
          if (!ends.reader.Ready()) continue;
          ++ready;
          WireHeader header;
          ends.reader.Pop(header);
          ASSERT_TRUE(Check(header).ok()) << "seed " << seed << ", frame " << frame;
          ASSERT_EQ(header.sequence, frame) << "seed " << seed;
        }
      };
      ends.machine.Interrupt(0, static_cast<int>(random() % (sizeof(WireHeader) / 8 + 3)), look);
      ends.writer.Push(Numbered(frame));
      if (ready > 0) continue;
      ASSERT_TRUE(ends.reader.Ready()) << "seed " << seed;
      WireHeader header;
      ends.reader.Pop(header);
      ASSERT_EQ(header.sequence, frame);
    }
  }
}

// What CpuMemory calls a fence keeps this processor from doing the next load before the last store is seen: without
// one, both sides of a few in ten thousand rounds miss what the other has stored.
TEST(FrameRingOrder, AFenceOfThisProcessorKeepsALoadBehindAStore) {
  constexpr int kRounds = 200'000;
  const CpuMemory memory;
  struct alignas(128) Word {
    uint32_t value = 0;
  };
  Word stored[2];
  std::atomic<int> arrived{0};
  std::vector<uint32_t> loaded[2] = {std::vector<uint32_t>(kRounds), std::vector<uint32_t>(kRounds)};
  const auto side = [&](int mine) {
    for (int round = 0; round < kRounds; ++round) {
      ++arrived;
      for (int spins = 0; arrived < 2 * (round + 1); ++spins)
        if (spins > 1000) std::this_thread::yield();
      memory.Store(stored[mine].value, static_cast<uint32_t>(round + 1));
      memory.Fence();
      loaded[mine][round] = memory.Load(stored[1 - mine].value);
    }
  };
  std::thread other(side, 1);
  side(0);
  other.join();
  int missed = 0;
  for (int round = 0; round < kRounds; ++round)
    missed += loaded[0][round] == static_cast<uint32_t>(round) && loaded[1][round] == static_cast<uint32_t>(round);
  EXPECT_EQ(missed, 0);
}

// For ThreadSanitizer, which sees the two ends in one mapping: headers and payloads are handed over without a race.
TEST(FrameRingOrder, PayloadsAndHeadersPassBetweenThreadsWithoutARace) {
  constexpr uint64_t kFrames = 20'000, kSlots = 64;
  const auto front = std::make_unique<RegionFront>();
  std::vector<uint64_t> slots(kSlots);
  std::atomic<uint64_t> popped{0};
  std::thread writing([&, writer = RingWriter(front.get())]() mutable {
    for (uint64_t frame = 0; frame < kFrames; ++frame) {
      while (frame - popped.load(std::memory_order_acquire) >= kSlots) std::this_thread::yield();
      slots[frame % kSlots] = frame;
      writer.Push(Numbered(frame));
    }
  });
  RingReader reader(front.get());
  uint64_t wrong = 0;
  for (uint64_t frame = 0; frame < kFrames; ++frame) {
    while (!reader.Ready()) std::this_thread::yield();
    WireHeader header;
    reader.Pop(header);
    wrong += header.sequence != frame || slots[frame % kSlots] != frame || !Check(header).ok();
    popped.store(frame + 1, std::memory_order_release);
  }
  writing.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace dovetail::transport::ucx
