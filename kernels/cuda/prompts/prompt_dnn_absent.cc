#include <cstdio>

#include "kernels/cuda/prompts/prompt_dnn.h"

// What stands for prompt_dnn.cc where cuDNN's headers were not found (cmake/DovetailCudnn.cmake).

namespace dovetail::kernels::cuda {

int DnnOpen(int, void** dnn, char* text, size_t text_bytes) {
  *dnn = nullptr;
  std::snprintf(text, text_bytes, "this build has no cuDNN; scripts/fetch_cudnn_frontend gets its headers");
  return kDnnNotFound;
}
int DnnClose(void*) { return 0; }
int DnnPlan(void*, const PromptCall*, void**) { return kDnnNotFound; }
int DnnPlanRelease(void*) { return 0; }
int DnnPrompts(void*, void*, const PromptCall*, void*) { return kDnnNotFound; }

}  // namespace dovetail::kernels::cuda
