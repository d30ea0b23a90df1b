#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/prompts/cuda_prompts.h"
#include "tests/kernels_cuda/fake_gpu.h"

// Which plans are asked for and which are run, of a cuDNN that exists in a test only.

namespace dovetail::kernels::cuda {
namespace {

// A plan is the call that it was made for.
struct FakeDnn {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<PromptCall> made;  // guarded, as what follows
  bool holds_even = false;       // plans for even prompts are not done before this ends
  bool refuses_even = false;
  std::vector<PromptCall> run;
  int alive = 0;
};
FakeDnn* g_dnn = nullptr;

int MakeFakePlan(void*, const PromptCall* call, void** plan) {
  std::unique_lock lock(g_dnn->mutex);
  g_dnn->made.push_back(*call);
  if (call->even != 0 && g_dnn->refuses_even) return kDnnRefused;
  g_dnn->changed.wait(lock, [&] { return call->even == 0 || !g_dnn->holds_even; });
  *plan = new PromptCall(*call);
  return ++g_dnn->alive, 0;
}

Backend BackendWithFakeDnn() {
  Backend backend = testing::FakeBackend();
  backend.dnn_open = [](int, void** dnn, char*, size_t) { return *dnn = g_dnn, 0; };
  backend.dnn_close = [](void*) { return 0; };
  backend.dnn_plan = MakeFakePlan;
  backend.dnn_plan_release = [](void* plan) {
    const std::lock_guard lock(g_dnn->mutex);
    delete static_cast<PromptCall*>(plan);
    return --g_dnn->alive, 0;
  };
  backend.dnn_prompts = [](void*, void* plan, const PromptCall* call, void*) {
    const auto& made = *static_cast<const PromptCall*>(plan);
    if (call->batch != made.batch || call->most_tokens != made.most_tokens || call->even != made.even ||
        call->with_sums != made.with_sums)
      return kDnnRefused;
    return g_dnn->run.push_back(*call), 0;
  };
  return backend;
}

class PromptPlans : public ::testing::Test {
 protected:
  void SetUp() override {
    g_dnn = &dnn_;
    testing::g_gpu = &gpu_;
    device_ = *CudaDevice::Create(std::make_shared<const CudaLibrary>(&backend_), {.index = 0});
    prompts_ = *CudaPrompts::Create(*device_);
    stream_ = *device_->CreateCudaStream();
  }
  void TearDown() override {
    ASSERT_TRUE(stream_->SynchronizeStatus().ok());  // uploads
    prompts_.reset(), stream_.reset(), device_.reset();
    EXPECT_EQ(dnn_.alive, 0) << "every plan is released";
  }

  // Prepares and runs one prompt; gives the call.
  PromptCall Attend(int tokens) {
    const CudaPrompts::Item item{tokens};
    CudaPrompts::Batch batch(*device_);
    const auto taken = prompts_->Prepare(*stream_, kShape, {&item, 1}, batch);
    EXPECT_TRUE(taken.ok() && *taken) << taken.status();
    char rows[1];
    EXPECT_TRUE(prompts_->Run(*stream_, kShape, batch, rows, rows, rows, rows).ok());
    EXPECT_EQ(batch.has_own_plan(), dnn_.run.back().even != 0);
    EXPECT_TRUE(stream_->SynchronizeStatus().ok());  // the upload, before its memory goes
    return dnn_.run.back();
  }
  size_t Made() {
    const std::lock_guard lock(dnn_.mutex);
    return dnn_.made.size();
  }
  size_t EvenPlansMade() {
    const std::lock_guard lock(dnn_.mutex);
    return std::count_if(dnn_.made.begin(), dnn_.made.end(), [](const PromptCall& call) { return call.even != 0; });
  }
  void HoldEven(bool holds) {
    const std::lock_guard lock(dnn_.mutex);
    dnn_.holds_even = holds;
    dnn_.changed.notify_all();
  }
  void AwaitOwnPlan(int tokens) { AwaitPlan({8, 2, 128, 128, WireType::kBF16, 0.1f, 1, tokens, false, true}); }
  void AwaitPlan(const PromptSize& size) {
    while (device_->prompt_planner().Find(size).state == PromptPlanner::State::kAsked) std::this_thread::yield();
  }

  static constexpr CudaPrompts::Shape kShape{8, 2, 128, 128, WireType::kBF16, 0.1f};
  FakeDnn dnn_;
  testing::FakeGpu gpu_;
  const Backend backend_ = BackendWithFakeDnn();
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaPrompts> prompts_;
  std::unique_ptr<CudaStream> stream_;
};

TEST_F(PromptPlans, ASizeThatComesAgainHasItsOwnFromWhenItIsMade) {
  HoldEven(true);
  for (int came = 0; came < 5; ++came) {  // nobody waits for the one that is being made
    const PromptCall call = Attend(1000);
    EXPECT_EQ(call.even, 0);
    EXPECT_GE(call.most_tokens, 1000);
  }
  HoldEven(false);
  AwaitOwnPlan(1000);
  const PromptCall call = Attend(1000);
  EXPECT_EQ(call.even, 1);
  EXPECT_EQ(call.most_tokens, 1000);
  EXPECT_EQ(EvenPlansMade(), 1u);
}

TEST_F(PromptPlans, ASizeThatCameOnceHasNone) {
  for (const int tokens : {1000, 1001, 1002, 128, 2048}) EXPECT_EQ(Attend(tokens).even, 0);
  EXPECT_EQ(Attend(9000).even, 0);
  EXPECT_EQ(EvenPlansMade(), 0u);
}

TEST_F(PromptPlans, OneThatIsRefusedIsNotAskedForAgainAndTheSharedOneServes) {
  dnn_.refuses_even = true;
  for (const int tokens : {128, 1000}) {
    Attend(tokens), Attend(tokens);
    AwaitOwnPlan(tokens);
    for (int came = 0; came < 5; ++came) EXPECT_EQ(Attend(tokens).even, 0);
  }
  EXPECT_EQ(EvenPlansMade(), 2u);
}

TEST_F(PromptPlans, LengthsShareFewPlansAndThoseThatAreExpectedAreMadeAhead) {
  CudaPrompts::Expect(*device_, kShape);
  CudaPrompts::Expect(*device_, kShape);
  for (const auto& [batch, tokens] : {std::pair{8, 2048}, {8, 8192}, {32, 2048}}) {
    for (const bool with_sums : {false, true})
      AwaitPlan({8, 2, 128, 128, WireType::kBF16, 0.1f, batch, tokens, with_sums, false});
  }
  EXPECT_EQ(Made(), 6u) << "each once";
  EXPECT_EQ(Attend(1000).batch, 8) << "until its own is made";
  const PromptSize rounded{8, 2, 128, 128, WireType::kBF16, 0.1f, 1, 1024, false, false};
  AwaitPlan(rounded);
  EXPECT_EQ(Attend(1001).most_tokens, 1024);
  EXPECT_EQ(Attend(900).batch, 1);
  for (int tokens = 48; tokens <= 8192; ++tokens) Attend(tokens);
  EXPECT_LE(Made(), 6u + 15u) << "of one prompt: powers of two, and one and a half of them";
}

TEST_F(PromptPlans, AShapeThatNobodyExpectedWaitsForOnePlanOnly) {
  EXPECT_EQ(Attend(1000).most_tokens, 2048);
  EXPECT_EQ(Attend(2000).most_tokens, 2048);
  EXPECT_EQ(Attend(3000).most_tokens, 8192);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
