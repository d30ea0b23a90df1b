#include "compute_worker/compute_worker_main.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "compute_worker/compute_worker_node.h"
#include "exchange/cuda/shared_gpu.h"

namespace dovetail::compute {
namespace {

constexpr NodeId kSchedulerNode(0);

class ClusterComputeWorker final : public control::WorkerNode {
 public:
  ClusterComputeWorker(const model::LoadedModel& model, uint64_t digest, kernels::Device& device,
                       transport::Connector& connector, const ComputeWorkerTuning& tuning,
                       const std::string& trace_file)
      : model_(model),
        digest_(digest),
        device_(device),
        connector_(connector),
        tuning_(tuning),
        trace_file_(trace_file) {
    if (trace_file_.empty()) return;
    trace_ = std::make_unique<Trace>("compute worker");
    tuning_.trace = trace_.get();
  }
  ~ClusterComputeWorker() override {
    if (trace_ == nullptr) return;
    if (const absl::Status written = WriteChromeTrace(trace_file_, {trace_.get()}); !written.ok())
      LogWarning(std::string(written.message()));
  }

  absl::StatusOr<control::Ready> Configure(const control::Configuration& configuration) override {
    if (configuration.model_digest != digest_)
      return FailedPrecondition("the cluster serves another model than this compute worker has loaded");
    ComputeWorkerOptions options;
    options.micro_batches = configuration.micro_batches;
    options.max_step_tokens = configuration.max_step_tokens;
    options.vocab_size = static_cast<int32_t>(model_.config().vocab_size);
    DT_ASSIGN_OR_RETURN(node_, ComputeWorkerNode::Create(model_, configuration.attention, options, kSchedulerNode,
                                                         device_, connector_, SystemClock(), tuning_));
    return control::Ready{.leaves_states = node_->leaves_states()};
  }

  void AddPeer(const control::Peer& peer) override {
    const bool pair = tuning_.shared_gpu != nullptr && tuning_.shared_gpu->attention() == peer.node;
    if (peer.role == control::Role::kAttentionWorker)
      node_->AddAttentionWorker({.worker = peer.worker, .epoch = peer.epoch, .node = peer.node, .same_gpu = pair});
    if (peer.role == control::Role::kComputeWorker) node_->AddComputeWorker({peer.worker, peer.epoch, peer.node});
  }
  void RemovePeer(const control::Peer& peer) override {
    if (peer.role == control::Role::kAttentionWorker) node_->LoseAttentionWorker(peer.worker, peer.epoch);
    if (peer.role == control::Role::kComputeWorker) node_->LoseComputeWorker(peer.worker, peer.epoch);
  }
  int Poll() override { return node_->Poll(); }
  absl::Status Health() const override { return node_ == nullptr ? absl::OkStatus() : node_->Health(); }
  std::vector<NodeId> Overdue() override { return node_->Overdue(); }

  std::string ExchangeWith(NodeId node) const override { return node_ != nullptr ? node_->ExchangeWith(node) : ""; }

  control::Heartbeat Status() const override {
    control::Heartbeat heartbeat;
    if (node_ != nullptr) heartbeat.steps = node_->core().counters().steps;
    return heartbeat;
  }

 private:
  const model::LoadedModel& model_;
  const uint64_t digest_;
  kernels::Device& device_;
  transport::Connector& connector_;
  ComputeWorkerTuning tuning_;
  const std::string trace_file_;
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<ComputeWorkerNode> node_;
};

}  // namespace

std::unique_ptr<control::WorkerNode> MakeComputeWorker(const model::LoadedModel& model, uint64_t digest,
                                                       kernels::Device& device, transport::Connector& connector,
                                                       const ComputeWorkerTuning& tuning,
                                                       const std::string& trace_file) {
  return std::make_unique<ClusterComputeWorker>(model, digest, device, connector, tuning, trace_file);
}

}  // namespace dovetail::compute
