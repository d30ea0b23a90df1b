#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "base/status.h"
#include "compute_worker/cuda/cuda_model.h"
#include "engine/embedded_cluster.h"
#include "kernels/device.h"
#include "model/loaded_model.h"

namespace dovetail::cli {

// The flags of every command that runs a model, spelled as in vLLM where it has them.
// Threads: thread-compatible; a value. The functions below are for the main thread.
struct EngineFlags {
  std::string model;
  std::string load_format = "auto";
  std::string gpu_weights = "auto";
  std::string dtype = "auto";
  std::string kv_cache_dtype = "auto";
  std::string state_dtype = "float32";
  std::string placement = "request";
  int64_t max_model_len = 0;
  int max_num_seqs = 256;
  std::string max_num_batched_tokens = "auto";
  std::string prefill_itl_budget = "auto";
  int block_size = 64;
  bool enable_prefix_caching = true;
  bool spill_prefixes = true;
  bool enable_chunked_prefill = true;
  std::optional<uint64_t> seed;
  std::string kv_cache_memory = "auto";
  int attention_workers = 1;
  int compute_workers = 1;
  std::string prefill_ranks = "auto";
  int prefill_rank_tokens = 0;  // as SchedulerOptions has it
  int state_snapshots = attention::kSnapshotPercent;
  bool kv_checksums = false;
  bool deterministic = false;
  int micro_batches = 1;
  std::string device = "auto";
  std::string compute_devices;  // empty: --device
  std::string attention_device = "same";
  int threads = 0;
  int max_queued_requests = 4096;
  int replay_one_in = 0;
  bool q_first = true;
  std::string prompt_scratch = "auto";
  std::string prefill_exchange = "auto";
  std::string linear_prompts = "compute";
  std::string hand_over = "layers";
  std::string trace_file;
  bool tell_cache = false;  // no flag: what the prefix cache holds is told, for --grpc-listen
};

// Adds MODEL and the flags to a command.
void AddEngineFlags(CLI::App& command, EngineFlags& flags);

// --compute-devices and --attention-device, of commands that run all of it in their process.
void AddWorkerDeviceFlags(CLI::App& command, EngineFlags& flags);

// Parts of it, for commands that run a part of the system: weights and their device; what the scheduler decides by.
void AddWeightFlags(CLI::App& command, EngineFlags& flags);
void AddSchedulerFlags(CLI::App& command, EngineFlags& flags);
void AddStateSnapshotsFlag(CLI::App& command, int& percent);
void AddKvChecksumsFlag(CLI::App& command, bool& checksums);
inline attention::Digests DigestsOf(bool kv_checksums) {
  return kv_checksums ? attention::Digests::kOfFinishedBlocks : attention::Digests::kNone;
}

// What the flags mean. attention, model_digest and a max_model_len of 0 are for the caller to fill in.
scheduler::SchedulerOptions SchedulerOptionsOf(const EngineFlags& flags);
absl::StatusOr<compute::ComputeWorkerTuning> TuningOf(const EngineFlags& flags);
DType KvDtypeOf(const EngineFlags& flags);  // on the wire
attention::KvStorage KvStorageOf(const std::string& kv_cache_dtype);
DType StateDtypeOf(const EngineFlags& flags);
// Where the model's dense layers run (device_choice.h).
absl::StatusOr<std::unique_ptr<kernels::Device>> CreateDevice(const EngineFlags& flags,
                                                              const model::Checkpoint& checkpoint);
// Checks --max-model-len, logs the checkpoint's warnings.
absl::StatusOr<std::unique_ptr<model::Checkpoint>> OpenModel(const EngineFlags& flags);
// A model with its weights where `device` computes. Destroyed before the device.
struct ModelOnDevice {
  std::unique_ptr<model::LoadedModel> model;
  std::unique_ptr<compute::CudaModel> on_gpu;  // null on the CPU
};
absl::StatusOr<ModelOnDevice> LoadOpenModel(const EngineFlags& flags, std::unique_ptr<model::Checkpoint> checkpoint,
                                            kernels::Device& device, const model::LoadProgress& progress);

compute::GpuWeights GpuWeightsOf(const EngineFlags& flags);

// What its results depend on in addition to the model and the types on the wire: control::Capabilities::arithmetic.
std::string ArithmeticOf(const EngineFlags& flags, const kernels::Device& device, const ModelOnDevice& model);

// A model being served in this process. Members are destroyed in reverse order: the cluster before what it runs on.
// Threads: one thread starts and destroys it; the engine itself is thread-safe.
struct RunningEngine {
  std::unique_ptr<kernels::Device> device, attention_device;  // the second is null where it is the first
  std::unique_ptr<model::LoadedModel> model;
  std::unique_ptr<compute::CudaModel> on_gpu;  // null on the CPU
  // Of --compute-devices those after the first.
  struct ComputeDevice {
    std::unique_ptr<kernels::cuda::CudaDevice> gpu;
    std::unique_ptr<compute::CudaModel> weights;
  };
  std::vector<ComputeDevice> more_compute_devices;
  std::unique_ptr<engine::EmbeddedCluster> cluster;
  int64_t max_model_len = 0;
  int max_step_tokens = 0;
  DType kv_dtype = DType::kBF16;
  attention::KvStorage kv_storage = attention::KvStorage::kAsSent;
};

// [bytes] KvRoomOn() in kv_capacity.h, or 0: unknown.
uint64_t KvRoomOf(kernels::cuda::CudaDevice& gpu);

// Opens, loads and starts. Errors name the flag or the file. `progress` may be empty.
// `spans` gets the spans of sampled traces and outlives the engine; null: none are recorded.
absl::StatusOr<RunningEngine> StartEngine(const EngineFlags& flags, const model::LoadProgress& progress,
                                          SpanSink* spans = nullptr);

// A progress bar on stderr if that is a terminal, else nothing.
model::LoadProgress TerminalProgress(const std::string& what);

// "8GiB", "512MiB", "1073741824" -> bytes. kInvalidArgument names the flag, and what it takes; `words`, as "auto", are
// what the caller takes in place of a size.
absl::StatusOr<uint64_t> ParseBytes(const std::string& flag, const std::string& text, const std::string& words = "");

}  // namespace dovetail::cli
