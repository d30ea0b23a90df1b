#include "compute_worker/cuda/cuda_rank_memory.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

namespace dovetail::compute {

using kernels::cuda::MemoryHandle;
using kernels::cuda::OpenedMemory;

absl::StatusOr<std::unique_ptr<CudaRankMemory>> CudaRankMemory::Create(kernels::cuda::CudaDevice& device,
                                                                       bool in_process) {
  std::unique_ptr<CudaRankMemory> made(new CudaRankMemory(device, in_process));
  DT_ASSIGN_OR_RETURN(made->reads_, device.CreateCudaStream());
  return made;
}

CudaRankMemory::~CudaRankMemory() {
  if (reads_ != nullptr) (void)reads_->SynchronizeStatus();
}

bool CudaRankMemory::ReachedByRanksOf(const proto::StepPlan& plan) const {
  if (in_process_) return true;
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank)
    if (static_cast<int>(rank) != plan.part.rank && !reached_by_.contains(plan.ranks[rank].worker)) return false;
  return true;
}

absl::StatusOr<std::unique_ptr<kernels::Buffer>> CudaRankMemory::Allocate(size_t bytes) {
  if (in_process_) return device_.Allocate(bytes);
  DT_ASSIGN_OR_RETURN(auto memory, device_.AllocateShared(bytes));
  if (!names_.contains(memory->data())) {
    DT_ASSIGN_OR_RETURN(names_[memory->data()], device_.Export(*memory));
  }
  return memory;
}

absl::Status CudaRankMemory::MakeOffer() {
  DT_ASSIGN_OR_RETURN(proof_here_, device_.AllocatePinned(sizeof(Proof)));
  std::random_device random;
  std::generate(proof_.begin(), proof_.end(), [&] { return static_cast<char>(random()); });
  std::memcpy(proof_here_->data(), proof_.data(), sizeof(proof_));
  DT_ASSIGN_OR_RETURN(auto offered, Allocate(sizeof(Proof)));
  DT_RETURN_IF_ERROR(reads_->Copy(offered->data(), proof_here_->data(), sizeof(Proof)));
  DT_RETURN_IF_ERROR(reads_->SynchronizeStatus());
  offer_ = NameOf({offered->data(), sizeof(Proof)});
  offered_ = std::move(offered);
  return absl::OkStatus();
}

absl::StatusOr<std::string> CudaRankMemory::Offer() {
  if (offered_ == nullptr) DT_RETURN_IF_ERROR(MakeOffer());
  return offer_;
}

absl::StatusOr<std::string> CudaRankMemory::Answer(NodeId peer, std::string_view offer) {
  if (offered_ == nullptr) DT_RETURN_IF_ERROR(MakeOffer());
  DT_ASSIGN_OR_RETURN(const std::span<const std::byte> there, Open(peer, offer));
  if (there.size() != sizeof(Proof)) return InvalidArgument("it offers ", there.size(), " bytes: another build?");
  DT_RETURN_IF_ERROR(reads_->Copy(proof_here_->data(), there.data(), sizeof(Proof)));
  DT_RETURN_IF_ERROR(reads_->SynchronizeStatus());
  return std::string(reinterpret_cast<const char*>(proof_here_->data()), sizeof(Proof));
}

absl::Status CudaRankMemory::Check(std::string_view answer) const {
  if (answer == std::string_view(proof_.data(), proof_.size())) return absl::OkStatus();
  return FailedPrecondition("it reads other bytes than there are");
}

void CudaRankMemory::SetReaches(WorkerId peer, bool reaches) {
  if (reaches) {
    reached_by_.insert(peer);
  } else {
    reached_by_.erase(peer);
  }
}

std::string CudaRankMemory::NameOf(std::span<const std::byte> given) const {
  const auto found = names_.find(given.data());
  if (found == names_.end()) return "";
  const Name name{found->second, given.size()};
  return {reinterpret_cast<const char*>(&name), sizeof(name)};
}

absl::StatusOr<std::span<const std::byte>> CudaRankMemory::Open(NodeId peer, std::string_view text) {
  Name name;
  if (text.size() != sizeof(name))
    return InvalidArgument("a name of memory has ", sizeof(name), " bytes, this one ", text.size());
  std::memcpy(&name, text.data(), sizeof(name));
  std::map<std::string, OpenedMemory>& opened = opened_[peer];
  const auto [found, is_new] = opened.try_emplace(std::string(text.substr(0, sizeof(MemoryHandle))));
  if (is_new) {
    absl::StatusOr<OpenedMemory> memory = device_.Open(name.handle);
    if (!memory.ok()) {
      opened.erase(found);
      return memory.status();
    }
    found->second = *std::move(memory);
  }
  const std::span<const std::byte> bytes = found->second.bytes();
  if (name.bytes > bytes.size()) return InvalidArgument("a name of ", name.bytes, " bytes in memory of ", bytes.size());
  return bytes.first(name.bytes);
}

void CudaRankMemory::Lose(NodeId peer) {
  const auto found = opened_.find(peer);
  if (found == opened_.end()) return;
  (void)reads_->SynchronizeStatus();
  opened_.erase(found);
}

}  // namespace dovetail::compute
