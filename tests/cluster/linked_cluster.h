#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attention_worker/attention_worker_node.h"
#include "compute_worker/compute_worker_node.h"
#include "compute_worker/cuda/cuda_model.h"
#include "exchange/cuda/shared_gpu.h"
#include "scheduler/scheduler_node.h"
#include "tests/seam/loop_links.h"
#include "tests/seam/seam_monitor.h"
#include "transport/inproc/inproc_fabric.h"

namespace dovetail::test {

struct LinkedClusterOptions {
  int attention_workers = 1;  // each on a GPU of its own, linked with the compute worker's; 0: one, on that one itself
  int step_tokens = 64;
  int micro_batches = 1;
  uint32_t kv_blocks = 4000;
  std::optional<uint64_t> scratch_bytes = 16 << 20;  // none: as a compute worker takes by itself
  scheduler::PlacementPolicy placement = scheduler::PlacementPolicy::kRequest;
  int token_shard_tokens = 64;  // kTokens and kMixed
};

// What a request was answered.
struct LinkedStream {
  std::vector<TokenId> tokens;
  std::vector<float> prompt_logits;
  std::vector<std::vector<float>> logits;  // by token
  bool finished = false;
  std::string error;
  int cached_tokens = 0;
};

// Frames that a compute worker has sent.
struct LinkedFrames {
  int begun_through_hosts = 0, begun_between_gpus = 0, tensors = 0;
};

// A scheduler and a compute worker on the caller's thread, and attention workers on threads of their own, each on an
// emulated GPU of its own: kernels of two of them may wait for each other, as those of two processes do. An emulated
// GPU is a copy of the emulation's library. Thread-compatible.
class LinkedCluster {
 public:
  // kNotFound: this program does not run on the emulated GPU, or there is none.
  static absl::Status Possible();
  // `path`: of a model. Errors: those of what it is made of.
  static absl::StatusOr<std::unique_ptr<LinkedCluster>> Create(const std::filesystem::path& path,
                                                               const LinkedClusterOptions& options);
  ~LinkedCluster();

  uint64_t Submit(std::vector<TokenId> prompt, int max_tokens, int logits_last = 0, bool logits_of_output = false);
  // False: not in a time that only a hang takes.
  bool Until(const std::function<bool()>& condition);
  bool UntilTheEndOf(uint64_t request);
  // Its next op fails. While it has none.
  void LetAnOpFail(int worker) { workers_[worker]->fail_next = true; }
  // It takes no frame any more, and no other node knows it yet.
  void Stop(int worker) { workers_[worker]->stops = true; }
  void Lose(int worker);  // now they do

  const LinkedStream& stream(uint64_t request) { return streams_[request]; }
  const LinkedFrames& frames() const { return frames_; }
  uint64_t prompt_tokens_here() const { return compute_->core().counters().prompt_tokens_here; }
  uint64_t compute_steps() const { return compute_->core().counters().steps; }
  int failed_steps() const { return failed_; }
  scheduler::SchedulerStats stats() const { return scheduler_->stats(); }

 private:
  class Port;
  struct Worker {
    std::unique_ptr<kernels::cuda::CudaDevice> own_gpu;  // null: the compute worker's
    exchange::GpuExchangeMeans means;
    SeamMonitor monitor{/*on_cpu=*/false};  // of nothing but its backend
    bool fail_next = false;
    std::unique_ptr<attention::AttentionWorkerNode> node;
    std::atomic<bool> stops = false;
    std::thread thread;
  };
  explicit LinkedCluster(const LinkedClusterOptions& options) : options_(options) {}
  bool alone() const { return options_.attention_workers == 0; }
  absl::Status Build(const std::filesystem::path& path);
  absl::Status BuildCompute();
  absl::Status AddWorker(int index);
  void Take(requests::GenerationUpdate update);

  const LinkedClusterOptions options_;
  std::unique_ptr<kernels::cuda::CudaDevice> gpu_;
  std::unique_ptr<model::LoadedModel> model_;
  std::unique_ptr<compute::CudaModel> weights_;
  proto::AttentionTable table_;
  std::shared_ptr<LoopLinks> links_ = std::make_shared<LoopLinks>();
  exchange::GpuExchangeMeans means_;
  std::unique_ptr<exchange::SharedGpu> shared_gpu_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  LinkedFrames frames_;
  int failed_ = 0;
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::unique_ptr<compute::ComputeWorkerNode> compute_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::map<uint64_t, LinkedStream> streams_;
  uint64_t requests_ = 0;
};

}  // namespace dovetail::test
