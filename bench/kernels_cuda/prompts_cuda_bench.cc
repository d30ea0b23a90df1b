// Causal attention of whole prompts by cuDNN (cuda_prompts.h), 32 query and 8 KV heads of 128, bf16: microseconds of a
// layer, without and with log-sum-exps, and TFLOP/s of the lower triangle; with the plan that lengths share, and with
// the one that a length has when it came again. The peer is PyTorch's scaled_dot_product_attention with the cuDNN
// backend (bench/kernels_cuda/prompts_peer.py).
//   prompts_cuda_bench               the table, and what a loop of small steps feels while plans are made
//   prompts_cuda_bench first         the first prompt of a process, when nobody expected it
//   prompts_cuda_bench first MS      when it was expected so many ms before

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/prompts/cuda_prompts.h"
#include "kernels/cuda/rows/row_ops.h"

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
    Fill(batch, tokens);
    for (const bool with_sums : {false, true}) {
      const auto items = ItemsOf(batch, tokens, with_sums);
      bool own = false;
      PromptSize last;
      for (int came = 1; came <= 1000 && !own; ++came) {
        CudaPrompts::Batch prepared(*device_);
        auto since = std::chrono::steady_clock::now();
        if (!Must(prompts_->Prepare(*stream_, kShape, items, prepared))) {
          std::printf("%d x %d: refused\n", batch, tokens);
          return;
        }
        const double prepare_ms = MillisecondsSince(since);
        since = std::chrono::steady_clock::now();
        Run(prepared);
        const double run_ms = MillisecondsSince(since);
        own = prepared.has_own_plan();
        if (const PromptSize plan = prepared.plan_size(); plan != std::exchange(last, plan)) {
          const double us = MicrosecondsOf(prepared), flops = 4.0 * batch * 32 * 128 * tokens * (tokens + 1.0) / 2;
          std::printf("%3d x %5d %-11s %-6s %2d x %5d time %3d %9.1f us %7.1f TFLOP/s, prepare %.2f ms, run %.2f ms\n",
                      batch, tokens, with_sums ? "log-sum-exp" : "", own ? "own" : "shared", plan.batch,
                      plan.most_tokens, came, us, flops / us * 1e-6, prepare_ms, run_ms);
        }
        Must(stream_->SynchronizeStatus());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a step has more to do than this
      }
    }
  }

  void First(int expected_ms_ago) {
    Fill(1, 1984);
    if (expected_ms_ago >= 0) {
      CudaPrompts::Expect(*device_, kShape);
      std::this_thread::sleep_for(std::chrono::milliseconds(expected_ms_ago));
    }
    for (const bool with_sums : {false, true}) {
      const auto since = std::chrono::steady_clock::now();
      CudaPrompts::Batch prepared(*device_);
      if (!Must(prompts_->Prepare(*stream_, kShape, ItemsOf(1, 1984, with_sums), prepared))) std::printf("refused\n");
      Run(prepared);
      Must(stream_->SynchronizeStatus());
      std::printf("first prompt %s, expected %d ms before: %.1f ms\n", with_sums ? "with log-sum-exps" : "",
                  expected_ms_ago, MillisecondsSince(since));
    }
  }

  // A graph of small work, launched and awaited again and again, while nothing else goes on and while plans are made.
  void Loop() {
    Fill(1, 4096);
    Must(stream_->BeginCapture());
    for (int i = 0; i < 200; ++i) Must(stream_->Fill(o_->data() + (i << 16), 0, 1 << 16));
    const CudaGraph graph = Must(stream_->EndCapture());
    const auto steps = [&](const char* what, auto goes_on) {
      std::vector<double> ms;
      do {
        const auto since = std::chrono::steady_clock::now();
        Must(stream_->Launch(graph));
        Must(stream_->SynchronizeStatus());
        ms.push_back(MillisecondsSince(since));
      } while (goes_on());
      std::sort(ms.begin(), ms.end());
      const size_t n = ms.size();
      std::printf("steps %-28s n %5zu median %.3f p99 %.3f worst %.2f %.2f %.2f ms\n", what, n, ms[n / 2],
                  ms[n * 99 / 100], ms[n - 1], ms[n - std::min<size_t>(n, 2)], ms[n - std::min<size_t>(n, 3)]);
    };
    PromptPlanner& planner = device_->prompt_planner();
    for (int round = 0; round < 2; ++round) {
      const auto since = std::chrono::steady_clock::now();
      steps("alone", [&] { return MillisecondsSince(since) < 400; });
      for (int i = 0; i < 10; ++i) {
        const int tokens = 700 + 31 * (10 * round + i);
        const PromptSize size{32, 8, 128, 128, WireType::kBF16, kShape.scale, 1, tokens, false, true};
        planner.Ask(size);
        steps("while a plan is made", [&] { return planner.Find(size).state == PromptPlanner::State::kAsked; });
      }
    }
    for (const int dim : {64, 96}) {
      const PromptSize size{32, 8, dim, dim, WireType::kBF16, kShape.scale, 8, 2048, false, false};
      planner.Ask(size);
      steps("while a new kind is made", [&] { return planner.Find(size).state == PromptPlanner::State::kAsked; });
    }
  }

 private:
  static double MillisecondsSince(std::chrono::steady_clock::time_point since) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
  }
  static std::vector<CudaPrompts::Item> ItemsOf(int batch, int tokens, bool with_sums) {
    std::vector<CudaPrompts::Item> items;
    for (int i = 0; i < batch; ++i) {
      const int64_t row = int64_t{i} * tokens;
      items.push_back({tokens, row * 32 * 128, row * 8 * 128, row * 8 * 128, row * 32 * 128, with_sums ? 0 : -1});
    }
    return items;
  }
  void Fill(int batch, int tokens) {
    const int64_t rows = int64_t{batch} * tokens;
    q_ = Random(rows * 32 * 128), k_ = Random(rows * 8 * 128), v_ = Random(rows * 8 * 128);
    o_ = Random(rows * 32 * 128);
  }
  void Run(const CudaPrompts::Batch& prepared) {
    Must(prompts_->Run(*stream_, kShape, prepared, q_->data(), k_->data(), v_->data(), o_->data()));
  }
  double MicrosecondsOf(const CudaPrompts::Batch& prepared) {
    std::vector<double> times;
    CudaEvent begin = Must(device_->CreateEvent(true)), end = Must(device_->CreateEvent(true));
    for (int i = 0; i < 15; ++i) {
      Must(stream_->Record(begin));
      for (int run = 0; run < 4; ++run) Run(prepared);
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

int main(int argc, char** argv) {
  Bench bench;
  if (argc > 1 && std::string(argv[1]) == "first") return bench.First(argc > 2 ? std::atoi(argv[2]) : -1), 0;
  for (const auto& [batch, tokens] :
       {std::pair{1, 2048}, {2, 1024}, {1, 8192}, {1, 1000}, {1, 1984}, {4, 4096}, {1, 100}, {1, 512}, {8, 100}})
    bench.Time(batch, tokens);
  bench.Loop();
  return 0;
}
