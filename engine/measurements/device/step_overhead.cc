#include "engine/measurements/device/step_overhead.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compute_worker/cuda/cuda_model.h"
#include "engine/device_choice.h"
#include "engine/embedded_cluster.h"
#include "engine/measurements/device/gpu_rates.h"
#include "engine/measurements/engine_measurements.h"
#include "model/dummy_checkpoint.h"

namespace dovetail::engine {
namespace {

namespace fs = std::filesystem;

// Steps of a millisecond at most: some run undisturbed on a machine that has other work. A GPU takes other kernels for
// a few sequences than for many, which a line between one and many passes over.
constexpr int kCpuBatch = 32, kGpuBatch = 256, kTokens = 192, kRounds = 3, kPromptTokens = 4;
constexpr int kTries = 20;
constexpr int kFewLayers = 4, kManyLayers = 20, kFewWideLayers = 1, kManyWideLayers = 3;
constexpr int kLongest = 2048, kStepTokens = 512;
constexpr int kGpuWide = 2048, kGpuPrompt = 4096, kGpuHeadDim = 128, kPromptRounds = 6;
constexpr double kPointSeconds = 0.05;
constexpr int kProducts = 7;  // of a layer: q, k, v, o, gate, up, down
constexpr int kNarrow = 64, kWide = 256, kVocabulary = 512, kLargeVocabulary = 32768, kHeadDim = 32;
constexpr int kStateDim = 64;

enum class Layers : uint8_t { kSoftmax, kLinear };

// Llama's shape: each of its seven products is `width` by `width`. kLinear: Qwen3.5's shape, with a gated DeltaNet head
// of kStateDim in each layer and none of attention.
struct SmallModel {
  int layers = kFewLayers, width = kNarrow, vocabulary = kVocabulary, head_dim = kHeadDim;
  Layers kind = Layers::kSoftmax;
};

struct RemoveFolder {
  fs::path path;
  ~RemoveFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

std::string ConfigOf(const SmallModel& shape) {
  const bool linear = shape.kind == Layers::kLinear;
  std::string text = absl::StrFormat(
      R"({"architectures": ["%s"], "model_type": "%s", "hidden_act": "silu", "hidden_size": %d,
 "intermediate_size": %d, "max_position_embeddings": 8192, "num_attention_heads": %d, "num_hidden_layers": %d,
 "num_key_value_heads": %d, "head_dim": %d, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "vocab_size": %d)",
      linear ? "Qwen3_5ForCausalLM" : "LlamaForCausalLM", linear ? "qwen3_5_text" : "llama", shape.width, shape.width,
      shape.width / shape.head_dim, shape.layers, shape.width / shape.head_dim, shape.head_dim, shape.vocabulary);
  if (linear)
    absl::StrAppendFormat(
        &text,
        R"(, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": %d,
 "linear_value_head_dim": %d, "linear_conv_kernel_dim": 4, "layer_types": ["%s"])",
        kStateDim, kStateDim,
        absl::StrJoin(std::vector<std::string>(static_cast<size_t>(shape.layers), "linear_attention"), R"(", ")"));
  return text + "}";
}

// `gpu`: weights are left to it.
absl::StatusOr<std::unique_ptr<model::LoadedModel>> Load(const SmallModel& shape, bool gpu, kernels::ThreadPool& pool) {
  std::error_code error;
  std::string pattern = (fs::temp_directory_path(error) / "dovetail-device-XXXXXX").string();
  if (error || mkdtemp(pattern.data()) == nullptr) return ResourceExhausted("no folder can be made in ", pattern);
  const RemoveFolder folder{pattern};
  std::ofstream(folder.path / "config.json") << ConfigOf(shape);
  DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenDummyCheckpoint(folder.path));
  const auto format = gpu ? model::WeightFormat::kElsewhere : model::WeightFormat::kAuto;
  return model::LoadModel(std::move(checkpoint), format, &pool, {});
}

// Seconds of the fastest step that decodes `sequences`, since what else the machine does only adds to them.
// 0: there was none.
double SecondsOfSteps(const std::vector<StepSample>& samples, int sequences) {
  double best = 0;
  for (const StepSample& sample : samples) {
    const double seconds = static_cast<double>(sample.total_us) * 1e-6;
    if (sample.sequences == sequences && sample.new_tokens == sequences && (best == 0 || seconds < best))
      best = seconds;
  }
  return best;
}

// From one token to the next of a sequence that is alone: a step, and what comes between two.
absl::StatusOr<double> MeasureAlone(Engine& engine, PromptSource& prompts) {
  double between = std::numeric_limits<double>::infinity(), step = between;
  for (int round = 0; round < kRounds; ++round) {
    engine.TakeStepSamples();
    DT_ASSIGN_OR_RETURN(const Window window, MeasureDecode(engine, prompts, kTokens));
    const std::vector<StepSample> samples = engine.TakeStepSamples();
    double steps = 0;
    for (const StepSample& sample : samples) steps += static_cast<double>(sample.total_us) * 1e-6;
    between = std::min(between, std::max(0.0, window.seconds - steps) / kTokens);
    step = std::min(step, SecondsOfSteps(samples, 1));
  }
  return step + between;
}

// Of a step only. Where this process does not get its turn, requests may end before the last has begun: then again.
absl::StatusOr<double> MeasureFullBatch(Engine& engine, PromptSource& prompts, int sequences) {
  const BatchShape shape{.sequences = sequences, .prompt_tokens = kPromptTokens, .output_tokens = kTokens};
  absl::Status status;
  for (int tries = 0; tries < kTries; ++tries) {
    engine.TakeStepSamples();
    status = MeasureBatch(engine, prompts, shape).status();
    if (!status.ok() && !absl::IsFailedPrecondition(status)) return status;
    if (const double seconds = SecondsOfSteps(engine.TakeStepSamples(), sequences); seconds > 0) return seconds;
  }
  return status;
}

int BatchOf(kernels::Device& device) { return AsGpu(device) != nullptr ? kGpuBatch : kCpuBatch; }

// A small model in an engine of its own.
struct SmallEngine {
  std::unique_ptr<model::LoadedModel> model;
  std::unique_ptr<compute::CudaModel> on_gpu;  // null on a CPU
  std::unique_ptr<EmbeddedCluster> cluster;
};

absl::StatusOr<SmallEngine> Start(const SmallModel& shape, int step_tokens, kernels::Device& device, int threads) {
  SmallEngine engine;
  const auto stream = device.CreateStream();
  kernels::cuda::CudaDevice* const gpu = AsGpu(device);
  DT_ASSIGN_OR_RETURN(engine.model, Load(shape, gpu != nullptr, stream->pool()));
  EmbeddedClusterOptions options;
  options.threads = threads;
  options.kv_cache_bytes = uint64_t{gpu != nullptr ? 512u : 64u} << 20;
  options.scheduler.max_model_len = std::max(kLongest, step_tokens + kSegmentTokens);
  options.scheduler.max_num_seqs = BatchOf(device);
  options.scheduler.max_num_batched_tokens = step_tokens;
  options.scheduler.enable_prefix_caching = false;
  if (gpu != nullptr) {
    DT_ASSIGN_OR_RETURN(engine.on_gpu, compute::CudaModel::Load(*gpu, *engine.model, DType::kBF16, /*dummy=*/true,
                                                                compute::GpuWeights::kDequantise, {}));
    options.compute.dense = engine.on_gpu.get();
  }
  DT_ASSIGN_OR_RETURN(engine.cluster, EmbeddedCluster::Create(*engine.model, device, options));
  return engine;
}

absl::StatusOr<OverheadSamples::Model> Measure(const SmallModel& shape, kernels::Device& device, int threads) {
  DT_ASSIGN_OR_RETURN(const SmallEngine engine, Start(shape, kStepTokens, device, threads));
  PromptSource prompts{shape.vocabulary};
  OverheadSamples::Model times;
  DT_ASSIGN_OR_RETURN(times.alone, MeasureAlone(*engine.cluster, prompts));
  DT_ASSIGN_OR_RETURN(times.batch, MeasureFullBatch(*engine.cluster, prompts, BatchOf(device)));
  return times;
}

// Of the fastest step that reads a whole prompt.
absl::StatusOr<double> MeasurePrompt(const SmallModel& shape, int tokens, kernels::Device& device, int threads) {
  DT_ASSIGN_OR_RETURN(const SmallEngine engine, Start(shape, tokens, device, threads));
  PromptSource prompts{shape.vocabulary};
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kPromptRounds; ++round) {
    engine.cluster->TakeStepSamples();
    DT_RETURN_IF_ERROR(MeasurePrefill(*engine.cluster, prompts, tokens).status());
    for (const StepSample& sample : engine.cluster->TakeStepSamples())
      if (sample.new_tokens == tokens) best = std::min(best, static_cast<double>(sample.total_us) * 1e-6);
  }
  return best;
}

// What one layer's products take on a GPU, which runs those of one input as one: q, k and v (of linear layers also z),
// and gate and up. Its calls are in their times.
absl::StatusOr<double> GpuProductsOfLayer(kernels::cuda::CudaDevice& gpu, int64_t rows, int64_t width,
                                          Layers kind = Layers::kSoftmax) {
  double sum = 0;
  for (const int outputs : {kind == Layers::kLinear ? 4 : 3, 1, 2, 1}) {
    DT_ASSIGN_OR_RETURN(const double one, MeasureGpuProduct(gpu, rows, outputs * width, width, kPointSeconds));
    sum += one;
  }
  return sum;
}

// A GPU's layers of many rows keep it busy, so that what they take beyond products and attention is bytes, not calls.
absl::StatusOr<double> MeasureGpuValue(kernels::cuda::CudaDevice& gpu, int threads, const plan::DeviceProfile& profile,
                                       double layer_s) {
  const SmallModel few{.layers = kFewWideLayers, .width = kGpuWide, .head_dim = kGpuHeadDim};
  const SmallModel many{.layers = kManyWideLayers, .width = kGpuWide, .head_dim = kGpuHeadDim};
  DT_ASSIGN_OR_RETURN(const double few_s, MeasurePrompt(few, kGpuPrompt, gpu, threads));
  DT_ASSIGN_OR_RETURN(const double many_s, MeasurePrompt(many, kGpuPrompt, gpu, threads));
  DT_ASSIGN_OR_RETURN(const double products, GpuProductsOfLayer(gpu, kGpuPrompt, kGpuWide));
  DT_ASSIGN_OR_RETURN(const auto attention, profile.Attention(DType::kBF16, kGpuHeadDim, 1));
  const double pairs = double{kGpuPrompt} * (kGpuPrompt + 1) / 2;
  const double attended = 4.0 * kGpuWide * pairs / attention.prompt_flops_per_s;
  const double layer = (many_s - few_s) / (kManyWideLayers - kFewWideLayers);
  return std::max(0.0, (layer - layer_s - products - attended) / (kGpuPrompt * kProducts * 2.0 * kGpuWide));
}

// The small models' products take what a call takes, and a profile's rates have that in them.
absl::Status LeaveOutCalls(kernels::cuda::CudaDevice& gpu, OverheadSamples& samples) {
  DT_ASSIGN_OR_RETURN(const double alone, GpuProductsOfLayer(gpu, 1, kNarrow));
  DT_ASSIGN_OR_RETURN(const double batch, GpuProductsOfLayer(gpu, kGpuBatch, kNarrow));
  for (const auto& [model, layers] :
       {std::pair(&samples.few, kFewLayers), {&samples.many, kManyLayers}, {&samples.large_vocabulary, kFewLayers}}) {
    model->alone -= layers * alone;
    model->batch -= layers * batch;
  }
  DT_ASSIGN_OR_RETURN(const double linear, GpuProductsOfLayer(gpu, 1, kNarrow, Layers::kLinear));
  samples.few_linear -= kFewLayers * linear;
  samples.many_linear -= kManyLayers * linear;
  return absl::OkStatus();
}

// Of one sequence, less what `profile` says of the states.
absl::StatusOr<double> MeasureLinear(int layers, kernels::Device& device, int threads,
                                     const plan::DeviceProfile& profile) {
  DT_ASSIGN_OR_RETURN(const plan::StateRates states, profile.State(kStateDim, /*delta=*/true, /*vector_decay=*/false));
  const SmallModel shape{.layers = layers, .kind = Layers::kLinear};
  DT_ASSIGN_OR_RETURN(const SmallEngine engine, Start(shape, kStepTokens, device, threads));
  PromptSource prompts{shape.vocabulary};
  DT_ASSIGN_OR_RETURN(const double alone, MeasureAlone(*engine.cluster, prompts));
  return alone - layers * double{kStateDim} * kStateDim * states.decode_s_per_value;
}

}  // namespace

plan::StepOverhead FitOverhead(const OverheadSamples& s) {
  const auto positive = [](double value) { return std::max(0.0, value); };
  const int others = s.sequences - 1;
  const double layer_alone = (s.many.alone - s.few.alone) / (s.many_layers - s.few_layers);
  const double layer_batch = (s.many.batch - s.few.batch) / (s.many_layers - s.few_layers);
  const double wide_batch = (s.many_wide.batch - s.few_wide.batch) / (s.many_wide_layers - s.few_wide_layers);
  const double row = positive((layer_batch - layer_alone) / others);  // of a layer and token
  const double step_alone = s.few.alone - s.few_layers * layer_alone;
  const double step_batch = s.few.batch - s.few_layers * layer_batch;
  plan::StepOverhead out;
  out.layer_s = positive(layer_alone - row);
  out.value_s = positive((wide_batch - layer_batch) / (s.sequences * (s.wide_values - s.narrow_values)));
  out.layer_sequence_s = positive(row - s.narrow_values * out.value_s);
  out.sequence_s = positive((step_batch - step_alone) / others);
  out.step_s = positive(step_alone - out.sequence_s);
  const double linear = (s.many_linear - s.few_linear) / (s.many_layers - s.few_layers);
  out.linear_layer_s = positive(linear - layer_alone);
  out.choice_s = positive((s.large_vocabulary.batch - s.few.batch) / (s.sequences * s.more_vocabulary));
  return out;
}

absl::StatusOr<plan::StepOverhead> MeasureStepOverhead(kernels::Device& device, int threads,
                                                       const plan::DeviceProfile& profile) {
  const std::string weights = "bf16";
  const int batch = BatchOf(device);
  kernels::cuda::CudaDevice* const gpu = AsGpu(device);
  DT_ASSIGN_OR_RETURN(const double wide_product, profile.ProductSeconds(weights, batch, double{kWide} * kWide));
  DT_ASSIGN_OR_RETURN(const double more_head,
                      profile.ProductSeconds(weights, batch, double{kNarrow} * (kLargeVocabulary - kVocabulary)));
  OverheadSamples samples;
  DT_ASSIGN_OR_RETURN(samples.few, Measure({}, device, threads));
  DT_ASSIGN_OR_RETURN(samples.many, Measure({.layers = kManyLayers}, device, threads));
  DT_ASSIGN_OR_RETURN(samples.few_linear, MeasureLinear(kFewLayers, device, threads, profile));
  DT_ASSIGN_OR_RETURN(samples.many_linear, MeasureLinear(kManyLayers, device, threads, profile));
  if (gpu == nullptr) {  // else MeasureGpuValue takes the place of what they say
    DT_ASSIGN_OR_RETURN(samples.few_wide, Measure({.layers = kFewWideLayers, .width = kWide}, device, threads));
    DT_ASSIGN_OR_RETURN(samples.many_wide, Measure({.layers = kManyWideLayers, .width = kWide}, device, threads));
    samples.few_wide.batch -= kFewWideLayers * kProducts * wide_product;
    samples.many_wide.batch -= kManyWideLayers * kProducts * wide_product;
  }
  DT_ASSIGN_OR_RETURN(samples.large_vocabulary, Measure({.vocabulary = kLargeVocabulary}, device, threads));
  samples.large_vocabulary.batch -= more_head;
  samples.few_layers = kFewLayers;
  samples.many_layers = kManyLayers;
  samples.few_wide_layers = kFewWideLayers;
  samples.many_wide_layers = kManyWideLayers;
  samples.narrow_values = kProducts * 2 * kNarrow;
  samples.wide_values = kProducts * 2 * kWide;
  samples.sequences = batch;
  samples.more_vocabulary = kLargeVocabulary - kVocabulary;
  if (gpu == nullptr) return FitOverhead(samples);
  DT_RETURN_IF_ERROR(LeaveOutCalls(*gpu, samples));
  plan::StepOverhead overhead = FitOverhead(samples);
  DT_ASSIGN_OR_RETURN(overhead.value_s, MeasureGpuValue(*gpu, threads, profile, overhead.layer_s));
  return overhead;
}

}  // namespace dovetail::engine
