// Times the exchange of a layer between two GPUs, in two processes, inside one CUDA graph of 32 layers a side: q, k and
// v of a Llama-3-8B layer to the other GPU, o back, no host between. Then: what becomes of a step whose peer sends
// nothing, is given up, or is killed.
//   exchange_cuda_bench
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "bench/exchange/two_processes.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::bench {
namespace {

using kernels::cuda::CudaGraph;
using kernels::cuda::CudaStream;
using kernels::cuda::ExchangeEnd;
using kernels::cuda::ExchangePushLaunch;

constexpr int kLayers = 32, kMaxBatch = 64, kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr size_t kQueryBytes = kHeads * kDim * 2, kKvBytes = kKvHeads * kDim * 2;  // of a row; o as q, k as v
constexpr size_t kSlot = kMaxBatch * (kQueryBytes + 2 * kKvBytes);
constexpr int kWarm = 20, kTimed = 200;

using Clock = std::chrono::steady_clock;
double MicrosecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

enum class Way {
  kApart,  // a push and a wait of their own, on both sides
  kFused,  // one kernel a layer and side: it waits, works on what came, stores into the peer and tells it
};

class Bench {
 public:
  explicit Bench(TwoProcesses& processes)
      : processes_(processes), gpus_(processes, 2 * kSlot, 1), numbers_(gpus_.device(), 64) {
    stream_ = Must(gpus_.device().CreateCudaStream());
    work_ = Must(gpus_.device().Allocate(kSlot));
    Must(stream_->Fill(work_->data(), 0, kSlot));
  }

  void Time(Way way, int batch, int blocks) {
    const CudaGraph graph = Record(way, batch, blocks);
    std::vector<double> times;
    for (int round = 0; round < 5; ++round) {
      processes_.Barrier();
      RunSteps(graph, kWarm);
      processes_.Barrier();
      const auto begin = Clock::now();
      RunSteps(graph, kTimed);
      times.push_back(MicrosecondsSince(begin) / kTimed / kLayers);
    }
    Must(kernels::cuda::ExchangeStatus(StepNumbers::Failure(*stream_, end_.own)));
    std::sort(times.begin(), times.end());
    if (processes_.rank() == 0)
      std::printf("two hops, batch %2d, %s, %3d blocks: %6.2f us (%.2f to %.2f)\n", batch,
                  way == Way::kApart ? "push and wait apart" : "push and wait fused", blocks, times[times.size() / 2],
                  times.front(), times.back());
    std::fflush(stdout);
  }

  // What went around is what was sent: every layer adds to the first word of each row what the other side added.
  void CheckContents() {
    constexpr int kBatch = 5;
    std::vector<uint32_t> sent(kBatch * kQueryBytes / 4);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<uint32_t>(i * 2654435761u + processes_.rank());
    Must(stream_->Copy(work_->data(), sent.data(), sent.size() * 4));
    const CudaGraph graph = Record(Way::kApart, kBatch, 3);
    processes_.Barrier();
    RunSteps(graph, 3);
    processes_.Barrier();
    std::vector<uint32_t> came(sent.size());
    Must(stream_->Copy(came.data(), gpus_.own(), came.size() * 4));
    Must(stream_->SynchronizeStatus());
    size_t wrong = 0;
    const size_t bytes = processes_.rank() == 0 ? kBatch * kQueryBytes : kBatch * kQueryBytes;
    for (size_t i = 0; i < bytes / 4; ++i)
      wrong += came[i] != static_cast<uint32_t>(i * 2654435761u + (1 - processes_.rank()));
    std::printf("rank %d: %zu of %zu words that came are wrong\n", processes_.rank(), wrong, bytes / 4);
    if (wrong > 0) _exit(3);
  }

  // The peer runs nothing: this side's steps end by themselves.
  void TimeDeadline() {
    processes_.Barrier();
    if (processes_.rank() == 0) {
      end_ = gpus_.End(0, 50'000'000);
      const CudaGraph graph = Record(Way::kApart, 1, 1);
      const auto begin = Clock::now();
      RunSteps(graph, 1);
      std::printf("nothing comes, deadline 50 ms: the step ends after %.1f ms: %s\n", MicrosecondsSince(begin) / 1e3,
                  Failure().c_str());
      end_ = gpus_.End(0);
    }
    processes_.Barrier();
    if (processes_.rank() == 1) {  // whose step that was is told
      end_ = gpus_.End(0);
      const CudaGraph graph = Record(Way::kApart, 1, 1);
      const auto begin = Clock::now();
      RunSteps(graph, 1);
      std::printf("the other side gave the step up: it ends here after %.1f ms: %s\n", MicrosecondsSince(begin) / 1e3,
                  Failure().c_str());
    }
    processes_.Barrier();
    const CudaGraph graph = Record(Way::kApart, 1, 1);
    ++step_;
    RunSteps(graph, 1);
    Must(kernels::cuda::ExchangeStatus(StepNumbers::Failure(*stream_, end_.own)));
    if (processes_.rank() == 0) std::printf("and the next step goes well\n");
    std::fflush(stdout);
    processes_.Barrier();
  }

  void TimeKill() {
    processes_.Barrier();
    const CudaGraph graph = Record(Way::kApart, kMaxBatch, 16);
    processes_.Barrier();
    if (processes_.rank() == 1)
      for (;;) RunSteps(graph, 1);
    const auto begin = Clock::now();
    while (MicrosecondsSince(begin) < 5e4) RunSteps(graph, 1);
    kill(processes_.child(), SIGKILL);
    const auto killed = Clock::now();
    auto other = Must(gpus_.device().CreateCudaStream());
    // As a node that hears of the death: everything is given up, from a stream of its own.
    uint64_t* const all = reinterpret_cast<uint64_t*>(Must(gpus_.device().AllocatePinned(8)).release()->data());
    *all = ~uint64_t{0};
    int steps = 0;
    while (StepNumbers::Failure(*stream_, end_.own) == 0 && MicrosecondsSince(killed) < 1e7) {
      RunSteps(graph, 1, [&] {
        usleep(2000);
        Must(other->Copy(&end_.own->given_up, all, sizeof(*all)));
        Must(other->SynchronizeStatus());
      });
      ++steps;
    }
    std::printf("peer killed: after %d steps and %.1f ms: %s\n", steps, MicrosecondsSince(killed) / 1e3,
                Failure().c_str());
    int status = 0;
    waitpid(processes_.child(), &status, 0);
    // Its memory is still mapped: storing there does no harm, and this GPU goes on.
    usleep(500000);
    ExchangePushLaunch push;
    push.end = end_;
    push.parts[0] = {work_->data(), gpus_.peer(), kSlot};
    push.blocks = 16;
    for (int i = 0; i < 100; ++i) Must(kernels::cuda::ExchangePush(*stream_, push));
    Must(stream_->SynchronizeStatus());
    Must(stream_->Fill(work_->data(), 1, kSlot));
    Must(stream_->SynchronizeStatus());
    std::printf("100 more pushes into its memory: the GPU goes on\n");
    std::fflush(stdout);
  }

 private:
  std::string Failure() {
    return std::string(kernels::cuda::ExchangeStatus(StepNumbers::Failure(*stream_, end_.own)).message());
  }

  void RunSteps(const CudaGraph& graph, int count, const std::function<void()>& meanwhile = {}) {
    for (int i = 0; i < count; ++i) {
      numbers_.Next(*stream_, end_.own, ++step_);
      Must(stream_->Launch(graph));
      if (i % 32 == 31) Must(stream_->SynchronizeStatus());  // the ring of numbers
    }
    if (meanwhile) meanwhile();
    Must(stream_->SynchronizeStatus());
  }

  void Push(int op, int await_op, int batch, int blocks, bool whole) {
    ExchangePushLaunch push;
    push.end = end_;
    push.op = static_cast<uint32_t>(op);
    push.await_op = await_op;
    push.blocks = blocks;
    const std::byte* from = await_op >= 0 ? gpus_.own() : work_->data();
    push.parts[0] = {from, gpus_.peer(), batch * kQueryBytes};
    if (whole)
      for (int i = 0; i < 2; ++i) {
        const size_t at = kMaxBatch * (kQueryBytes + i * kKvBytes);
        push.parts[1 + i] = {work_->data() + at, gpus_.peer() + at, batch * kKvBytes};
      }
    Must(kernels::cuda::ExchangePush(*stream_, push));
  }
  void Await(int op) { Must(kernels::cuda::ExchangeAwait(*stream_, {end_, static_cast<uint32_t>(op)})); }

  CudaGraph Record(Way way, int batch, int blocks) {
    const bool dense = processes_.rank() == 0;
    Must(stream_->BeginCapture());
    for (int op = 0; op < kLayers; ++op) {
      if (way == Way::kFused) {
        Push(op, dense ? op - 1 : op, batch, blocks, dense);
      } else if (dense) {
        Push(op, -1, batch, blocks, true);
        Await(op);
      } else {
        Await(op);
        Push(op, -1, batch, blocks, false);
      }
    }
    if (dense && way == Way::kFused) Await(kLayers - 1);
    return Must(stream_->EndCapture());
  }

  TwoProcesses& processes_;
  LinkedGpus gpus_;
  StepNumbers numbers_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<kernels::Buffer> work_;
  ExchangeEnd end_ = gpus_.End(0);
  uint64_t step_ = 0;
};

}  // namespace
}  // namespace dovetail::bench

int main() {
  using dovetail::bench::Way;
  dovetail::bench::TwoProcesses processes;
  dovetail::bench::Bench bench(processes);
  bench.CheckContents();
  for (const int blocks : {1, 2, 4}) {
    bench.Time(Way::kApart, 1, blocks);
    bench.Time(Way::kFused, 1, blocks);
  }
  for (const int blocks : {8, 16, 32, 64, 128}) {
    bench.Time(Way::kApart, 64, blocks);
    bench.Time(Way::kFused, 64, blocks);
  }
  bench.TimeDeadline();
  bench.TimeKill();
  return 0;
}
