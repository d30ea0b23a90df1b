#include "server/cli/engine_flags.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "attention_worker/attention_backend.h"
#include "base/log.h"
#include "compute_worker/attention_specs.h"
#include "engine/device_choice.h"
#include "engine/host_limits.h"
#include "kernels/thread_pool.h"
#include "model/checkpoint.h"
#include "model/dummy_checkpoint.h"
#include "proto/sequence_frames.h"
#include "proto/step_plan.h"
#include "scheduler/core/limits.h"
#include "server/cli/attention_places.h"
#include "server/cli/command_line.h"
#include "server/cli/compute_devices.h"
#include "server/cli/deterministic_flags.h"
#include "server/cli/itl_budget_flag.h"
#include "server/cli/kv_capacity.h"
#include "server/cli/model_text.h"
#include "server/cli/prefill_flags.h"
#include "server/cli/whole_path.h"

namespace dovetail::cli {
namespace {

constexpr int kMostAdaptedMicroBatches = 4;

// CLI11's own `|` puts both errors into one.
CLI::Validator WholeNumberOrAuto(int64_t min, int64_t max, const std::string& remedy) {
  return CLI::Validator([number = WholeNumber(min, max, remedy)](
                            const std::string& text) { return text == "auto" ? std::string() : number(text); },
                        "");
}

void AddWeightFormatFlags(CLI::App& command, EngineFlags& flags) {
  command
      .add_option("--dtype", flags.dtype,
                  "Weights: auto keeps quantised blocks and otherwise the file's type; or float32, bfloat16")
      ->check(OneOf({"auto", "float32", "bfloat16"}))
      ->type_name("TYPE")
      ->group("Model");
  command
      .add_option("--load-format", flags.load_format,
                  "auto: the weights that MODEL holds; dummy: random ones for the shape that its config.json says, "
                  "made on a GPU, to measure with")
      ->check(OneOf({"auto", "dummy"}))
      ->type_name("FORMAT")
      ->group("Model");
  command
      .add_option("--gpu-weights", flags.gpu_weights,
                  "Weights that a file has in 4 or 8 bits, on a GPU: keep them so, which reads less for each token "
                  "but unpacks them for each prompt; or dequantise them once to 16 bits; auto: keep where 16 bits "
                  "would take more than half of the free memory")
      ->check(OneOf({"auto", "keep", "dequantise"}))
      ->type_name("HOW")
      ->group("Model");
  command
      .add_option("--kv-cache-dtype", flags.kv_cache_dtype,
                  "K and V, in memory and on the wire: bfloat16, float16, float32; 8 bits in memory, bfloat16 on the "
                  "wire: int8 (int8_per_token_head), with a scale for each token and head, on CPUs; fp8_e4m3 (fp8); "
                  "auto: float32 with --dtype float32, else bfloat16")
      ->check(OneOf({"auto", "bfloat16", "float16", "float32", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"}))
      ->type_name("TYPE")
      ->group("KV cache");
  command
      .add_option("--state-dtype", flags.state_dtype,
                  "Linear states in memory: float32, or bfloat16 (half as large, and rounded every 64 tokens)")
      ->check(OneOf({"float32", "bfloat16", "f32", "bf16"}))
      ->type_name("TYPE")
      ->group("KV cache");
}

void AddLayerFlags(CLI::App& command, EngineFlags& flags) {
  command
      .add_option(
          "--device,--compute-device", flags.device,
          "Where the layers run: cpu, cuda:N, cuda (a GPU that can run the model), or auto (such a GPU, else the CPU)")
      ->type_name("DEVICE")
      ->group("Device");
  command.add_option("--threads", flags.threads, "Compute threads that all workers share; 0: one per core")
      ->check(WholeNumber(0, kernels::ThreadPool::kMaxThreads, "0 takes one per core"))
      ->type_name("N")
      ->group("Device");
  command
      .add_flag("--q-first,!--no-q-first", flags.q_first,
                "Send q before k and v are computed, so that attention begins earlier [on]")
      ->group("Disaggregation");
  command
      .add_option(
          "--prompt-scratch", flags.prompt_scratch,
          "Memory for K and V of prompts that the compute worker attends itself, as 512MiB; 0: prompts are "
          "attended on attention workers; auto: a few steps, on a GPU an eighth of its free memory, or none where it "
          "exchanges layers with GPUs of attention workers; own: that memory there, too")
      ->type_name("SIZE")
      ->group("Disaggregation");
  command
      .add_option(
          "--linear-prompts", flags.linear_prompts,
          "Where linear-attention layers of prompts run: compute (workers; states cross, of a size that does "
          "not depend on the length), or attention (workers; tokens cross). Always attention where a GPU has both "
          "workers, and on GPUs before Hopper")
      ->check(OneOf({"compute", "attention"}))
      ->type_name("WHERE")
      ->group("Disaggregation");
  command
      .add_option("--hand-over", flags.hand_over,
                  "When K and V of prompts go to attention workers: layers (as they are computed), or end (of a step)")
      ->check(OneOf({"layers", "end"}))
      ->type_name("WHEN")
      ->group("Disaggregation");
  command
      .add_option("--trace-file", flags.trace_file,
                  "Write what each worker did when, as a Chrome trace, at the end (chrome://tracing shows it)")
      ->type_name("FILE")
      ->group("Device");
}

void AddSequenceFlags(CLI::App& command, EngineFlags& flags) {
  command
      .add_option("--max-model-len", flags.max_model_len,
                  "Longest sequence, prompt and output together; 0: what the model was made for")
      ->check(WholeNumber(0, int64_t{proto::kMaxSequenceBlocks} * kSegmentTokens, "0 takes what the model allows"))
      ->type_name("TOKENS")
      ->group("Model");
  command
      .add_option("--seed", flags.seed,
                  "Seed of requests that bring none, so that they repeat themselves; without it they differ")
      ->check(WholeNumber(0, INT64_MAX))
      ->type_name("N")
      ->default_str("")
      ->group("Model");
  command
      .add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", flags.enable_prefix_caching,
                "Reuse the KV of equal prompt beginnings, of the same API key only [on]")
      ->group("KV cache");
  command.add_option("--max-num-seqs", flags.max_num_seqs, "Sequences that run at a time; more wait")
      ->check(WholeNumber(1, proto::kMaxStepEntries))
      ->type_name("N")
      ->group("Scheduling");
  command
      .add_option(
          "--max-num-batched-tokens", flags.max_num_batched_tokens,
          "New tokens of a step, of all sequences; less means smaller gaps while long prompts are read; auto: 512 "
          "where layers run on a CPU, 8192 on a GPU")
      ->check(WholeNumberOrAuto(1, proto::kMaxStepTokens, "auto chooses by the device"))
      ->type_name("auto|TOKENS")
      ->group("Scheduling");
  AddItlBudgetFlag(command, "Scheduling", flags.prefill_itl_budget);
  command
      .add_flag("--enable-chunked-prefill,!--no-enable-chunked-prefill", flags.enable_chunked_prefill,
                "Mix pieces of long prompts with decoding [on]")
      ->group("Scheduling");
  command
      .add_option("--max-num-queued-reqs", flags.max_queued_requests,
                  "Requests that wait; one more is refused with Retry-After")
      ->check(WholeNumber(1, scheduler::kMaxQueuedRequests))
      ->type_name("N")
      ->group("Scheduling");
  command
      .add_option("--replay-one-in", flags.replay_one_in,
                  "Compute one finished request in N again while no request waits, on other workers where there are "
                  "any, and compare the tokens; a difference is logged with the worker that differs; 0: none")
      ->check(WholeNumber(0, 1 << 30))
      ->type_name("N")
      ->group("Scheduling");
}

void AddDisaggregationFlags(CLI::App& command, EngineFlags& flags) {
  command
      .add_option(
          "--placement", flags.placement,
          "How sequences lie over them: request (whole), heads, tokens, mixed (in turn), or tiers (whole on the "
          "fastest with room; what is too long for one continues on others, and what gives way moves to one "
          "with room)")
      ->check(OneOf({"request", "heads", "tokens", "mixed", "tiers"}))
      ->type_name("HOW")
      ->group("Disaggregation");
  command
      .add_flag("--prefix-spill,!--no-prefix-spill", flags.spill_prefixes,
                "With --placement tiers: what ended sequences left in the prefix cache of a fast tier is copied to a "
                "slower one while nothing waits, and moves up again for a prompt that begins with it [on]")
      ->group("KV cache");
  command
      .add_option("--micro-batches", flags.micro_batches,
                  "Steps in flight of a compute worker: while one is in dense layers another is in attention; 0: as "
                  "many as the measured times ask for")
      ->check(WholeNumber(0, scheduler::kMaxMicroBatches, "0 takes as many as the measured times ask for"))
      ->type_name("N")
      ->group("Disaggregation");
  command
      .add_option("--prefill-ranks", flags.prefill_ranks,
                  "Compute workers that prefill one long prompt together, each a part of its tokens; auto: of those "
                  "that are free, as many as are predicted to be fastest; 1: each prompt stays on one")
      ->check(WholeNumber(1, proto::kMaxPrefillRanks, "auto takes as many as are fastest") | OneOf({"auto"}))
      ->type_name("auto|N")
      ->group("Disaggregation");
  command
      .add_option("--prefill-rank-tokens", flags.prefill_rank_tokens,
                  "The least that each of them gets of a prompt: shorter prompts have fewer ranks; 0: 1024, or 4096 "
                  "where layers run on GPUs and --prefill-ranks is auto")
      ->check(WholeNumber(0, proto::kMaxStepTokens))
      ->type_name("TOKENS")
      ->group("Disaggregation");
  command
      .add_option(
          "--prefill-exchange", flags.prefill_exchange,
          "How a prompt's step gets at earlier tokens that its compute worker does not have: plane (queries go "
          "to the attention workers), gather (K and V come from there, as far as --prompt-scratch has room), "
          "gather-direct (as gather, but the compute workers that divide a prompt give each other its K and V, "
          "and the states of linear layers), ring (likewise, but K and V go from each to the next one, and little of "
          "them is held at a time), switch (each of them gets q, k and v of some heads of all the prompt's tokens, "
          "attends to those, and gives back what that made; likewise in linear layers, or states as with gather-direct "
          "where these have fewer heads), pass-q (each of them sends queries to those that have the tokens before, "
          "which attend and send partials back; states as with gather-direct), chain (as plane, and they give each "
          "other those states), or auto: what is predicted to be fastest, by measured rates")
      ->check(OneOf({"auto", "plane", "gather", "gather-direct", "ring", "switch", "pass-q", "chain"}))
      ->type_name("HOW")
      ->group("Disaggregation");
}

}  // namespace

void AddWeightFlags(CLI::App& command, EngineFlags& flags) {
  AddWeightFormatFlags(command, flags);
  AddLayerFlags(command, flags);
  AddDeterministicFlag(command, flags);
}

void AddSchedulerFlags(CLI::App& command, EngineFlags& flags) {
  AddSequenceFlags(command, flags);
  AddDisaggregationFlags(command, flags);
}

void AddStateSnapshotsFlag(CLI::App& command, int& percent) {
  command
      .add_option("--state-snapshots", percent,
                  "Part of the KV cache, in percent, that snapshots of linear states may keep for prompts that begin "
                  "alike; 0: none that no running sequence holds")
      ->check(WholeNumber(0, 100))
      ->type_name("PERCENT")
      ->group("KV cache");
}

void AddKvChecksumsFlag(CLI::App& command, bool& checksums) {
  command
      .add_flag("--kv-checksums", checksums,
                "Keep a checksum of each finished KV block, and compare it when the block is taken from the prefix "
                "cache or moved: what memory has changed is computed again [off]")
      ->group("KV cache");
}

namespace {

void AddCacheFlags(CLI::App& command, EngineFlags& flags) {
  command
      .add_option("--kv-cache-memory-bytes", flags.kv_cache_memory,
                  "Size of the KV cache over all attention workers, as 8GiB; auto: what --max-num-seqs sequences "
                  "of full length need, within a quarter of this machine's memory")
      ->type_name("SIZE")
      ->group("KV cache");
  command.add_option("--block-size", flags.block_size, "Tokens of a KV block; 64 is the only size there is")
      ->check(WholeNumber(kSegmentTokens, kSegmentTokens, "KV blocks have one size; leave the flag out"))
      ->type_name("TOKENS")
      ->group("KV cache");
  AddStateSnapshotsFlag(command, flags.state_snapshots);
  AddKvChecksumsFlag(command, flags.kv_checksums);
  command
      .add_option("--attention-workers", flags.attention_workers,
                  "Attention workers in this process, each with a KV cache of its own")
      ->check(WholeNumber(1, engine::kMaxAttentionWorkers))
      ->type_name("N")
      ->group("Disaggregation");
  command
      .add_option("--compute-workers", flags.compute_workers,
                  "Compute workers in this process, on the one --device or in turn on those of --compute-devices: they "
                  "divide requests and long prompts")
      ->check(WholeNumber(1, engine::kMaxComputeWorkers))
      ->type_name("N")
      ->group("Disaggregation");
}

}  // namespace

void AddEngineFlags(CLI::App& command, EngineFlags& flags) {
  command.add_option("MODEL", flags.model, "A .gguf file, or a Hugging Face folder (config.json and safetensors)")
      ->required();
  AddWeightFlags(command, flags);
  AddCacheFlags(command, flags);
  AddSchedulerFlags(command, flags);
}

void AddWorkerDeviceFlags(CLI::App& command, EngineFlags& flags) {
  AddComputeDevicesFlag(command, flags);
  command
      .add_option(
          "--attention-device", flags.attention_device,
          "Where the KV cache and attention are: cpu, cuda:N, or same (where layers run, on each of several GPUs). "
          "Or a list with sizes, as cuda:0=8GiB,cpu=64GiB, for --placement tiers")
      ->type_name("DEVICE")
      ->group("Device");
}

absl::StatusOr<uint64_t> ParseBytes(const std::string& flag, const std::string& text, const std::string& words) {
  const absl::Status none = InvalidArgument(flag, ": '", text, "' is no size; write 8GiB, 512MiB or a number of bytes",
                                            words.empty() ? "" : ", or ", words);
  double value = 0;
  int used = 0;
  if (std::sscanf(text.c_str(), "%lf%n", &value, &used) != 1 || !std::isfinite(value) || value < 0) return none;
  const std::string unit = text.substr(used);
  double factor = 0;
  for (const auto& [name, bytes] : {std::pair<const char*, double>{"", 1},
                                    {"B", 1},
                                    {"KiB", 1024},
                                    {"MiB", 1 << 20},
                                    {"GiB", 1 << 30},
                                    {"TiB", std::ldexp(1, 40)},
                                    {"KB", 1e3},
                                    {"MB", 1e6},
                                    {"GB", 1e9}})
    if (unit == name) factor = bytes;
  if (factor == 0 || value * factor > std::ldexp(1, 62)) return none;
  return static_cast<uint64_t>(value * factor);
}

model::LoadProgress TerminalProgress(const std::string& what) {
  if (!isatty(STDERR_FILENO)) return {};
  return [what, last = -1](double done) mutable {
    const int percent = static_cast<int>(done * 100);
    if (percent == last) return;
    last = percent;
    const std::string bar(percent * 30 / 100, '#');
    std::fprintf(stderr, "\r%s [%-30s] %3d %%%s", what.c_str(), bar.c_str(), percent, percent == 100 ? "\n" : "");
  };
}

DType KvDtypeOf(const EngineFlags& flags) {
  if (flags.kv_cache_dtype == "float32") return DType::kF32;
  if (flags.kv_cache_dtype == "float16") return DType::kF16;
  if (flags.kv_cache_dtype == "bfloat16") return DType::kBF16;
  if (KvStorageOf(flags.kv_cache_dtype) != attention::KvStorage::kAsSent) return DType::kBF16;
  return flags.dtype == "float32" ? DType::kF32 : DType::kBF16;
}

attention::KvStorage KvStorageOf(const std::string& kv_cache_dtype) {
  if (kv_cache_dtype == "fp8_e4m3" || kv_cache_dtype == "fp8") return attention::KvStorage::kE4M3;
  if (kv_cache_dtype == "int8" || kv_cache_dtype == "int8_per_token_head") return attention::KvStorage::kInt8;
  return attention::KvStorage::kAsSent;
}

DType StateDtypeOf(const EngineFlags& flags) {
  return flags.state_dtype == "bfloat16" || flags.state_dtype == "bf16" ? DType::kBF16 : DType::kF32;
}

namespace {

model::WeightFormat WeightFormatOf(const EngineFlags& flags) {
  if (flags.dtype == "float32") return model::WeightFormat::kF32;
  return flags.dtype == "bfloat16" ? model::WeightFormat::kBF16 : model::WeightFormat::kAuto;
}

scheduler::PlacementPolicy PlacementOf(const EngineFlags& flags) {
  if (flags.placement == "heads") return scheduler::PlacementPolicy::kHeads;
  if (flags.placement == "tokens") return scheduler::PlacementPolicy::kTokens;
  if (flags.placement == "tiers") return scheduler::PlacementPolicy::kTiers;
  return flags.placement == "mixed" ? scheduler::PlacementPolicy::kMixed : scheduler::PlacementPolicy::kRequest;
}

}  // namespace

scheduler::SchedulerOptions SchedulerOptionsOf(const EngineFlags& flags) {
  scheduler::SchedulerOptions options;
  options.max_num_seqs = flags.max_num_seqs;
  options.max_num_batched_tokens =
      flags.max_num_batched_tokens == "auto" ? 0 : std::atoi(flags.max_num_batched_tokens.c_str());
  options.prefill_itl_budget = ItlBudgetOf(flags.prefill_itl_budget);
  options.max_model_len = static_cast<int>(flags.max_model_len);
  options.max_queued_requests = flags.max_queued_requests;
  options.replay_one_in = flags.replay_one_in;
  options.prefill_ranks = flags.prefill_ranks == "auto" ? 0 : std::atoi(flags.prefill_ranks.c_str());
  options.prefill_rank_tokens = flags.prefill_rank_tokens;
  if (flags.prefill_exchange == "gather") options.prefill_exchange = proto::PrefixExchange::kGather;
  if (flags.prefill_exchange == "auto") {
    options.prefill_exchange.reset();
    options.linear_exchange.reset();
  }
  if (flags.prefill_exchange == "gather-direct") options.prefill_exchange = proto::PrefixExchange::kGatherDirect;
  if (flags.prefill_exchange == "ring") options.prefill_exchange = proto::PrefixExchange::kRing;
  if (flags.prefill_exchange == "switch") options.prefill_exchange = proto::PrefixExchange::kSwitch;
  if (flags.prefill_exchange == "pass-q") options.prefill_exchange = proto::PrefixExchange::kPassQ;
  // Where linear layers run on attention workers, there are no states to hand on.
  const bool direct = flags.prefill_exchange == "chain" || flags.prefill_exchange == "gather-direct" ||
                      flags.prefill_exchange == "ring" || flags.prefill_exchange == "switch" ||
                      flags.prefill_exchange == "pass-q";
  if (direct && flags.linear_prompts == "compute")
    options.linear_exchange =
        flags.prefill_exchange == "switch" ? proto::LinearExchange::kSwitch : proto::LinearExchange::kChain;
  options.adapt_micro_batches = flags.micro_batches == 0;
  options.micro_batches = flags.micro_batches == 0 ? kMostAdaptedMicroBatches : flags.micro_batches;
  options.enable_prefix_caching = flags.enable_prefix_caching;
  options.spill_prefixes = flags.spill_prefixes;
  options.enable_chunked_prefill = flags.enable_chunked_prefill;
  options.placement = PlacementOf(flags);
  return options;
}

absl::StatusOr<compute::ComputeWorkerTuning> TuningOf(const EngineFlags& flags) {
  compute::ComputeWorkerTuning tuning;
  tuning.q_first = flags.q_first;
  tuning.deterministic = flags.deterministic;
  tuning.kv_storage = KvStorageOf(flags.kv_cache_dtype);
  tuning.hand_over_at_end = flags.hand_over == "end";
  tuning.linear_prompts = flags.linear_prompts == "compute";
  tuning.prompts_here = flags.prompt_scratch == "own";
  if (flags.prompt_scratch != "auto" && !tuning.prompts_here) {
    DT_ASSIGN_OR_RETURN(tuning.prompt_scratch_bytes,
                        ParseBytes("--prompt-scratch", flags.prompt_scratch, "auto, or own"));
    const bool gathers = flags.prefill_exchange == "gather" || flags.prefill_exchange == "gather-direct" ||
                         flags.prefill_exchange == "ring";
    if (tuning.prompt_scratch_bytes == 0u && gathers)
      return InvalidArgument("--prefill-exchange ", flags.prefill_exchange,
                             ": K and V that are gathered lie in the prompt scratch, and --prompt-scratch is 0; "
                             "give it memory, or take plane");
  }
  return tuning;
}

absl::StatusOr<std::unique_ptr<kernels::Device>> CreateDevice(const EngineFlags& flags,
                                                              const model::Checkpoint& checkpoint) {
  engine::DeviceRequest request{flags.device, flags.threads, flags.dtype == "float32", KvDtypeOf(flags)};
  request.weight_bytes = compute::CudaModel::WeightBytes(checkpoint.config());
  const bool dummy = flags.load_format == "dummy";  // kept where that is asked for only
  const compute::GpuWeights weights = GpuWeightsOf(flags);
  if (dummy ? weights == compute::GpuWeights::kKeep : weights != compute::GpuWeights::kDequantise) {
    DT_ASSIGN_OR_RETURN(const uint64_t kept, compute::CudaModel::KeptWeightBytes(checkpoint, dummy));
    request.weight_bytes = std::min(request.weight_bytes, kept);
  }
  return engine::ChooseDevice(request, checkpoint.config());
}

absl::StatusOr<std::unique_ptr<model::Checkpoint>> OpenModel(const EngineFlags& flags) {
  auto opened =
      flags.load_format == "dummy" ? model::OpenDummyCheckpoint(flags.model) : model::OpenCheckpoint(flags.model);
  if (!opened.ok()) return OfWholePath(opened.status(), flags.model);
  std::unique_ptr<model::Checkpoint> checkpoint = *std::move(opened);
  for (const std::string& warning : checkpoint->warnings()) LogWarning(warning);
  const int64_t positions = checkpoint->config().max_positions;
  if (flags.max_model_len > positions)
    return InvalidArgument("--max-model-len: ", flags.max_model_len, " exceeds the ", positions, " positions that ",
                           checkpoint->name(), " was made for; ask for at most that, or for 0");
  if (StateDtypeOf(flags) != DType::kF32 && !checkpoint->config().state)
    LogWarning("--state-dtype: ", checkpoint->name(), " has no linear states; the flag changes nothing");
  return checkpoint;
}

compute::GpuWeights GpuWeightsOf(const EngineFlags& flags) {
  if (flags.deterministic) return compute::GpuWeights::kDequantise;
  if (flags.gpu_weights == "keep") return compute::GpuWeights::kKeep;
  return flags.gpu_weights == "dequantise" ? compute::GpuWeights::kDequantise : compute::GpuWeights::kAuto;
}

absl::StatusOr<ModelOnDevice> LoadOpenModel(const EngineFlags& flags, std::unique_ptr<model::Checkpoint> checkpoint,
                                            kernels::Device& device, const model::LoadProgress& progress) {
  ModelOnDevice loaded;
  kernels::cuda::CudaDevice* const gpu = engine::AsGpu(device);
  const auto stream = device.CreateStream();
  if (stream == nullptr) return Internal(device.name(), ": no stream can be made");
  const bool dummy = flags.load_format == "dummy";
  if (dummy && gpu == nullptr)
    return FailedPrecondition("--load-format dummy: random weights are made on a GPU, but ", checkpoint->name(),
                              " would run on the CPU; --device cuda:0 says why");
  DT_ASSIGN_OR_RETURN(
      loaded.model,
      model::LoadModel(std::move(checkpoint), gpu != nullptr ? model::WeightFormat::kElsewhere : WeightFormatOf(flags),
                       &stream->pool(), gpu != nullptr ? model::LoadProgress{} : progress));
  loaded.model->grammars = MakeGrammars(*loaded.model->checkpoint);
  if (gpu == nullptr) return loaded;
  DT_ASSIGN_OR_RETURN(loaded.on_gpu, compute::CudaModel::Load(*gpu, *loaded.model, KvDtypeOf(flags), dummy,
                                                              GpuWeightsOf(flags), progress));
  if (loaded.on_gpu->keeps())
    LogInfo(device.name(), ": weights are kept in the file's 4 and 8 bits, ", loaded.on_gpu->weight_bytes() >> 20,
            " MiB (--gpu-weights ", flags.gpu_weights, ")");
  loaded.model->weight_bytes = loaded.on_gpu->weight_bytes();
  return loaded;
}

std::string ArithmeticOf(const EngineFlags& flags, const kernels::Device& device, const ModelOnDevice& model) {
  const std::string weights = model.on_gpu == nullptr ? absl::StrCat("--dtype ", flags.dtype)
                              : model.on_gpu->keeps() ? "--gpu-weights keep"
                                                      : "weights in 16 bits";
  const bool in_order = flags.deterministic && model.on_gpu != nullptr;
  return absl::StrCat(device.arithmetic(), ", ", weights, in_order ? ", --deterministic" : "");
}

uint64_t KvRoomOf(kernels::cuda::CudaDevice& gpu) { return KvRoomOn(gpu).value_or(0); }

namespace {

// What flags alone say of it.
absl::StatusOr<engine::EmbeddedClusterOptions> ClusterOptionsOf(const EngineFlags& flags) {
  engine::EmbeddedClusterOptions options;
  options.attention_workers = flags.attention_workers;
  if (flags.kv_cache_memory != "auto") {
    DT_ASSIGN_OR_RETURN(options.kv_cache_bytes, ParseBytes("--kv-cache-memory-bytes", flags.kv_cache_memory, "auto"));
    if (options.kv_cache_bytes == 0)
      return InvalidArgument("--kv-cache-memory-bytes: a KV cache of no bytes holds no token; write 8GiB, or auto");
  }
  options.kv_dtype = KvDtypeOf(flags);
  options.kv_storage = KvStorageOf(flags.kv_cache_dtype);
  options.state_dtype = StateDtypeOf(flags);
  options.snapshot_percent = flags.state_snapshots;
  options.digests = DigestsOf(flags.kv_checksums);
  options.seed = flags.seed.value_or(0);
  options.scheduler = SchedulerOptionsOf(flags);
  options.scheduler.tell_cache = flags.tell_cache;
  DT_ASSIGN_OR_RETURN(options.compute, TuningOf(flags));
  options.trace_file = flags.trace_file;
  return options;
}

// To what GPUs have.
void FitToGpus(const EngineFlags& flags, scheduler::SchedulerOptions& options) {
  if (options.linear_exchange == proto::LinearExchange::kSwitch)
    options.linear_exchange = proto::LinearExchange::kChain;
  if (flags.deterministic) options.prefill_ranks = 1;
}

}  // namespace

absl::StatusOr<RunningEngine> StartEngine(const EngineFlags& asked, const model::LoadProgress& progress,
                                          SpanSink* spans) {
  RunningEngine engine;
  DT_ASSIGN_OR_RETURN(const int compute_workers, ComputeWorkersOf(asked));
  DT_RETURN_IF_ERROR(CheckPrefillRanks(asked, compute_workers));
  EngineFlags flags = asked;
  const std::vector<std::string> gpus = ComputeDevicesOf(asked);
  if (!gpus.empty()) flags.device = gpus.front();
  DT_ASSIGN_OR_RETURN(std::unique_ptr<model::Checkpoint> checkpoint, OpenModel(flags));
  DT_ASSIGN_OR_RETURN(engine.device, CreateDevice(flags, *checkpoint));
  DT_RETURN_IF_ERROR(OpenComputeDevices(flags, gpus, *checkpoint, engine));
  std::vector<engine::EmbeddedClusterOptions::AttentionPlace> places;
  if (HasAttentionPlaces(flags, compute_workers)) {
    DT_ASSIGN_OR_RETURN(places, OpenAttentionPlaces(flags, compute_workers, engine));
  } else if (flags.attention_device != "same" && flags.attention_device != engine.device->name()) {
    const int spin_us = engine::AsGpu(*engine.device) != nullptr ? engine::kSpinBesideGpuUs : engine::kSpinUs;
    DT_ASSIGN_OR_RETURN(engine.attention_device,
                        engine::OpenDevice("--attention-device", flags.attention_device, flags.threads, spin_us));
  }
  if (const auto table = compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(flags), StateDtypeOf(flags));
      table.ok()) {
    if (!flags.deterministic) ChooseExchangeOfGpus(*table, engine, /*pairs=*/!places.empty(), flags);
    const bool on_gpu = engine::AsGpu(*engine.device) != nullptr;
    const bool on_its_gpu = engine.attention_device == nullptr || places.size() > 1;
    const bool cache_on_its_gpu = on_gpu && on_its_gpu && compute_workers == 1;
    DT_RETURN_IF_ERROR(CheckPrefillExchange(flags, *table, on_gpu, cache_on_its_gpu));
    kernels::Device& attending = on_its_gpu ? *engine.device : *engine.attention_device;
    DT_RETURN_IF_ERROR(attention::CheckKvStorage(*table, KvStorageOf(flags.kv_cache_dtype),
                                                 engine::AsGpu(attending) != nullptr ? attending.name() : ""));
  }
  DT_RETURN_IF_ERROR(CheckDeterministicPlaces(flags, engine, places));
  engine::WarnOfWhatIsShort({.threads = flags.threads,
                             .on_cpu = engine::AsGpu(*engine.device) == nullptr || engine.attention_device != nullptr});
  engine.max_model_len = flags.max_model_len == 0 ? checkpoint->config().max_positions : flags.max_model_len;

  DT_ASSIGN_OR_RETURN(engine::EmbeddedClusterOptions options, ClusterOptionsOf(flags));
  options.compute_workers = compute_workers;
  engine.kv_dtype = options.kv_dtype;
  engine.kv_storage = options.kv_storage;
  options.spans = spans;
  options.scheduler.max_model_len = static_cast<int>(engine.max_model_len);
  options.scheduler.ChooseStepTokens(engine::AsGpu(*engine.device) != nullptr);
  if (engine::AsGpu(*engine.device) != nullptr) FitToGpus(flags, options.scheduler);
  engine.max_step_tokens = options.scheduler.max_num_batched_tokens;

  DT_ASSIGN_OR_RETURN(ModelOnDevice loaded, LoadOpenModel(flags, std::move(checkpoint), *engine.device, progress));
  engine.model = std::move(loaded.model);
  engine.on_gpu = std::move(loaded.on_gpu);
  DT_RETURN_IF_ERROR(LoadOnComputeDevices(flags, progress, engine));
  options.compute.dense = engine.on_gpu.get();
  for (const RunningEngine::ComputeDevice& more : engine.more_compute_devices)
    options.more_compute_devices.push_back({more.gpu.get(), more.weights.get()});
  options.attention_device = engine.attention_device.get();
  options.attention_places = std::move(places);
  kernels::Device& cache = engine.attention_device != nullptr ? *engine.attention_device : *engine.device;
  if (kernels::cuda::CudaDevice* const gpu = engine::AsGpu(cache); gpu != nullptr)
    options.kv_room = [gpu] { return KvRoomOf(*gpu); };
  DT_ASSIGN_OR_RETURN(engine.cluster, engine::EmbeddedCluster::Create(*engine.model, *engine.device, options));
  return engine;
}

}  // namespace dovetail::cli
