// Times a decode step of the Llama-3-8B shape whose dense layers run on one GPU and whose attention on another, two
// processes, one CUDA graph a side, no host between: against what each side takes alone.
//   split_step_cuda_bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "bench/exchange/split_step.h"

namespace dovetail::bench {
namespace {

constexpr int kMostRows = 64, kMostTokens = 64 * 4096 * 2 + 64 * 64;
constexpr int kWarm = 5, kTimed = 20, kRounds = 3;

using Clock = std::chrono::steady_clock;

class Bench {
 public:
  explicit Bench(TwoProcesses& processes)
      : processes_(processes),
        gpus_(processes, S::kMaxMicroBatches * slots_.bytes(), S::kMaxMicroBatches),
        numbers_(gpus_.device(), 256),
        side_(processes.rank() == 0 ? MakeDenseSide(gpus_, slots_) : MakeAttentionSide(gpus_, slots_, kMostTokens)) {}

  void Time(const SplitCase& shape) {
    const double own = TimeSteps(shape, Handing::kNone);
    const double other = Swap(own);
    const double dense = processes_.rank() == 0 ? own : other, attention = processes_.rank() == 0 ? other : own;
    const double stored = TimeSteps(shape, Handing::kStored), copied = TimeSteps(shape, Handing::kCopied);
    const double apart = TimeSteps(shape, Handing::kCopiedApart);
    if (processes_.rank() != 0) return;
    const double busier = std::max(dense, attention);
    const double alone = (dense + attention) / shape.micro_batches;  // of one micro-batch, hops aside
    const double cycle = std::max(busier, alone);
    std::printf(
        "%d x %2d rows of %4d tokens: dense %7.3f ms, attention %7.3f, one after the other %7.3f; the larger "
        "of these times stored %.3f, copied %.3f, waits apart %.3f; best %.3f ms\n",
        shape.micro_batches, shape.rows, shape.context, dense, attention, alone, stored / cycle, copied / cycle,
        apart / cycle, std::min({stored, copied, apart}));
    std::fflush(stdout);
  }

 private:
  using S = SplitShape;

  double Swap(double value) {
    const std::string other = processes_.Swap({reinterpret_cast<const char*>(&value), sizeof(value)});
    std::memcpy(&value, other.data(), sizeof(value));
    return value;
  }

  // Milliseconds of a step of all micro-batches.
  double TimeSteps(const SplitCase& shape, Handing handing) {
    const kernels::cuda::CudaGraph graph = side_->Record(shape, handing);
    const auto run = [&](int count) {
      for (int i = 0; i < count; ++i) {
        ++step_;
        for (int m = 0; m < shape.micro_batches; ++m) numbers_.Next(side_->stream(), gpus_.End(m).own, step_);
        Must(side_->stream().Launch(graph));
      }
      Must(side_->stream().SynchronizeStatus());
    };
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
      processes_.Barrier();
      run(kWarm);
      processes_.Barrier();
      const auto begin = Clock::now();
      run(kTimed);
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count() / kTimed);
    }
    for (int m = 0; m < shape.micro_batches; ++m)
      Must(kernels::cuda::ExchangeStatus(StepNumbers::Failure(side_->stream(), gpus_.End(m).own)));
    processes_.Barrier();
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  TwoProcesses& processes_;
  const SplitSlots slots_{kMostRows + 8};
  LinkedGpus gpus_;
  StepNumbers numbers_;
  std::unique_ptr<SplitSide> side_;
  uint64_t step_ = 0;
};

}  // namespace
}  // namespace dovetail::bench

int main() {
  using dovetail::bench::SplitCase;
  dovetail::bench::TwoProcesses processes;
  dovetail::bench::Bench bench(processes);
  for (const int context : {1024, 2048, 4096})
    for (const int rows : {1, 16, 64})
      for (const int micro_batches : {1, 2})
        if (rows == 64 || context == 1024) bench.Time(SplitCase{micro_batches, rows, context});
  for (const SplitCase shape : {SplitCase{2, 32, 1024}, {3, 32, 2048}, {3, 64, 2048}, {3, 64, 1024}}) bench.Time(shape);
  return 0;
}
