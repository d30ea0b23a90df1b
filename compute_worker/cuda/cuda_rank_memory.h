#pragma once
#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "base/status.h"
#include "compute_worker/rank_memory.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/step_plan.h"

namespace dovetail::compute {

// Memory of a GPU that other ranks read by themselves: of this process by its address, of others by CUDA IPC.
// Ownership: must not outlive the device.
// Threads:   reactor-owned.
class CudaRankMemory final : public RankMemory {
 public:
  // `in_process`: all other ranks are in this process and reach this GPU; nothing is offered or named then.
  static absl::StatusOr<std::unique_ptr<CudaRankMemory>> Create(kernels::cuda::CudaDevice& device, bool in_process);
  ~CudaRankMemory() override;
  bool in_process() const { return in_process_; }

  // All other ranks of the plan's group reach this GPU's memory.
  bool ReachedByRanksOf(const proto::StepPlan& plan) const;
  // Memory of this GPU that they reach.
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(size_t bytes);
  // In which all that they sent is read.
  kernels::cuda::CudaStream& reads() { return *reads_; }

  absl::StatusOr<std::string> Offer() override;
  absl::StatusOr<std::string> Answer(NodeId peer, std::string_view offer) override;
  absl::Status Check(std::string_view answer) const override;
  void SetReaches(WorkerId peer, bool reaches) override;
  std::string NameOf(std::span<const std::byte> given) const override;
  absl::StatusOr<std::span<const std::byte>> Open(NodeId peer, std::string_view name) override;
  void Lose(NodeId peer) override;

 private:
  using Proof = std::array<char, 16>;  // random; what the offered memory holds
  struct Name {
    kernels::cuda::MemoryHandle handle;
    uint64_t bytes = 0;
  };

  CudaRankMemory(kernels::cuda::CudaDevice& device, bool in_process) : device_(device), in_process_(in_process) {}
  absl::Status MakeOffer();

  kernels::cuda::CudaDevice& device_;
  const bool in_process_;
  std::unique_ptr<kernels::cuda::CudaStream> reads_;
  std::unique_ptr<kernels::Buffer> offered_, proof_here_;  // on the device; pinned
  std::string offer_;
  Proof proof_ = {};
  std::map<const std::byte*, kernels::cuda::MemoryHandle> names_;  // of memory that Allocate gave, which is never freed
  std::set<WorkerId> reached_by_;
  std::map<NodeId, std::map<std::string, kernels::cuda::OpenedMemory>> opened_;  // by the handle
};

}  // namespace dovetail::compute
