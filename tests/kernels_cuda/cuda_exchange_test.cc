#include "kernels/cuda/exchange/cuda_exchange.h"

#include <cstring>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/cuda/rows/row_ops.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

TEST(ExchangeStatus, SaysWhichOpFailedAndWhy) {
  EXPECT_TRUE(ExchangeStatus(0).ok());
  const absl::Status late = ExchangeStatus(EncodeFailure(ExchangeReason::kDeadline, 7));
  EXPECT_TRUE(absl::IsUnavailable(late));
  EXPECT_EQ(late.message(), "attention op 7: nothing came from the other GPU");
  EXPECT_EQ(ExchangeStatus(EncodeFailure(ExchangeReason::kGivenUp, 31)).message(),
            "attention op 31: the other GPU's worker is lost");
}

// Both ends on one GPU: what crosses is the same, only the way is shorter.
class CudaExchangeTest : public testing::CudaTest {
 protected:
  static constexpr size_t kBytes = 4096;

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    words_ = *device().Allocate(2 * sizeof(ExchangeWords));
    slot_ = *device().Allocate(kBytes);
    for (auto& stream : streams_) stream = *device().CreateCudaStream();
    ASSERT_TRUE(streams_[0]->Fill(words_->data(), 0, words_->size_bytes()).ok());
    ASSERT_TRUE(streams_[0]->Fill(slot_->data(), 0, kBytes).ok());
    ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  }
  ExchangeEnd End(int side, uint64_t deadline_ns = 5'000'000'000) {
    auto* words = reinterpret_cast<ExchangeWords*>(words_->data());
    return {words + side, words + 1 - side, deadline_ns};
  }
  void BeginStep(int side, uint64_t step) {
    const uint64_t pair[2] = {step * kExchangeOps, 0};
    ASSERT_TRUE(streams_[side]->Copy(&End(side).own->step, pair, sizeof(pair)).ok());
    ASSERT_TRUE(streams_[side]->SynchronizeStatus().ok());
  }
  ExchangeWords Words(int side) {
    ExchangeWords words;
    EXPECT_TRUE(streams_[side]->Copy(&words, End(side).own, sizeof(words)).ok());
    EXPECT_TRUE(streams_[side]->SynchronizeStatus().ok());
    return words;
  }
  absl::Status StatusOf(int side) { return ExchangeStatus(Words(side).failure); }

  std::unique_ptr<Buffer> words_, slot_;
  std::unique_ptr<CudaStream> streams_[2];
};

TEST_F(CudaExchangeTest, RefusesNullPointersOddSizesAndOpsBeyondTheNumbersOfAStep) {
  EXPECT_TRUE(absl::IsInvalidArgument(ExchangeAwait(*streams_[0], {})));
  EXPECT_TRUE(absl::IsInvalidArgument(ExchangeSignal(*streams_[0], {End(0), kExchangeOps - 1})));
  EXPECT_TRUE(absl::IsInvalidArgument(ExchangeGiveTurn(*streams_[0], {})));
  ExchangePushLaunch push;
  push.end = End(0);
  push.parts[0] = {slot_->data(), slot_->data(), 24};
  EXPECT_TRUE(absl::IsInvalidArgument(ExchangePush(*streams_[0], push)));
}

TEST_F(CudaExchangeTest, WhoWaitsSeesWhatWasPushedBeforeTheNumber) {
  BeginStep(0, 3);
  BeginStep(1, 3);
  const std::vector<uint8_t> sent(kBytes, 0x5a);
  auto from = *device().Allocate(kBytes);
  auto seen = *device().Allocate(kBytes);
  ASSERT_TRUE(streams_[0]->Copy(from->data(), sent.data(), kBytes).ok());
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {End(1), 0}).ok());  // waits before anything was sent
  ASSERT_TRUE(streams_[1]->Copy(seen->data(), slot_->data(), kBytes).ok());
  ExchangePushLaunch push;
  push.end = End(0);
  push.parts[0] = {from->data(), slot_->data(), kBytes};
  push.blocks = 3;
  ASSERT_TRUE(ExchangePush(*streams_[0], push).ok());
  std::vector<uint8_t> came(kBytes);
  ASSERT_TRUE(streams_[1]->Copy(came.data(), seen->data(), kBytes).ok());
  ASSERT_TRUE(streams_[1]->SynchronizeStatus().ok());
  EXPECT_EQ(came, sent);
  EXPECT_TRUE(StatusOf(1).ok());
  EXPECT_EQ(Words(1).arrived, 3 * kExchangeOps + 1);
}

TEST_F(CudaExchangeTest, AWaitEndsAtItsDeadlineAndTheStepSendsNothingMore) {
  BeginStep(0, 9);
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {End(0, 20'000'000), 4}).ok());
  ASSERT_TRUE(ExchangeSignal(*streams_[0], {End(0), 5}).ok());
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {End(0, 3'600'000'000'000), 5}).ok());  // returns at once
  EXPECT_EQ(StatusOf(0).message(), "attention op 4: nothing came from the other GPU");
  EXPECT_EQ(Words(1).arrived, 0u) << "what a failed step made must not be taken for a result";
  EXPECT_GE(Words(1).given_up, 9 * kExchangeOps + 1) << "the other side is told";
}

TEST_F(CudaExchangeTest, WhatIsGivenUpEndsWaitsOfThatStepAndOfNoLaterOne) {
  BeginStep(1, 9);
  const uint64_t given_up = 9 * kExchangeOps + kExchangeOps - 1;
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {End(1, 3'600'000'000'000), 0}).ok());
  ASSERT_TRUE(streams_[0]->Copy(&End(1).own->given_up, &given_up, sizeof(given_up)).ok());  // while it waits
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(StatusOf(1).message(), "attention op 0: the other GPU's worker is lost");
  BeginStep(1, 10);
  BeginStep(0, 10);
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {End(1), 0}).ok());
  ASSERT_TRUE(ExchangeSignal(*streams_[0], {End(0), 0}).ok());
  EXPECT_TRUE(StatusOf(1).ok());
}

TEST_F(CudaExchangeTest, AMessageOfAnEarlierStepIsNotTakenForOneOfThis) {
  BeginStep(0, 9);
  ASSERT_TRUE(ExchangeSignal(*streams_[0], {End(0), 31}).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  BeginStep(1, 10);
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {End(1, 20'000'000), 0}).ok());
  EXPECT_EQ(StatusOf(1).message(), "attention op 0: nothing came from the other GPU");
}

// The rows that leave are those that the same kernel writes without an exchange, and every block has written before
// the number is there.
TEST_F(CudaExchangeTest, TheKernelThatMakesQKAndVTellsThatTheyAreThere) {
  constexpr int kRows = 7, kHeads = 5, kKvHeads = 2, kDim = 64, kWidth = (kHeads + 2 * kKvHeads) * kDim;
  auto qkv = *device().Allocate(kRows * kWidth * 2);
  auto here = *device().Allocate(kRows * kWidth * 2), there = *device().Allocate(kRows * kWidth * 2);
  std::vector<uint16_t> values(kRows * kWidth);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3f00 + i % 191);
  ASSERT_TRUE(streams_[0]->Copy(qkv->data(), values.data(), values.size() * 2).ok());
  const auto append = [&](std::byte* to) {
    KvAppendLaunch launch;
    launch.qkv = qkv->data();
    launch.qkv_step = kWidth;
    launch.q_out = to;
    launch.q_out_step = kHeads * kDim;
    launch.k_out = to + kRows * kHeads * kDim * 2;
    launch.v_out = to + kRows * (kHeads + kKvHeads) * kDim * 2;
    launch.k_out_step = launch.v_out_step = kKvHeads * kDim;
    launch.rows = kRows;
    launch.q_heads = kHeads;
    launch.kv_heads = kKvHeads;
    launch.layout = {kDim, kDim, KvType::kBF16};
    return launch;
  };
  ASSERT_TRUE(KvAppend(*streams_[0], append(here->data())).ok());
  BeginStep(0, 1);
  BeginStep(1, 1);
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {End(1), 2}).ok());
  std::vector<uint16_t> expected(values.size()), came(values.size());
  ASSERT_TRUE(streams_[0]->Copy(expected.data(), here->data(), expected.size() * 2).ok());
  KvAppendLaunch told = append(there->data());
  told.exchange = End(0);
  told.signal_op = 2;
  ASSERT_TRUE(KvAppend(*streams_[0], told).ok());
  ASSERT_TRUE(streams_[1]->Copy(came.data(), there->data(), came.size() * 2).ok());
  ASSERT_TRUE(streams_[1]->SynchronizeStatus().ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(came, expected);
  EXPECT_TRUE(StatusOf(1).ok());
  EXPECT_EQ(Words(0).blocks_done, 0u) << "for the next message";
}

// Copies of rows of 16-byte and of 4-byte units, of several blocks each; the waiting side sees all of them.
TEST_F(CudaExchangeTest, CopiesGoWhereTheirListSaysBeforeThePeersAreTold) {
  constexpr int kRows = 40;
  BeginStep(0, 5);
  BeginStep(1, 5);
  auto from = *device().Allocate(kBytes), to = *device().Allocate(kBytes), seen = *device().Allocate(kBytes);
  std::vector<uint8_t> sent(kBytes), came(kBytes), expected(kBytes, 0);
  for (size_t i = 0; i < kBytes; ++i) sent[i] = static_cast<uint8_t>(i * 7 + i / 251);
  const ExchangeCopy copies[] = {
      {from->data() + 32, to->data() + 16, 64, 48, kRows, 32},
      {from->data() + 4, to->data() + 2048, 12, 8, kRows, 8},
  };
  for (const ExchangeCopy& copy : copies) {
    const auto at = static_cast<const std::byte*>(copy.from) - from->data();
    for (int row = 0; row < copy.rows; ++row)
      for (int i = 0; i < copy.row_bytes; ++i)
        expected[static_cast<std::byte*>(copy.to) - to->data() + row * copy.to_step + i] =
            sent[at + row * copy.from_step + i];
  }
  ExchangeFan fan;
  fan.count = 1;
  fan.peers[0].end = End(0);
  auto lists = *device().Allocate(sizeof(copies) + sizeof(fan));
  auto* const there = reinterpret_cast<ExchangeFan*>(lists->data() + sizeof(copies));
  ASSERT_TRUE(streams_[0]->Copy(lists->data(), copies, sizeof(copies)).ok());
  ASSERT_TRUE(streams_[0]->Copy(there, &fan, sizeof(fan)).ok());
  ASSERT_TRUE(streams_[0]->Copy(from->data(), sent.data(), kBytes).ok());
  ASSERT_TRUE(streams_[0]->Fill(to->data(), 0, kBytes).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {End(1), 3}).ok());
  ASSERT_TRUE(streams_[1]->Copy(seen->data(), to->data(), kBytes).ok());
  ExchangeCopiesLaunch launch{there, reinterpret_cast<const ExchangeCopy*>(lists->data()), 2, 3, 3};
  ASSERT_TRUE(ExchangeCopies(*streams_[0], launch).ok());
  ASSERT_TRUE(streams_[1]->Copy(came.data(), seen->data(), kBytes).ok());
  ASSERT_TRUE(streams_[1]->SynchronizeStatus().ok());
  EXPECT_EQ(came, expected);
  EXPECT_TRUE(StatusOf(1).ok());
  launch.copies = nullptr;
  EXPECT_TRUE(absl::IsInvalidArgument(ExchangeCopies(*streams_[0], launch)));
}

// Two steps of one GPU, each with a stream and words; both have received all that they wait for.
class ExchangeTurnTest : public CudaExchangeTest {
 protected:
  static constexpr uint64_t kStep[2] = {3, 4};
  static constexpr uint64_t kLong = 20'000'000'000;

  void SetUp() override {
    CudaExchangeTest::SetUp();
    if (IsSkipped()) return;
    aside_ = *device().CreateCudaStream();
    turn_ = *device().Allocate(sizeof(ExchangeTurn));
    peers_ = *device().Allocate(2 * sizeof(ExchangeWords));
  }
  ExchangeTurn* turn() { return reinterpret_cast<ExchangeTurn*>(turn_->data()); }
  ExchangeEnd EndOf(int step) {
    auto* const peers = reinterpret_cast<ExchangeWords*>(peers_->data());
    return {End(step).own, peers + step, 5'000'000'000};
  }
  void Begin(uint64_t holder, uint64_t most_ns, bool take_turns = true) {
    const ExchangeTurn turns{holder, most_ns};
    ASSERT_TRUE(streams_[0]->Copy(turn_->data(), &turns, sizeof(turns)).ok());
    ASSERT_TRUE(streams_[0]->Fill(peers_->data(), 0, peers_->size_bytes()).ok());
    for (int i = 0; i < 2; ++i) {
      ExchangeWords words;
      words.step = kStep[i] * kExchangeOps;
      words.arrived = words.step + 1000;
      words.turn = take_turns ? turn() : nullptr;
      ASSERT_TRUE(streams_[0]->Copy(EndOf(i).own, &words, sizeof(words)).ok());
      ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
    }
  }
  static uint64_t Name(int step) { return kStep[step] * kExchangeOps + 1; }
  uint64_t Holder() {
    uint64_t holder = 0;
    EXPECT_TRUE(aside_->Copy(&holder, &turn()->holder, sizeof(holder)).ok());
    EXPECT_TRUE(aside_->SynchronizeStatus().ok());
    return holder;
  }
  uint64_t Sent(int step) {
    uint64_t arrived = 0;
    EXPECT_TRUE(aside_->Copy(&arrived, &EndOf(step).peer->arrived, sizeof(arrived)).ok());
    EXPECT_TRUE(aside_->SynchronizeStatus().ok());
    return arrived;
  }
  void Synchronize() {
    for (auto& stream : streams_) ASSERT_TRUE(stream->SynchronizeStatus().ok());
  }

  std::unique_ptr<CudaStream> aside_;
  std::unique_ptr<Buffer> turn_, peers_;
};

TEST_F(ExchangeTurnTest, WhoComesWhileAnotherHasTheTurnWaitsUntilItIsGivenUp) {
  Begin(0, kLong);
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {EndOf(0), 0}).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(Holder(), Name(0));
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {EndOf(1), 0}).ok());
  ASSERT_TRUE(ExchangeSignal(*streams_[1], {EndOf(1), 1}).ok());
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_EQ(Sent(1), 0u) << "it is not its turn";
  ASSERT_TRUE(ExchangeGiveTurn(*streams_[0], {EndOf(0).own}).ok());
  Synchronize();
  EXPECT_EQ(Sent(1), kStep[1] * kExchangeOps + 2);
  EXPECT_EQ(Holder(), Name(1));
  const ExchangeWords words = Words(1);
  EXPECT_GE(words.turn_ns, 25'000'000u);
  EXPECT_LT(words.waited_ns, 5'000'000u) << "the peer's answer was there";
  EXPECT_LT(words.busy_ns, 5'000'000u) << "nor was the GPU busy";
}

// What a step does in its turn: it fills memory that both use and looks at what it has filled.
TEST_F(ExchangeTurnTest, StepsThatTakeTurnsNeverOverlap) {
  constexpr int kRounds = 60;
  constexpr size_t kShared = size_t{8} << 20, kLook = 64;
  Begin(0, kLong);
  auto shared = *device().Allocate(kShared), seen = *device().Allocate(2 * kRounds * 2 * kLook);
  const auto look = [&](int step, int round) { return seen->data() + ((2 * round + step) * 2) * kLook; };
  const auto round = [&](int i, int step, uint32_t op) {
    CudaStream& stream = *streams_[step];
    ASSERT_TRUE(ExchangeAwait(stream, {EndOf(step), op}).ok());
    ASSERT_TRUE(stream.Fill(shared->data(), step + 1, kShared).ok());
    ASSERT_TRUE(stream.Copy(look(step, i), shared->data(), kLook).ok());
    ASSERT_TRUE(stream.Copy(look(step, i) + kLook, shared->data() + kShared - kLook, kLook).ok());
    ASSERT_TRUE(ExchangeGiveTurn(stream, {EndOf(step).own}).ok());
  };
  for (int step = 0; step < 2; ++step) round(0, step, 0);
  Synchronize();
  // Nothing runs before all is enqueued.
  const ExchangeTurn held{77, kLong}, free{0, kLong};
  ASSERT_TRUE(streams_[0]->Copy(turn_->data(), &held, sizeof(held)).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  for (int i = 0; i < kRounds; ++i)
    for (int step = 0; step < 2; ++step) round(i, step, 1);
  ASSERT_TRUE(aside_->Copy(turn_->data(), &free, sizeof(free)).ok());
  ASSERT_TRUE(aside_->SynchronizeStatus().ok());
  Synchronize();
  std::vector<uint8_t> looks(seen->size_bytes());
  ASSERT_TRUE(streams_[0]->Copy(looks.data(), seen->data(), looks.size()).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  for (size_t i = 0; i < looks.size(); ++i) {
    const size_t step = i / (2 * kLook) % 2;
    ASSERT_EQ(looks[i], step + 1) << "byte " << i << " was another's, or of before";
  }
}

TEST_F(ExchangeTurnTest, AHolderThatNeverGivesUpIsTakenOverFromOnce) {
  Begin(77, 20'000'000);
  ASSERT_TRUE(ExchangeAwait(*streams_[1], {EndOf(1), 0}).ok());
  Synchronize();
  EXPECT_EQ(Holder(), Name(1));
  const uint64_t waited = Words(1).turn_ns;
  EXPECT_GE(waited, 20'000'000u);
  EXPECT_LT(waited, 2'000'000'000u);
  ASSERT_TRUE(ExchangeGiveTurn(*streams_[0], {EndOf(0).own}).ok());
  Synchronize();
  EXPECT_EQ(Holder(), Name(1)) << "giving up a turn that is not held takes nothing from its holder";
  ASSERT_TRUE(ExchangeGiveTurn(*streams_[1], {EndOf(1).own}).ok());
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {EndOf(0), 0}).ok());
  Synchronize();
  EXPECT_EQ(Holder(), Name(0));
  EXPECT_LT(Words(0).turn_ns, 20'000'000u);
}

TEST_F(ExchangeTurnTest, StepsWithoutATurnAndStepsThatFailedTakeNone) {
  Begin(77, 3600 * kLong, /*take_turns=*/false);
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {EndOf(0), 0}).ok());
  ASSERT_TRUE(ExchangeGiveTurn(*streams_[0], {EndOf(0).own}).ok());
  Synchronize();
  EXPECT_EQ(Holder(), 77u);
  Begin(0, 3600 * kLong);
  ExchangeEnd late = EndOf(0);
  late.deadline_ns = 10'000'000;
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {late, 2000}).ok());
  Synchronize();
  EXPECT_FALSE(StatusOf(0).ok());
  EXPECT_EQ(Holder(), 0u);
}

TEST_F(ExchangeTurnTest, TheKernelThatSendsQKAndVGivesUpTheTurn) {
  constexpr int kRows = 7, kHeads = 5, kKvHeads = 2, kDim = 64, kWidth = (kHeads + 2 * kKvHeads) * kDim;
  auto qkv = *device().Allocate(kRows * kWidth * 2), out = *device().Allocate(kRows * kWidth * 2);
  ASSERT_TRUE(streams_[0]->Fill(qkv->data(), 0, qkv->size_bytes()).ok());
  Begin(0, kLong);
  ASSERT_TRUE(ExchangeAwait(*streams_[0], {EndOf(0), 0}).ok());
  Synchronize();
  EXPECT_EQ(Holder(), Name(0));
  KvAppendLaunch launch;
  launch.qkv = qkv->data();
  launch.qkv_step = kWidth;
  launch.q_out = out->data();
  launch.q_out_step = kHeads * kDim;
  launch.k_out = out->data() + kRows * kHeads * kDim * 2;
  launch.v_out = out->data() + kRows * (kHeads + kKvHeads) * kDim * 2;
  launch.k_out_step = launch.v_out_step = kKvHeads * kDim;
  launch.rows = kRows;
  launch.q_heads = kHeads;
  launch.kv_heads = kKvHeads;
  launch.layout = {kDim, kDim, KvType::kBF16};
  launch.exchange = EndOf(0);
  launch.signal_op = 1;
  ASSERT_TRUE(KvAppend(*streams_[0], launch).ok());
  Synchronize();
  EXPECT_EQ(Holder(), 0u);
  EXPECT_EQ(Sent(0), kStep[0] * kExchangeOps + 2);
}

// Rows of three peers, each with words of its own; all on one GPU.
class ExchangeFanTest : public CudaExchangeTest {
 protected:
  static constexpr int kPeers = 3, kRows = 7, kHeads = 5, kKvHeads = 2, kDim = 64;
  static constexpr int kWidth = (kHeads + 2 * kKvHeads) * kDim, kAnswer = kHeads * kDim;
  static constexpr uint64_t kDeadlineNs = 5'000'000'000;
  static constexpr ExchangeRow kRowsOf[kRows] = {{2, 0}, {0, 0}, {2, 1}, {1, 0}, {0, 1}, {2, 2}, {0, 2}};
  static constexpr int kPeerRows[kPeers] = {3, 1, 3};

  void SetUp() override {
    CudaExchangeTest::SetUp();
    if (IsSkipped()) return;
    words_ = *device().Allocate(2 * kPeers * sizeof(ExchangeWords));
    slots_ = *device().Allocate(kPeers * kRows * kWidth * 2);
    answers_ = *device().Allocate(kPeers * kRows * kAnswer * 2);
    fan_ = *device().Allocate(sizeof(ExchangeFan) + sizeof(kRowsOf));
    ASSERT_TRUE(streams_[0]->Fill(words_->data(), 0, words_->size_bytes()).ok());
    ASSERT_TRUE(streams_[0]->Fill(slots_->data(), 0, slots_->size_bytes()).ok());
  }
  ExchangeEnd EndOf(int peer, int side) {
    auto* words = reinterpret_cast<ExchangeWords*>(words_->data()) + 2 * peer;
    return {words + side, words + 1 - side, kDeadlineNs};
  }
  std::byte* Slot(int peer) { return slots_->data() + peer * kRows * kWidth * 2; }
  void Begin(uint64_t step, uint64_t deadline_ns = kDeadlineNs, ExchangeTurn* turn = nullptr) {
    ExchangeFan fan;
    fan.count = kPeers;
    for (int p = 0; p < kPeers; ++p) {
      fan.peers[p] = {EndOf(p, 0), Slot(p), Slot(p) + kPeerRows[p] * kHeads * kDim * 2,
                      answers_->data() + p * kRows * kAnswer * 2, kPeerRows[p]};
      fan.peers[p].end.deadline_ns = deadline_ns;
      const uint64_t begin[8] = {step * kExchangeOps, 0, 0, 0, 0, 0, 0, reinterpret_cast<uint64_t>(turn)};
      for (int side = 0; side < 2; ++side)
        ASSERT_TRUE(streams_[0]->Copy(&EndOf(p, side).own->step, begin, sizeof(begin)).ok());
    }
    ASSERT_TRUE(streams_[0]->Copy(fan_->data(), &fan, sizeof(fan)).ok());
    ASSERT_TRUE(streams_[0]->Copy(fan_->data() + sizeof(fan), kRowsOf, sizeof(kRowsOf)).ok());
    ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  }
  const ExchangeFan* fan() { return reinterpret_cast<const ExchangeFan*>(fan_->data()); }
  const ExchangeRow* rows() { return reinterpret_cast<const ExchangeRow*>(fan_->data() + sizeof(ExchangeFan)); }
  ExchangeWords WordsOf(int peer, int side) {
    ExchangeWords words;
    EXPECT_TRUE(streams_[0]->Copy(&words, EndOf(peer, side).own, sizeof(words)).ok());
    EXPECT_TRUE(streams_[0]->SynchronizeStatus().ok());
    return words;
  }

  std::unique_ptr<Buffer> slots_, answers_, fan_;
};

TEST_F(ExchangeFanTest, EachPeerGetsItsRowsOneBelowTheOtherAndAllAreTold) {
  std::vector<uint16_t> values(kRows * kWidth);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3f00 + i % 1019);
  auto qkv = *device().Allocate(values.size() * 2);
  ASSERT_TRUE(streams_[0]->Copy(qkv->data(), values.data(), values.size() * 2).ok());
  Begin(4);
  KvAppendLaunch launch;
  launch.qkv = qkv->data();
  launch.qkv_step = kWidth;
  launch.q_out_step = kHeads * kDim;
  launch.k_out_step = launch.v_out_step = kKvHeads * kDim;
  launch.rows = kRows;
  launch.q_heads = kHeads;
  launch.kv_heads = kKvHeads;
  launch.layout = {kDim, kDim, KvType::kBF16};
  launch.signal_op = 6;
  launch.fan = fan();
  EXPECT_TRUE(absl::IsInvalidArgument(KvAppend(*streams_[0], launch))) << "whose rows are they?";
  launch.fan_rows = rows();
  ASSERT_TRUE(KvAppend(*streams_[0], launch).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  for (int p = 0; p < kPeers; ++p) {
    std::vector<uint16_t> came(kRows * kWidth);
    ASSERT_TRUE(streams_[0]->Copy(came.data(), Slot(p), came.size() * 2).ok());
    ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
    // q of its rows, then k, then v.
    std::vector<uint16_t> expected;
    for (const auto& [first, count] :
         {std::pair{0, kHeads * kDim}, {kHeads * kDim, kKvHeads * kDim}, {(kHeads + kKvHeads) * kDim, kKvHeads * kDim}})
      for (int row = 0; row < kRows; ++row)
        for (int i = 0; kRowsOf[row].peer == p && i < count; ++i) expected.push_back(values[row * kWidth + first + i]);
    expected.resize(came.size());
    EXPECT_EQ(came, expected) << "peer " << p;
    EXPECT_EQ(WordsOf(p, 1).arrived, 4 * kExchangeOps + 7);
    EXPECT_EQ(WordsOf(p, 0).blocks_done, 0u);
  }
}

TEST_F(ExchangeFanTest, TheStepGoesOnWhenTheLastPeerHasAnsweredWithAllRowsInOrder) {
  std::vector<uint16_t> answers(kPeers * kRows * kAnswer);
  for (size_t i = 0; i < answers.size(); ++i) answers[i] = static_cast<uint16_t>(i % 65521);
  ASSERT_TRUE(streams_[0]->Copy(answers_->data(), answers.data(), answers.size() * 2).ok());
  auto out = *device().Allocate(kRows * kAnswer * 2);
  Begin(5);
  ASSERT_TRUE(ExchangeAwaitAll(*streams_[0], {fan(), 2}).ok());
  ASSERT_TRUE(ExchangeGather(*streams_[0], {fan(), rows(), out->data(), kAnswer * 2, kRows}).ok());
  for (const int p : {1, 2, 0}) ASSERT_TRUE(ExchangeSignal(*streams_[1], {EndOf(p, 1), 2}).ok());
  std::vector<uint16_t> came(kRows * kAnswer), expected;
  ASSERT_TRUE(streams_[0]->Copy(came.data(), out->data(), came.size() * 2).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  for (const ExchangeRow& row : kRowsOf) {
    const auto first = answers.begin() + (row.peer * kRows + row.row) * kAnswer;
    expected.insert(expected.end(), first, first + kAnswer);
  }
  EXPECT_EQ(came, expected);
  for (int p = 0; p < kPeers; ++p) EXPECT_EQ(WordsOf(p, 0).failure, 0u);
}

TEST_F(ExchangeFanTest, WhereOnePeerDoesNotAnswerTheOthersAreToldAndNotBlamed) {
  Begin(6, 30'000'000);
  ASSERT_TRUE(ExchangeSignal(*streams_[1], {EndOf(0, 1), 3}).ok());
  ASSERT_TRUE(ExchangeSignal(*streams_[1], {EndOf(2, 1), 3}).ok());
  ASSERT_TRUE(ExchangeAwaitAll(*streams_[0], {fan(), 3}).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(DecodeFailure(WordsOf(1, 0).failure).reason, ExchangeReason::kDeadline);
  for (const int p : {0, 2}) {
    EXPECT_EQ(DecodeFailure(WordsOf(p, 0).failure).reason, ExchangeReason::kElsewhere);
    EXPECT_GE(WordsOf(p, 1).given_up, 6 * kExchangeOps + 1) << "it need not wait for its own deadline";
  }
  // Nothing more of the step is sent to any peer.
  ASSERT_TRUE(ExchangeSignal(*streams_[0], {EndOf(0, 0), 4}).ok());
  EXPECT_EQ(WordsOf(0, 1).arrived, 0u);
  ASSERT_TRUE(ExchangeAwaitAll(*streams_[0], {fan(), 4}).ok());  // returns at once
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(ExchangeStatus(WordsOf(0, 0).failure).message(), "attention op 3: another GPU of the step did not answer");
}

TEST_F(ExchangeFanTest, AStepOfSeveralPeersTakesOneTurnWhenTheLastHasAnswered) {
  auto memory = *device().Allocate(sizeof(ExchangeTurn));
  auto* const turn = reinterpret_cast<ExchangeTurn*>(memory->data());
  const ExchangeTurn free{0, 5'000'000'000};
  const auto holder = [&] {
    uint64_t now = 0;
    EXPECT_TRUE(streams_[1]->Copy(&now, &turn->holder, sizeof(now)).ok());
    EXPECT_TRUE(streams_[1]->SynchronizeStatus().ok());
    return now;
  };
  ASSERT_TRUE(streams_[0]->Copy(memory->data(), &free, sizeof(free)).ok());
  Begin(7, kDeadlineNs, turn);
  ASSERT_TRUE(ExchangeAwaitAll(*streams_[0], {fan(), 2}).ok());
  const auto answer = [&](int p) {
    const uint64_t number = 7 * kExchangeOps + 3;
    ASSERT_TRUE(streams_[1]->Copy(&EndOf(p, 0).own->arrived, &number, sizeof(number)).ok());
    ASSERT_TRUE(streams_[1]->SynchronizeStatus().ok());
  };
  for (const int p : {0, 2}) answer(p);
  absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(holder(), 0u) << "one has not answered";
  answer(1);
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(holder(), 7 * kExchangeOps + 1);
  ASSERT_TRUE(ExchangeGiveTurn(*streams_[0], {nullptr, fan()}).ok());
  ASSERT_TRUE(streams_[0]->SynchronizeStatus().ok());
  EXPECT_EQ(holder(), 0u);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
