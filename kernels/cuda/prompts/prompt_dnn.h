#pragma once
#include <cstddef>

#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// backend_abi.h's dnn_*: attention over whole prompts by cuDNN, opened at run time. Each returns 0, a cudaError_t,
// kDnnNotFound or kDnnRefused. A dnn is a cuDNN handle and a workspace: one call at a time, DnnClose once and last.
// A plan is immutable; its owner releases it once when nothing runs it any more.

int DnnOpen(int device, void** dnn, char* text, size_t text_bytes);
int DnnClose(void* dnn);
int DnnPlan(void* dnn, const PromptCall* call, void** plan);
int DnnPlanRelease(void* plan);
int DnnPrompts(void* dnn, void* plan, const PromptCall* call, void* stream);

}  // namespace dovetail::kernels::cuda
