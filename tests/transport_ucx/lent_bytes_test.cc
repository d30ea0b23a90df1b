#include "transport/lent_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/transport_ucx/ucx_nodes.h"

// What a node lends to its port stays mapped until the port has read it, whatever becomes of the node.

namespace dovetail::transport::ucx {
namespace {

inline constexpr size_t kTensorBytes = 8 << 20;  // beyond what a socket and UCX take at once
inline constexpr int kTensors = 6;

// A node's buffer: who reads it after its end reads other bytes.
class Lendable {
 public:
  explicit Lendable(uint32_t seed) : bytes_(Pattern(kTensorBytes, seed)) {}
  ~Lendable() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0xdb}); }
  const std::byte* data() const { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

using Watch = std::vector<std::weak_ptr<Lendable>>;

// Sends tensors of a node that ends at once, and watches what it lent.
void SendAsANodeThatEnds(TestNode& from, const TestNode& to, Watch& lent) {
  for (int i = 0; i < kTensors; ++i) {
    const auto buffer = std::make_shared<Lendable>(i);
    lent.push_back(buffer);
    const auto header = HeaderOf(proto::FrameType::kQuery, i, 0, kTensorBytes);
    ASSERT_TRUE(from.port->SendTensor(to.id(), header, Lend(buffer, kTensorBytes)).ok());
  }
}

size_t StillLent(const Watch& lent) {
  return std::count_if(lent.begin(), lent.end(), [](const auto& buffer) { return !buffer.expired(); });
}

class LentBytesTest : public ::testing::TestWithParam<Way> {
 protected:
  static UcxOptions Options(uint32_t node) { return OptionsFor(node, GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Ways, LentBytesTest,
                         ::testing::Values(Way{Lanes::kShm, false}, Way{Lanes::kShm, true}, Way{Lanes::kTcp, false}),
                         [](const auto& info) { return NameOfWay(info.param); });

TEST_P(LentBytesTest, WhatANodeSentBeforeItEndedArrivesAsItWasAndIsGivenBack) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Connect(a, b));
  Watch lent;
  SendAsANodeThatEnds(a, b, lent);
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == kTensors; }));
  for (int i = 0; i < kTensors; ++i) EXPECT_TRUE(b.collector.frames[i].bytes == Pattern(kTensorBytes, i)) << i;
  EXPECT_EQ(StillLent(lent), 0u);
}

TEST_P(LentBytesTest, FramesThatWaitForAPeerAreLentUntilThePortEnds) {
  auto a = std::make_unique<TestNode>(Options(1));
  TestNode b(Options(2));
  ASSERT_TRUE(Add(*a, b).ok());  // b does not know of a: nothing leaves
  Watch lent;
  SendAsANodeThatEnds(*a, b, lent);
  EXPECT_EQ(StillLent(lent), kTensors);
  a.reset();
  EXPECT_EQ(StillLent(lent), 0u);
}

TEST_P(LentBytesTest, WhatIsNeverSentIsGivenBackWhenItsPeerIsRemoved) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Add(a, b).ok());
  Watch lent;
  SendAsANodeThatEnds(a, b, lent);
  ASSERT_TRUE(a.port->RemovePeer(b.id()).ok());
  EXPECT_EQ(StillLent(lent), 0u);
}

}  // namespace
}  // namespace dovetail::transport::ucx
