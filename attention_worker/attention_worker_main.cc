#include "attention_worker/attention_worker_main.h"

#include <algorithm>

#include "attention_worker/attention_worker_node.h"
#include "attention_worker/cpu/attention_executor.h"
#include "base/log.h"
#include "base/trace.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/kv_blocks.h"

namespace dovetail::attention {
namespace {

class ClusterAttentionWorker final : public control::WorkerNode {
 public:
  ClusterAttentionWorker(const AttentionWorkerMainOptions& options, kernels::Device& device,
                         transport::Connector& connector, const control::JoinReply& membership)
      : options_(options), device_(device), connector_(connector), membership_(membership) {
    if (!options_.trace_file.empty())
      trace_ = std::make_unique<Trace>(absl::StrCat("attention worker ", membership_.worker.value()));
  }
  ~ClusterAttentionWorker() override {
    if (trace_ == nullptr) return;
    if (const absl::Status written = WriteChromeTrace(options_.trace_file, {trace_.get()}); !written.ok())
      LogWarning(std::string(written.message()));
  }

  absl::StatusOr<control::Ready> Configure(const control::Configuration& configuration) override {
    DT_ASSIGN_OR_RETURN(const KvStorage storage, StorageFor(configuration));
    const size_t block_bytes = KvBlockBytes(configuration.attention, storage);
    DT_ASSIGN_OR_RETURN(const uint64_t kv_bytes, KvBytes());
    const uint64_t blocks = std::min<uint64_t>(kv_bytes / block_bytes, UINT32_MAX);
    if (blocks == 0)
      return InvalidArgument("--kv-capacity: ", kv_bytes, " bytes hold no KV block; this model's have ", block_bytes,
                             " bytes");
    if (const std::string few = proto::TooFewForASequence(configuration.attention, blocks, block_bytes); !few.empty())
      LogWarning(few);
    AttentionWorkerOptions options{membership_.worker, membership_.epoch, static_cast<uint32_t>(blocks),
                                   configuration.micro_batches};
    options.snapshot_percent = options_.snapshot_percent;
    options.model_digest = configuration.model_digest;
    options.digests = options_.digests;
    options.deterministic = configuration.deterministic;
    options.reports_cache = true;
    auto node = AttentionWorkerNode::Create(configuration.attention, options, device_, connector_, SystemClock(),
                                            options_.shared_gpu, storage);
    if (!node.ok()) return Annotate(node.status(), absl::StrCat("--kv-capacity of ", kv_bytes, " bytes"));
    node_ = *std::move(node);
    node_->SetTrace(trace_.get());
    node_->SetSpans(options_.spans);
    node_->AllowExchange(options_.exchange);
    return control::Ready{.kv_blocks = blocks, .kv_bytes = blocks * block_bytes};
  }

  void AddPeer(const control::Peer&) override {}  // it answers every peer of the connector
  // The scheduler sends steps in place of those that end with a lost compute worker.
  void RemovePeer(const control::Peer& peer) override { node_->LosePeer(peer.node); }
  int Poll() override { return node_->Poll(); }
  absl::Status Health() const override { return node_ == nullptr ? absl::OkStatus() : node_->Health(); }

  control::Heartbeat Status() const override {
    control::Heartbeat heartbeat;
    if (node_ == nullptr) return heartbeat;
    const auto status = node_->core().status();
    heartbeat.kv_blocks_total = status.blocks_total;
    heartbeat.kv_blocks_in_use = status.blocks_in_use;
    heartbeat.kv_blocks_cached = status.blocks_cached;
    heartbeat.steps = node_->core().counters().steps;
    heartbeat.damaged_blocks = node_->core().counters().damaged_blocks;
    return heartbeat;
  }

 private:
  absl::StatusOr<uint64_t> KvBytes() const {
    if (options_.kv_room == nullptr) return options_.kv_bytes;
    DT_ASSIGN_OR_RETURN(const uint64_t room, options_.kv_room());
    if (room < options_.kv_bytes)
      LogInfo("KV gets ", room >> 20, " MiB of ", device_.name(), " and not ", options_.kv_bytes >> 20,
              ": the layers' buffers, or other processes, have taken the rest");
    return std::min(room, options_.kv_bytes);
  }

  // A prompt is attended by compute workers and by this one, and K and V move between attention workers: on CPUs all
  // have them in one storage, or tokens would depend on who did what. A GPU may round what comes to E4M3 by itself.
  absl::StatusOr<KvStorage> StorageFor(const control::Configuration& configuration) const {
    const KvStorage told = configuration.kv_storage;
    if (options_.storage == KvStorage::kAsSent || options_.storage == told) return told;
    const bool gpu = dynamic_cast<kernels::cuda::CudaDevice*>(&device_) != nullptr;
    if (gpu && told == KvStorage::kAsSent) return options_.storage;
    return FailedPrecondition("--kv-cache-dtype ", std::string(Name(options_.storage)),
                              ": this cluster's compute workers attend K and V ", std::string(Name(told)),
                              "; start them with --kv-cache-dtype ", std::string(Name(options_.storage)),
                              ", or this worker without the flag");
  }

  const AttentionWorkerMainOptions options_;
  kernels::Device& device_;
  transport::Connector& connector_;
  const control::JoinReply membership_;
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<AttentionWorkerNode> node_;
};

}  // namespace

std::unique_ptr<control::WorkerNode> MakeAttentionWorker(const AttentionWorkerMainOptions& options,
                                                         kernels::Device& device, transport::Connector& connector,
                                                         const control::JoinReply& membership) {
  return std::make_unique<ClusterAttentionWorker>(options, device, connector, membership);
}

}  // namespace dovetail::attention
