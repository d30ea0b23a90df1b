#include "engine/measurements/device/step_overhead.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/embedded_cluster.h"
#include "engine/measurements/engine_measurements.h"
#include "model/dummy_checkpoint.h"

namespace dovetail::engine {
namespace {

namespace fs = std::filesystem;

// Steps of a millisecond at most: some run undisturbed on a machine that has other work.
constexpr int kBatch = 32, kTokens = 192, kRounds = 3, kPromptTokens = 4;
constexpr int kTries = 20;
constexpr int kFewLayers = 4, kManyLayers = 20, kFewWideLayers = 1, kManyWideLayers = 3;
constexpr int kNarrow = 64, kWide = 256, kVocabulary = 512, kLargeVocabulary = 32768, kHeadDim = 32;

// Llama's shape: each of its seven products is `width` by `width`.
struct SmallModel {
  int layers = kFewLayers, width = kNarrow, vocabulary = kVocabulary;
};

struct RemoveFolder {
  fs::path path;
  ~RemoveFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

absl::StatusOr<std::unique_ptr<model::LoadedModel>> Load(const SmallModel& shape, kernels::ThreadPool& pool) {
  std::error_code error;
  std::string pattern = (fs::temp_directory_path(error) / "dovetail-device-XXXXXX").string();
  if (error || mkdtemp(pattern.data()) == nullptr) return ResourceExhausted("no folder can be made in ", pattern);
  const RemoveFolder folder{pattern};
  std::ofstream(folder.path / "config.json") << absl::StrFormat(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": %d,
 "intermediate_size": %d, "max_position_embeddings": 2048, "num_attention_heads": %d, "num_hidden_layers": %d,
 "num_key_value_heads": %d, "head_dim": %d, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "vocab_size": %d})",
      shape.width, shape.width, shape.width / kHeadDim, shape.layers, shape.width / kHeadDim, kHeadDim,
      shape.vocabulary);
  DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenDummyCheckpoint(folder.path));
  return model::LoadModel(std::move(checkpoint), model::WeightFormat::kAuto, &pool, {});
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
absl::StatusOr<double> MeasureFullBatch(Engine& engine, PromptSource& prompts) {
  const BatchShape shape{.sequences = kBatch, .prompt_tokens = kPromptTokens, .output_tokens = kTokens};
  absl::Status status;
  for (int tries = 0; tries < kTries; ++tries) {
    engine.TakeStepSamples();
    status = MeasureBatch(engine, prompts, shape).status();
    if (!status.ok() && !absl::IsFailedPrecondition(status)) return status;
    if (const double seconds = SecondsOfSteps(engine.TakeStepSamples(), kBatch); seconds > 0) return seconds;
  }
  return status;
}

absl::StatusOr<OverheadSamples::Model> Measure(const SmallModel& shape, kernels::Device& device, int threads) {
  const auto stream = device.CreateStream();
  DT_ASSIGN_OR_RETURN(const auto model, Load(shape, stream->pool()));
  EmbeddedClusterOptions options;
  options.threads = threads;
  options.kv_cache_bytes = uint64_t{64} << 20;
  options.scheduler.max_model_len = 2048;
  options.scheduler.max_num_seqs = kBatch;
  options.scheduler.max_num_batched_tokens = 512;
  options.scheduler.enable_prefix_caching = false;
  DT_ASSIGN_OR_RETURN(const auto cluster, EmbeddedCluster::Create(*model, device, options));
  PromptSource prompts{shape.vocabulary};
  OverheadSamples::Model times;
  DT_ASSIGN_OR_RETURN(times.alone, MeasureAlone(*cluster, prompts));
  DT_ASSIGN_OR_RETURN(times.batch, MeasureFullBatch(*cluster, prompts));
  return times;
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
  out.choice_s = positive((s.large_vocabulary.batch - s.few.batch) / (s.sequences * s.more_vocabulary));
  return out;
}

absl::StatusOr<plan::StepOverhead> MeasureStepOverhead(kernels::Device& device, int threads,
                                                       const plan::DeviceProfile& profile) {
  constexpr int kProducts = 7;  // of a layer: q, k, v, o, gate, up, down
  const std::string weights = "bf16";
  DT_ASSIGN_OR_RETURN(const double wide_product, profile.ProductSeconds(weights, kBatch, double{kWide} * kWide));
  DT_ASSIGN_OR_RETURN(const double more_head,
                      profile.ProductSeconds(weights, kBatch, double{kNarrow} * (kLargeVocabulary - kVocabulary)));
  OverheadSamples samples;
  DT_ASSIGN_OR_RETURN(samples.few, Measure({}, device, threads));
  DT_ASSIGN_OR_RETURN(samples.many, Measure({.layers = kManyLayers}, device, threads));
  DT_ASSIGN_OR_RETURN(samples.few_wide, Measure({.layers = kFewWideLayers, .width = kWide}, device, threads));
  DT_ASSIGN_OR_RETURN(samples.many_wide, Measure({.layers = kManyWideLayers, .width = kWide}, device, threads));
  DT_ASSIGN_OR_RETURN(samples.large_vocabulary, Measure({.vocabulary = kLargeVocabulary}, device, threads));
  samples.few_wide.batch -= kFewWideLayers * kProducts * wide_product;
  samples.many_wide.batch -= kManyWideLayers * kProducts * wide_product;
  samples.large_vocabulary.batch -= more_head;
  samples.few_layers = kFewLayers;
  samples.many_layers = kManyLayers;
  samples.few_wide_layers = kFewWideLayers;
  samples.many_wide_layers = kManyWideLayers;
  samples.narrow_values = kProducts * 2 * kNarrow;
  samples.wide_values = kProducts * 2 * kWide;
  samples.sequences = kBatch;
  samples.more_vocabulary = kLargeVocabulary - kVocabulary;
  return FitOverhead(samples);
}

}  // namespace dovetail::engine
