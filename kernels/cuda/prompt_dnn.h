#pragma once
#include <cstddef>

#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// backend_abi.h's dnn_*: attention over whole prompts by cuDNN, opened at run time. A plan is made once per shape and
// kept, the longest unused of kMostDnnPlans goes. Each returns 0, a cudaError_t or kDnnRefused; calls of one
// handle may come from any thread (a mutex of the handle), DnnClose once and last.
inline constexpr size_t kMostDnnPlans = 96;

int DnnOpen(int device, void** dnn, char* text, size_t text_bytes);
int DnnClose(void* dnn);
int DnnPrompts(void* dnn, const PromptCall* call, void* stream);

}  // namespace dovetail::kernels::cuda
