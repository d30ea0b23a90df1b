#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_prompts.h"
#include "tests/kernels_cuda/fake_gpu.h"

// Which plans are asked for, of a cuDNN that has none for prompts that are alike.

namespace dovetail::kernels::cuda {
namespace {

std::vector<PromptCall> g_asked;

Backend BackendThatRefusesEvenPrompts() {
  Backend backend = testing::FakeBackend();
  backend.dnn_open = [](int, void** dnn, char*, size_t) { return *dnn = &g_asked, 0; };
  backend.dnn_close = [](void*) { return 0; };
  backend.dnn_prompts = [](void*, const PromptCall* call, void*) {
    g_asked.push_back(*call);
    return call->even != 0 ? kDnnRefused : 0;
  };
  return backend;
}

TEST(PromptPlans, OneThatIsRefusedIsNotAskedForAgainAndTheSharedOneServes) {
  const Backend backend = BackendThatRefusesEvenPrompts();
  testing::FakeGpu gpu;
  testing::g_gpu = &gpu;
  const auto device = CudaDevice::Create(std::make_shared<const CudaLibrary>(&backend), {.index = 0});
  ASSERT_TRUE(device.ok()) << device.status();
  const auto prompts = CudaPrompts::Create(**device);
  const auto stream = (*device)->CreateCudaStream();
  ASSERT_TRUE(prompts.ok() && stream.ok());
  const CudaPrompts::Shape shape{8, 2, 128, 128, WireType::kBF16, 0.1f};
  for (const auto& [tokens, shared] : {std::pair{128, 128}, {1000, 1024}}) {  // as long as a plan, and not
    g_asked.clear();
    CudaPrompts::Batch batch(**device);
    for (int came = 1; came <= PromptSizes::kOften + 5; ++came) {
      const CudaPrompts::Item item{tokens};
      const auto taken = (*prompts)->Prepare(**stream, shape, {&item, 1}, batch);
      ASSERT_TRUE(taken.ok() && *taken) << tokens << " tokens, time " << came;
      EXPECT_FALSE(batch.has_own_plan());
      EXPECT_EQ(g_asked.back().most_tokens, shared);
    }
    EXPECT_EQ(g_asked.size(), PromptSizes::kOften + 5 + 1u) << "once for its own";
    ASSERT_TRUE((*stream)->SynchronizeStatus().ok());  // the batch's upload
  }
}

}  // namespace
}  // namespace dovetail::kernels::cuda
