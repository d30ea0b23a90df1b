#pragma once
#include <algorithm>

namespace dovetail::cli {

// The worker processes of one machine.
// Threads: plain values and pure functions.
struct WorkersOfMachine {
  int compute = 1;
  bool layers_on_gpu = false;
  int attention_on_cpu = 0;
  int attention_on_gpu = 0;
};

// A worker on a GPU keeps one thread busy, which launches and polls; another has frames, logs and the processes that
// serve.
inline constexpr int kCoresOfGpuWorker = 2;

// How many threads each of the CPU's attention workers computes with, at least 1. Dense layers on the CPU share the
// cores with attention, one half each. Where layers run on GPUs, attention has every core that no worker on a GPU
// takes.
inline int AttentionThreads(int cores, const WorkersOfMachine& workers) {
  if (!workers.layers_on_gpu) return std::max(1, cores / (2 * (workers.attention_on_cpu + workers.attention_on_gpu)));
  const int left = cores - kCoresOfGpuWorker * (workers.compute + workers.attention_on_gpu);
  return std::max(1, left / std::max(1, workers.attention_on_cpu));
}

// Whether workers on the CPU have to share cores with each other or with those on GPUs.
inline bool CoresAreShort(int cores, const WorkersOfMachine& workers) {
  if (!workers.layers_on_gpu) return false;  // they take turns
  const int gpu = kCoresOfGpuWorker * (workers.compute + workers.attention_on_gpu);
  return workers.attention_on_cpu > 0 && cores - gpu < workers.attention_on_cpu;
}

}  // namespace dovetail::cli
