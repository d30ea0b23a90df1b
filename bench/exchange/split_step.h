#pragma once
#include <memory>
#include <random>
#include <vector>

#include "bench/exchange/two_processes.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/exchange/cuda_exchange.h"
#include "kernels/cuda/products/cuda_gemm.h"

// A decode step of the Llama-3-8B shape in two halves: dense layers on one GPU, attention on another. Each half records
// a graph of a whole step of all its micro-batches, which rotate in one chain.

namespace dovetail::bench {

using kernels::Buffer;
using kernels::cuda::CudaStream;

struct SplitShape {
  static constexpr int kLayers = 32, kHidden = 4096, kQHeads = 32, kKvHeads = 8, kDim = 128, kFfn = 14336;
  static constexpr int kVocab = 128256, kMaxMicroBatches = 3;
  static constexpr int kQ = kQHeads * kDim, kKv = kKvHeads * kDim, kQkv = kQ + 2 * kKv;
};

struct SplitCase {
  int micro_batches = 1;
  int rows = 1;  // of each
  int context = 1024;
  bool operator==(const SplitCase&) const = default;
};

// How a side hands over what it made.
enum class Handing {
  kNone,        // not at all, nor does it wait: its own time
  kStored,      // stored into the peer's memory by the kernel that makes it; waits are in the chain
  kCopied,      // copied by a kernel on a branch of the micro-batch's; waits are in the chain
  kCopiedApart  // waits are on the branch, too: they delay no kernel, but each occupies a multiprocessor
};

// Memory that the peer stores into, by micro-batch: q, k, v rows at the attention side, o rows at the dense side.
struct SplitSlots {
  explicit SplitSlots(int most_rows) : rows(most_rows) {}
  int rows;
  size_t q() const { return 0; }
  size_t k() const { return size_t(rows) * SplitShape::kQ * 2; }
  size_t v() const { return k() + size_t(rows) * SplitShape::kKv * 2; }
  size_t bytes() const { return v() + size_t(rows) * SplitShape::kKv * 2; }
};

class SplitSide {
 public:
  SplitSide(LinkedGpus& gpus, const SplitSlots& slots);
  virtual ~SplitSide() = default;

  // Records a step; launches go to stream().
  kernels::cuda::CudaGraph Record(const SplitCase& shape, Handing handing);
  CudaStream& stream() { return *main_; }

 protected:
  // Work on main() only, but for what Await and Push put on a branch.
  virtual void Prepare(const SplitCase& shape) = 0;
  virtual void Enqueue(const SplitCase& shape, Handing handing) = 0;

  // On the branch of micro-batch m: behind all of the chain so far, `work`; JoinBranch: the chain goes on behind that.
  template <typename Work>
  void OnBranch(int m, Work work) {
    Must(main_->Record(Mark()));
    Must(branches_[m]->Wait(marks_.back()));
    work(*branches_[m]);
    Must(branches_[m]->Record(Mark()));
    ready_[m] = static_cast<int>(marks_.size()) - 1;
  }
  void JoinBranch(int m) {
    if (ready_[m] >= 0) Must(main_->Wait(marks_[ready_[m]]));
    ready_[m] = -1;
  }
  std::byte* Own(int m) const { return gpus_.own() + m * slots_.bytes(); }
  std::byte* Peer(int m) const { return gpus_.peer() + m * slots_.bytes(); }
  std::unique_ptr<Buffer> Random(size_t bytes);
  std::unique_ptr<Buffer> Room(size_t bytes) { return Must(gpus_.device().Allocate(bytes)); }
  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& values) {
    auto buffer = Room(values.size() * sizeof(T));
    Must(main_->Copy(buffer->data(), values.data(), values.size() * sizeof(T)));
    Must(main_->SynchronizeStatus());
    return buffer;
  }

  LinkedGpus& gpus_;
  const SplitSlots slots_;

 private:
  kernels::cuda::CudaEvent& Mark();

  std::unique_ptr<CudaStream> main_;
  std::vector<std::unique_ptr<CudaStream>> branches_;
  std::vector<kernels::cuda::CudaEvent> marks_;
  int ready_[SplitShape::kMaxMicroBatches] = {-1, -1, -1};
  std::unique_ptr<Buffer> seed_;
};

std::unique_ptr<SplitSide> MakeDenseSide(LinkedGpus& gpus, const SplitSlots& slots);
std::unique_ptr<SplitSide> MakeAttentionSide(LinkedGpus& gpus, const SplitSlots& slots, int most_tokens);

}  // namespace dovetail::bench
