// Causal attention of whole prompts by cuDNN (cuda_prompts.h), 32 query and 8 KV heads of 128, bf16: microseconds of a
// layer, without and with log-sum-exps, and TFLOP/s of the lower triangle; of lengths that are no plan's once with the
// plan that they share, and once with the one that they have when they came often. The peer is PyTorch's
// scaled_dot_product_attention with the cuDNN backend (bench/kernels_cuda/prompts_peer.py).
//   prompts_cuda_bench

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_prompts.h"

namespace {

using namespace dovetail;
using namespace dovetail::kernels;
using namespace dovetail::kernels::cuda;

using bench::Must;

constexpr CudaPrompts::Shape kShape{32, 8, 128, 128, WireType::kBF16, 0.08838834764f};

class Bench {
 public:
  Bench() : device_(Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = 0}))) {
    stream_ = Must(device_->CreateCudaStream());
    prompts_ = Must(CudaPrompts::Create(*device_));
  }

  void Time(int batch, int tokens) {
    const int64_t rows = int64_t{batch} * tokens;
    q_ = Random(rows * 32 * 128), k_ = Random(rows * 8 * 128), v_ = Random(rows * 8 * 128);
    o_ = Random(rows * 32 * 128);
    for (const bool with_sums : {false, true}) {
      std::vector<CudaPrompts::Item> items;
      for (int i = 0; i < batch; ++i) {
        const int64_t row = int64_t{i} * tokens;
        items.push_back({tokens, row * 32 * 128, row * 8 * 128, row * 8 * 128, row * 32 * 128, with_sums ? 0 : -1});
      }
      double plan_ms = 0;
      for (int came = 1; came <= PromptSizes::kOften; ++came) {
        CudaPrompts::Batch prepared(*device_);
        const auto since = std::chrono::steady_clock::now();
        if (!Must(prompts_->Prepare(*stream_, kShape, items, prepared))) {
          std::printf("%d x %d: refused\n", batch, tokens);
          return;
        }
        plan_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
        if (came > 1 && came < PromptSizes::kOften) continue;
        const double us = MicrosecondsOf(prepared), flops = 4.0 * batch * 32 * 128 * tokens * (tokens + 1.0) / 2;
        std::printf("%3d x %5d %-12s time %d %9.1f us %7.1f TFLOP/s, plan %.1f ms\n", batch, tokens,
                    with_sums ? "log-sum-exp" : "", came, us, flops / us * 1e-6, plan_ms);
      }
    }
  }

 private:
  double MicrosecondsOf(const CudaPrompts::Batch& prepared) {
    std::vector<double> times;
    CudaEvent begin = Must(device_->CreateEvent(true)), end = Must(device_->CreateEvent(true));
    for (int i = 0; i < 15; ++i) {
      Must(stream_->Record(begin));
      for (int run = 0; run < 4; ++run)
        Must(prompts_->Run(*stream_, kShape, prepared, q_->data(), k_->data(), v_->data(), o_->data()));
      Must(stream_->Record(end));
      Must(stream_->SynchronizeStatus());
      times.push_back(Must(end.MillisecondsSince(begin)) * 1000.0 / 4);
    }
    std::sort(times.begin() + 3, times.end());
    return times[9];
  }
  std::unique_ptr<Buffer> Random(int64_t elements) {
    auto memory = Must(device_->Allocate(elements * 2));
    RandomLaunch random;
    random.out = memory->data();
    random.type = WireType::kBF16;
    random.range = 1;
    random.seed = ++seed_;
    random.count = elements;
    Must(FillRandom(*stream_, random));
    Must(stream_->SynchronizeStatus());
    return memory;
  }

  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaPrompts> prompts_;
  std::unique_ptr<Buffer> q_, k_, v_, o_;
  uint64_t seed_ = 0;
};

}  // namespace

int main() {
  Bench bench;
  for (const auto& [batch, tokens] : {std::pair{1, 2048}, {2, 1024}, {1, 8192}, {1, 1000}, {1, 1984}, {4, 4096}})
    bench.Time(batch, tokens);
  return 0;
}
