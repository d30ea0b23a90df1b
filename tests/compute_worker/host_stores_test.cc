#include "compute_worker/cuda/host_stores.h"

#include <atomic>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::compute {
namespace {

class HostStoresTest : public kernels::cuda::testing::CudaTest {
 protected:
  static constexpr int64_t kRowBytes = 4 * 16 * 2;

  // Four query heads of 16 elements.
  std::unique_ptr<HostStores> Make() {
    proto::AttentionTable table;
    proto::SoftmaxSpec spec;
    spec.query_heads = 4;
    spec.value_dim = 16;
    table.views.push_back(spec);
    auto made = HostStores::Create(table, device());
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }
  // As a kernel does when it has stored op's q, k and v.
  static void Store(const HostStores& stores, uint64_t step, int op) {
    std::atomic_ref<uint64_t>(stores.end().peer->arrived)
        .store(step * kernels::cuda::kExchangeOps + static_cast<uint64_t>(op) + 1, std::memory_order_release);
  }
};

TEST_F(HostStoresTest, WhatAnOpStoredIsThereAndThatOfTheNextIsNot) {
  const auto stores = Make();
  ASSERT_TRUE(stores->Begin(stream(), StepId(7)).ok());
  EXPECT_FALSE(stores->Arrived(0));
  Store(*stores, 7, 0);
  EXPECT_TRUE(stores->Arrived(0));
  EXPECT_FALSE(stores->Arrived(1));
}

// A scheduler that has started again counts steps from 1, and the memory may be that of an earlier session.
TEST_F(HostStoresTest, NumbersOfStepsThatWereCountedHigherAreNotTakenForThisStep) {
  const auto stores = Make();
  ASSERT_TRUE(stores->Begin(stream(), StepId(1000)).ok());
  Store(*stores, 1000, 3);
  ASSERT_TRUE(stores->Begin(stream(), StepId(1)).ok());
  EXPECT_FALSE(stores->Arrived(0));
  Store(*stores, 1, 0);
  EXPECT_TRUE(stores->Arrived(0));
}

TEST_F(HostStoresTest, AnAnswerMayGoAsSoonAsItsFetchIsEnqueued) {
  const auto stores = Make();
  ASSERT_TRUE(stores->Begin(stream(), StepId(1)).ok());
  std::vector<uint8_t> o(3 * kRowBytes);
  for (size_t i = 0; i < o.size(); ++i) o[i] = static_cast<uint8_t>(i * 7 + 1);
  const std::vector<uint8_t> expected = o;
  const auto to = Empty(o.size());
  ASSERT_TRUE(stores->Fetch(stream(), reinterpret_cast<const std::byte*>(o.data()), 3, kRowBytes, to->data()).ok());
  o.assign(o.size(), 0);
  ASSERT_TRUE(stream().SynchronizeStatus().ok());
  EXPECT_EQ(Download<uint8_t>(*to), expected);
}

}  // namespace
}  // namespace dovetail::compute
