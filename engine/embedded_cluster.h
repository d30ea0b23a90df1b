#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "attention_worker/attention_worker_node.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/mutex.h"
#include "base/status.h"
#include "compute_worker/compute_worker_node.h"
#include "engine/attention_thread.h"
#include "engine/engine.h"
#include "exchange/cuda/shared_gpu.h"
#include "kernels/device.h"
#include "model/loaded_model.h"
#include "scheduler/scheduler_node.h"
#include "transport/inproc/inproc_fabric.h"

namespace dovetail::engine {

inline constexpr int kMaxAttentionWorkers = 64;  // in one process
inline constexpr int kMaxComputeWorkers = 8;     // in one process

struct EmbeddedClusterOptions {
  int attention_workers = 1;  // 1..kMaxAttentionWorkers
  // 1..kMaxComputeWorkers: they divide requests, and long prompts (SchedulerOptions::prefill_ranks).
  int compute_workers = 1;
  // The devices of the second compute worker, the third and so on, which then come round to the first's again; empty:
  // all are on that one. All are GPUs, or none. They and the weights outlive the cluster.
  struct ComputeDevice {
    kernels::Device* device = nullptr;
    const compute::DenseBackendFactory* dense = nullptr;
  };
  std::vector<ComputeDevice> more_compute_devices;
  // Where the attention workers are, if not on the device of the compute workers; outlives the cluster. On a CPU they
  // have a thread of their own.
  kernels::Device* attention_device = nullptr;
  // Or several places, each with one attention worker. attention_workers is their number then; attention_device,
  // kv_cache_bytes and kv_room are not looked at. A place on a compute worker's GPU makes the two a pair: steps of
  // sequences that lie whole there stay on that GPU (OnOneGpu in exchange/seam.h). All other places are CPUs. Pairs
  // prefill each prompt on one compute worker.
  struct AttentionPlace {
    kernels::Device* device = nullptr;  // outlives the cluster
    // Asked as kv_room is: of its KV cache, rounded down to whole segments.
    std::function<uint64_t()> kv_bytes;
    double read_rate = 1;  // [bytes/s], or in any unit that all of them have: tiers (SchedulerOptions::placement)
    const char* sized_by = "--attention-device";  // the flag that errors of the size name
  };
  std::vector<AttentionPlace> attention_places;
  uint64_t kv_cache_bytes =
      0;  // over all attention workers; 0: what the options need at most, within a quarter of memory
  // Asked once the compute worker has its memory: what the KV cache may take of its device's. Empty: of this machine's.
  std::function<uint64_t()> kv_room;
  DType kv_dtype = DType::kBF16;
  attention::KvStorage kv_storage = attention::KvStorage::kAsSent;
  bool poison_freed_kv = false;           // AttentionWorkerOptions::poison_freed
  DType state_dtype = DType::kF32;        // of linear states at rest; or bf16
  int threads = 0;                        // compute threads that all nodes share; 0: one per core
  scheduler::SchedulerOptions scheduler;  // model_digest and attention are filled in
  uint64_t seed = 0;
  compute::ComputeWorkerTuning compute;
  std::string trace_file;                              // a Chrome trace of all workers, written at the end; empty: none
  int snapshot_percent = attention::kSnapshotPercent;  // see attention::AttentionWorkerOptions
  attention::Digests digests = attention::Digests::kNone;
  SpanSink* spans = nullptr;  // of sampled traces, from all nodes; outlives the cluster
};

// The disaggregated system in one process: a scheduler, compute workers and attention workers, each a node with its own
// core and its own port of an InprocFabric. One thread runs their event loops in turn. Where layers run on GPUs,
// attention workers on a CPU have a thread of their own. Kernels spread over one pool.
// Threads: thread-safe, as Engine says.
class EmbeddedCluster final : public Engine {
 public:
  // `model` and `device` outlive it. kInvalidArgument for options, kResourceExhausted when the KV cache does not fit;
  // the message names the flag.
  static absl::StatusOr<std::unique_ptr<EmbeddedCluster>> Create(const model::LoadedModel& model,
                                                                 kernels::Device& device,
                                                                 const EmbeddedClusterOptions& options);
  // Ends every request that has not ended as cancelled. Blocks for the operators at hand, not until a step or a request
  // is done.
  ~EmbeddedCluster() override;

  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request, std::shared_ptr<GenerationSink> sink) override;
  void Cancel(RequestId request) override;
  void StopChoice(RequestId request, int choice) override;
  void Pause(RequestId request) override;
  void Resume(RequestId request) override;
  void WatchCache(std::shared_ptr<CacheSink> sink) override;
  EngineStats stats() override;
  std::vector<StepSample> TakeStepSamples() override;

  int attention_workers() const { return options_.attention_workers; }
  uint64_t kv_blocks() const { return kv_blocks_; }
  uint64_t kv_tokens() const { return kv_tokens_; }  // that fit, counting full-attention layers
  uint64_t kv_bytes() const { return kv_bytes_; }
  const std::vector<std::unique_ptr<Trace>>& traces() const { return traces_; }  // compute, then attention; when idle
  uint64_t model_digest() const { return options_.scheduler.model_digest; }      // model_digest.h

 private:
  static constexpr size_t kMaxStepSamples = 4096;

  EmbeddedCluster(const model::LoadedModel& model, const EmbeddedClusterOptions& options);
  std::vector<EmbeddedClusterOptions::ComputeDevice> ComputeDevices(kernels::Device& first) const;  // by compute worker
  // The attention worker on the GPU of that compute worker, so that steps may stay there; -1: none.
  int PairOf(int compute_worker, kernels::Device& first) const;
  absl::Status ShareGpus(kernels::Device& first, int micro_batches);
  // The device of an attention worker, where that of the compute workers is `computing`.
  kernels::Device& DeviceOf(int attention_worker, kernels::Device& computing) const;
  // An attention worker runs on a CPU that runs no layers: those are on GPUs, which the engine's thread keeps busy.
  bool AttendsApart(int attention_worker) const;
  absl::Status Build(kernels::Device& device);
  absl::Status BuildComputeWorkers(kernels::Device& device, const proto::AttentionTable& table, int micro_batches);
  absl::Status BuildAttentionWorkers(kernels::Device& device, const proto::AttentionTable& table, int micro_batches);
  absl::Status SizeKvCache(const proto::AttentionTable& table);
  absl::Status SizeKvOfPlaces(const proto::AttentionTable& table, uint64_t set_bytes);
  absl::Status CheckRequest(const requests::GenerationRequest& request) const;
  void Push(scheduler::Event event);
  void Run();
  void TakeNewSinks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool RunOnce();
  absl::Status Health() const;
  // Takes a pair whose GPU is lost out of the cluster. False: there is none, or no other pair is left.
  bool LosePair();
  void Emit(requests::GenerationUpdate update);
  void PublishStats();
  // Tells every request that was taken and has not ended. No request is taken any more.
  void EndEverything(requests::FinishReason reason, const std::string& why);
  Trace* NewTrace(const std::string& name);  // null if none is asked for

  const model::LoadedModel& model_;
  EmbeddedClusterOptions options_;
  Clock& clock_;
  uint64_t kv_blocks_ = 0, kv_tokens_ = 0, kv_bytes_ = 0;
  std::vector<uint32_t> worker_blocks_;  // by attention worker

  transport::Doorbell doorbell_, attention_doorbell_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<int> pairs_;                                         // by compute worker: PairOf
  std::vector<std::unique_ptr<exchange::SharedGpu>> shared_gpus_;  // by compute worker; null: it is in no pair
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::vector<std::unique_ptr<compute::ComputeWorkerNode>> compute_;  // null: was lost
  std::vector<std::unique_ptr<Trace>> traces_;
  std::vector<std::unique_ptr<attention::AttentionWorkerNode>> attention_;  // null: was lost
  // What was lost: not run any more, and not destroyed while the others run, since that would wait for its GPU.
  std::vector<std::unique_ptr<compute::ComputeWorkerNode>> lost_compute_;
  std::vector<std::unique_ptr<attention::AttentionWorkerNode>> lost_attention_;
  std::vector<attention::AttentionWorkerNode*> attention_here_;  // those that the engine's thread runs
  std::unique_ptr<AttentionThread> attention_thread_;            // runs the others; null: there are none

  Mutex mutex_;
  std::vector<scheduler::Event> inbox_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> inbox_filled_{false};  // inbox_ holds something; read without the mutex
  std::atomic<bool> stopping_{false};      // set under the mutex, so that Submit sees it; read without
  absl::flat_hash_map<RequestId, std::shared_ptr<GenerationSink>> new_sinks_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CacheSink> new_cache_sink_ ABSL_GUARDED_BY(mutex_);
  EngineStats stats_ ABSL_GUARDED_BY(mutex_);
  std::deque<StepSample> step_samples_ ABSL_GUARDED_BY(mutex_);
  int requests_in_system_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);  // not kOk: the engine has ended, its device is lost

  // Engine thread only.
  std::vector<scheduler::Event> taken_;
  absl::flat_hash_map<RequestId, std::shared_ptr<GenerationSink>> sinks_;
  std::shared_ptr<CacheSink> cache_sink_;  // null: nothing listens

  std::atomic<uint64_t> next_request_{1};
  std::thread thread_;
};

}  // namespace dovetail::engine
