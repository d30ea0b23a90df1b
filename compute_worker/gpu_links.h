#pragma once
#include <memory>
#include <string>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "exchange/exchange_party.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// The links between a compute worker's GPU and those of its attention workers: makes them by frames
// (proto/link_frames.h), and knows which are there. Nothing happens on a CPU.
// Threads: reactor-owned.
class GpuLinks {
 public:
  // All outlive it.
  GpuLinks(const ComputeWorkerCore& core, transport::Port& port, const exchange::GpuExchangeMeans& means);

  // kFailedPrecondition: why no step of this model can cross between GPUs, in one line.
  static absl::Status Supports(const proto::AttentionTable& table);

  bool on_gpu() const { return party_ != nullptr; }
  void AddPeer(const AttentionWorkerAddress& address);
  void LosePeer(WorkerId worker, Epoch epoch);
  void OnFrame(const transport::Delivery& delivery);
  bool Progress();  // true: links are being made
  // ComputeWorkerCore::SetLinked of all peers.
  void TellLinked(ComputeWorkerCore& core) const;

  exchange::GpuExchange* With(NodeId node) const { return on_gpu() ? party_->With(node) : nullptr; }
  // There is no link with this node and none is being made, although it has a GPU.
  bool Refused(NodeId node) const { return on_gpu() && party_->Refused(node); }
  // "device", or "host: " and why; empty without a GPU here.
  std::string Describe(NodeId node) const { return on_gpu() ? party_->Describe(node) : ""; }

 private:
  void Send(std::vector<exchange::ExchangeParty::Frame>& frames);

  const ComputeWorkerCore& core_;
  transport::Port& port_;
  std::unique_ptr<exchange::ExchangeParty> party_;  // null: no GPU
  std::vector<AttentionWorkerAddress> peers_;
};

}  // namespace dovetail::compute
