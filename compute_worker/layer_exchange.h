#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/dense_backend.h"
#include "compute_worker/row_spread.h"
#include "exchange/exchange_party.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// How the tensors of a step's attention ops get to its attention workers and back. There are two ways, and a step takes
// one of them: HostExchange, payloads in frames through the hosts, for any placement and device; DeviceExchange, by the
// GPUs themselves, with no host between the step's begin and its tokens. All of this file is reactor-owned; what fails
// ends the step.
class LayerExchange {
 public:
  virtual ~LayerExchange() = default;
  // What the dense backend computes into and from, by part of the step; empty: payloads, which the backend packs and
  // joins.
  virtual std::span<exchange::GpuExchange* const> gpus() const { return {}; }
  virtual absl::Status SendBegin(SendStepBegin& begin) = 0;
  virtual absl::Status SendQuery(MicroBatchId id, int op) = 0;
  virtual absl::Status SendKeyValue(MicroBatchId id, int op) = 0;
  // The op's partial of part `p`, after its k and v, where no frame will bring it.
  virtual std::optional<PartialArrived> Answer(MicroBatchId, int /*op*/, int /*p*/) { return std::nullopt; }
  // The part whose worker a step failed by that its tokens were waited for; -1: none, or that is not known.
  virtual int Unanswered(MicroBatchId, StepId) const { return -1; }
  // The step failed, here or there: nobody waits for it any longer.
  virtual void EndFailed(MicroBatchId, StepId) {}
};

class HostExchange final : public LayerExchange {
 public:
  // All outlive it.
  HostExchange(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port)
      : core_(core), dense_(dense), port_(port) {}
  absl::Status SendBegin(SendStepBegin& begin) override;
  absl::Status SendQuery(MicroBatchId id, int op) override { return Send(id, op, proto::FrameType::kQuery); }
  absl::Status SendKeyValue(MicroBatchId id, int op) override { return Send(id, op, proto::FrameType::kKeyValue); }

 private:
  absl::Status Send(MicroBatchId id, int op, proto::FrameType type);

  const ComputeWorkerCore& core_;
  DenseBackend& dense_;
  transport::Port& port_;
};

// Of one micro-batch.
class DeviceExchange final : public LayerExchange {
 public:
  DeviceExchange(const ComputeWorkerCore& core, transport::Port& port) : core_(core), port_(port) {}
  // For the step that begins, by its parts; they outlive it.
  void Use(std::vector<exchange::GpuExchange*> gpus) { gpus_ = std::move(gpus); }
  std::span<exchange::GpuExchange* const> gpus() const override { return gpus_; }
  absl::Status SendBegin(SendStepBegin& begin) override;
  absl::Status SendQuery(MicroBatchId, int) override { return absl::OkStatus(); }  // kernels store it where it belongs
  absl::Status SendKeyValue(MicroBatchId, int) override { return absl::OkStatus(); }
  // At once: what reads o waits for it on the GPU.
  std::optional<PartialArrived> Answer(MicroBatchId id, int op, int p) override;
  int Unanswered(MicroBatchId id, StepId step) const override;
  void EndFailed(MicroBatchId id, StepId step) override;

 private:
  const ComputeWorkerCore& core_;
  transport::Port& port_;
  std::vector<exchange::GpuExchange*> gpus_;
};

// Whether a step may cross by the GPUs themselves: every sequence lies whole on one attention worker, and `gpu_of` each
// of them says which GPU it has that this one is linked with, at most kMostExchangePeers and no two the same. Processes
// that share a GPU take turns on it, and who waits there holds up the other. Empty: no link. `spread` is scratch.
bool GpusMayExchange(const ComputeWorkerCore& core, MicroBatchId id,
                     const std::function<std::string_view(NodeId)>& gpu_of, RowSpread& spread);

// Chooses the exchange of each step: by the GPUs themselves where they may, else through the hosts. Makes the links.
class LayerExchanges {
 public:
  LayerExchanges(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port,
                 const exchange::GpuExchangeMeans& means);

  // Why no step of this model can be exchanged by GPUs themselves, in one line; kOk: it can.
  static absl::Status SupportsDevice(const proto::AttentionTable& table);

  void AddPeer(const AttentionWorkerAddress& address);
  void LosePeer(WorkerId worker, Epoch epoch);
  void OnFrame(const transport::Delivery& delivery);  // of proto/link_frames.h
  bool Progress();                                    // true: links are being made
  // "device", or "host: " and why; empty without a GPU here.
  std::string With(NodeId node) const;

  // For the step that begins in the micro-batch. kFailedPrecondition: it must be the GPUs' own, and cannot be.
  absl::Status Choose(MicroBatchId id);
  LayerExchange& Of(MicroBatchId id) const { return *chosen_[id.value()]; }

 private:
  // By part; empty: the step goes through the hosts.
  std::vector<exchange::GpuExchange*> GpusOf(MicroBatchId id);
  void Send(std::vector<exchange::ExchangeParty::Frame>& frames);

  const ComputeWorkerCore& core_;
  transport::Port& port_;
  const bool device_only_;
  HostExchange host_;
  std::unique_ptr<exchange::ExchangeParty> party_;  // null: no GPU
  std::vector<AttentionWorkerAddress> peers_;
  std::vector<DeviceExchange> by_gpus_;  // by micro-batch, like
  std::vector<LayerExchange*> chosen_;
  RowSpread spread_;  // of the step at hand
};

}  // namespace dovetail::compute
