#include "compute_worker/cuda/cuda_model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <variant>

#include "base/log.h"
#include "compute_worker/cuda/cuda_dense.h"
#include "compute_worker/cuda/cuda_prompt_attention.h"
#include "compute_worker/cuda/cuda_prompt_states.h"
#include "compute_worker/cuda/kept_rows.h"
#include "compute_worker/prompt_scratch_size.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::compute {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaWeights;
using kernels::cuda::WireType;

namespace {

using kernels::cuda::QuantBytesOf;
using kernels::cuda::QuantKind;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kWide = 2;                // bytes of a weight in 16 bits
constexpr uint64_t kFreeBytesOfPrompts = 8;  // one of so many is for a scratch of prompts
constexpr int64_t kMostHeadDim = 256;

uint64_t Elements(const model::ModelConfig& config) {
  const uint64_t embedding = config.hidden_size * config.vocab_size;
  return LayerElements(config) + embedding * (config.tie_embeddings ? 1 : 2);
}

// Routers are multiplied in f32, whatever the file has.
bool IsRouter(const std::string& name) { return name.find(".router.") != std::string::npos; }

absl::Status CheckHeadDim(const char* what, int64_t dim) {
  if (dim >= 8 && dim <= kMostHeadDim && dim % 8 == 0) return absl::OkStatus();
  return Unimplemented("heads of ", dim, " ", what, " dimensions; multiples of 8 up to ", kMostHeadDim,
                       " run on a GPU");
}

}  // namespace

absl::Status CudaModel::Supports(const model::ModelConfig& config, DType type) {
  if (type == DType::kF32)
    return Unimplemented("float32: GPUs compute in bfloat16 or float16 (--kv-cache-dtype); use --device cpu");
  DT_RETURN_IF_ERROR(SupportsHybrid(config));
  if (std::any_of(config.layers.begin(), config.layers.end(),
                  [](const model::LayerConfig& layer) { return model::HasAttention(layer.kind); })) {
    DT_RETURN_IF_ERROR(CheckHeadDim("key", config.key_dim));
    DT_RETURN_IF_ERROR(CheckHeadDim("value", config.value_dim));
  }
  const bool dense = std::any_of(config.layers.begin(), config.layers.end(),
                                 [](const model::LayerConfig& layer) { return layer.mlp == model::MlpKind::kDense; });
  if (config.hidden_size % 8 != 0 || (dense && config.intermediate_size % 2 != 0)) {
    return Unimplemented("a hidden size of ", config.hidden_size, " and an intermediate size of ",
                         config.intermediate_size, ": multiples of 8 and of 2 run on a GPU");
  }
  return absl::OkStatus();
}

uint64_t CudaModel::WeightBytes(const model::ModelConfig& config) { return 2 * Elements(config); }

namespace {

struct KeptBytes {
  uint64_t weights = 0, scratch = kernels::cuda::CudaProduct::kScratchBytes;
};

absl::StatusOr<KeptBytes> KeptBytesOf(const model::Checkpoint& checkpoint, bool random) {
  KeptBytes bytes;
  std::map<std::string, std::pair<int, std::vector<model::TensorSource>>> stacks;
  for (const std::string& name : checkpoint.names()) {
    DT_ASSIGN_OR_RETURN(model::TensorSource source, checkpoint.Find(name));
    const bool again = name == "lm_head.weight" && checkpoint.config().tie_embeddings;
    if (again) continue;
    if (const auto stack = ExpertStackOf(name, checkpoint.config()); stack.has_value()) {
      auto& [each, sources] = stacks[stack->name];
      each = stack->each;
      sources.push_back(std::move(source));
      continue;
    }
    const std::optional<QuantKind> kind = IsRouter(name) ? std::nullopt : KeptKindOf(source, random);
    const uint64_t wide = IsRouter(name) ? sizeof(float) : kWide;
    bytes.weights += kind.has_value() ? QuantBytesOf(*kind, source.rows, source.cols).total()
                                      : static_cast<uint64_t>(source.rows) * source.cols * wide;
  }
  size_t scratch = 0;
  for (const auto& [name, stacked] : stacks) {
    const ExpertStack stack(stacked.second, stacked.first, random);
    bytes.weights += stack.bytes();
    scratch = std::max(scratch, stack.scratch_bytes());
  }
  bytes.scratch += scratch;
  return bytes;
}

}  // namespace

absl::StatusOr<uint64_t> CudaModel::KeptWeightBytes(const model::Checkpoint& checkpoint, bool random) {
  DT_ASSIGN_OR_RETURN(const KeptBytes bytes, KeptBytesOf(checkpoint, random));
  return bytes.weights + bytes.scratch;
}

absl::StatusOr<bool> CudaModel::Keeps(GpuWeights how, const model::Checkpoint& checkpoint, uint64_t free_bytes) {
  if (how == GpuWeights::kDequantise) return false;
  const uint64_t wide = WeightBytes(checkpoint.config());
  if (how == GpuWeights::kAuto && wide <= free_bytes / 2) return false;
  DT_ASSIGN_OR_RETURN(const KeptBytes kept, KeptBytesOf(checkpoint, /*random=*/false));
  return kept.weights < wide;
}

// Takes a model's tensors to the GPU.
class CudaModel::Reader final : public CudaWeightReader {
 public:
  Reader(CudaModel& out, bool random, bool keep, const model::LoadProgress& progress)
      : out_(out), random_(random), keep_(keep), progress_(progress), total_(WeightBytes(out.model_.config())) {}

  absl::Status Open() {
    DT_ASSIGN_OR_RETURN(loader_, kernels::cuda::CudaWeightLoader::Create(out_.device_));
    DT_ASSIGN_OR_RETURN(stream_, out_.device_.CreateCudaStream());
    return absl::OkStatus();
  }

  absl::StatusOr<CudaProjection> Stack(const std::vector<const model::Projection*>& parts, bool f32_bias) override {
    DT_ASSIGN_OR_RETURN(const std::vector<model::TensorSource> sources, SourcesOf(parts));
    CudaProjection stacked;
    DT_ASSIGN_OR_RETURN(stacked.weights, Below(sources, parts[0]->weights.cols(), keep_));
    DT_ASSIGN_OR_RETURN(stacked.bias, BiasOf(parts, f32_bias));
    return stacked;
  }
  absl::StatusOr<CudaProjection> StackExperts(const std::vector<const model::Projection*>& parts, int each) override {
    DT_ASSIGN_OR_RETURN(const std::vector<model::TensorSource> sources, SourcesOf(parts));
    CudaProjection stacked;
    const ExpertStack stack(sources, each, random_);
    if (keep_ && stack.is_kept()) {
      DT_ASSIGN_OR_RETURN(stacked.weights, KeepExperts(stack));
    } else {
      if (keep_ && stack.is_dequantised()) NoteDequantised(sources[0], stack.bytes());
      DT_ASSIGN_OR_RETURN(stacked.weights, Below(sources, parts[0]->weights.cols(), /*keep=*/false));
    }
    DT_ASSIGN_OR_RETURN(stacked.bias, BiasOf(parts, /*f32_bias=*/true));
    return stacked;
  }

  // Says what is not kept although it could be asked for.
  void TellDequantised() const {
    if (dequantised_bytes_ == 0) return;
    LogWarning(out_.device_.name(), ": experts in 4 or 8 bits are dequantised to ", dequantised_bytes_ / kMiB,
               " MiB, from ", dequantised_first_,
               " on: their kernels read gates and what they gate of one type, a multiple of 16 rows and at most 8192 "
               "columns");
  }

  absl::StatusOr<CudaWeights> Matrix(const std::string& name) {
    DT_ASSIGN_OR_RETURN(const model::TensorSource source, out_.model_.checkpoint->Find(name));
    return Below({source}, source.cols, keep_);
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Norm(const model::RmsNorm& norm) override {
    return Upload(random_ ? std::vector<float>(norm.weight.size(), 1.0f) : norm.weight);
  }
  absl::Status NormIf(const std::optional<model::RmsNorm>& norm, std::unique_ptr<kernels::Buffer>& out) {
    if (!norm.has_value()) return absl::OkStatus();
    DT_ASSIGN_OR_RETURN(out, Norm(*norm));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Upload(const std::vector<float>& values) override {
    return Upload(values.data(), values.size() * sizeof(float));
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> FloatMatrix(const model::Projection& projection) override {
    DT_ASSIGN_OR_RETURN(const model::TensorSource source, out_.model_.checkpoint->Find(projection.name + ".weight"));
    out_.weight_bytes_ += sizeof(float) * source.rows * source.cols;
    if (!random_) return Upload(source.ReadAll());
    std::vector<float> values(source.rows * source.cols);
    std::mt19937 random(static_cast<uint32_t>(++seed_));
    const float range = std::sqrt(3.0f / static_cast<float>(source.cols));
    for (float& value : values) value = std::uniform_real_distribution<float>(-range, range)(random);
    return Upload(values);
  }

 private:
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Bias(const std::vector<float>& bias, bool f32_bias) {
    if (f32_bias) return Upload(bias);
    std::vector<uint16_t> bits;
    for (const float b : bias) bits.push_back(out_.type_ == WireType::kBF16 ? ToBF16(b).bits : ToF16(b).bits);
    return Upload(bits.data(), bits.size() * sizeof(uint16_t));
  }

  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Upload(const void* data, size_t bytes) {
    DT_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Buffer> buffer, out_.device_.Allocate(bytes));
    DT_RETURN_IF_ERROR(stream_->Copy(buffer->data(), data, bytes));
    DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
    return buffer;
  }

  absl::StatusOr<std::vector<model::TensorSource>> SourcesOf(const std::vector<const model::Projection*>& parts) const {
    std::vector<model::TensorSource> sources;
    for (const model::Projection* part : parts) {
      model::TensorSource source;  // zeros, if it has no name
      source.rows = part->weights.rows(), source.cols = part->weights.cols();
      if (!part->name.empty()) {
        DT_ASSIGN_OR_RETURN(source, out_.model_.checkpoint->Find(part->name + ".weight"));
      }
      sources.push_back(std::move(source));
    }
    return sources;
  }

  // Null if no part has one.
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> BiasOf(const std::vector<const model::Projection*>& parts,
                                                          bool f32_bias) {
    if (std::all_of(parts.begin(), parts.end(), [](const model::Projection* part) { return part->bias.empty(); }))
      return std::unique_ptr<kernels::Buffer>();
    std::vector<float> bias;
    for (const model::Projection* part : parts) {
      bias.insert(bias.end(), part->bias.begin(), part->bias.end());
      if (part->bias.empty()) bias.resize(bias.size() + part->weights.rows(), 0.0f);
    }
    return Bias(bias, f32_bias);
  }

  // Matrices below each other: kept, if all of them can be.
  absl::StatusOr<CudaWeights> Below(const std::vector<model::TensorSource>& sources, int64_t cols, bool keep) {
    keep = keep && std::all_of(sources.begin(), sources.end(), [&](const model::TensorSource& source) {
             return KeptKindOf(source, random_).has_value();
           });
    if (keep) return KeepBelow(sources, cols);
    int64_t rows = 0, first = 0;
    for (const model::TensorSource& source : sources) rows += source.rows;
    DT_ASSIGN_OR_RETURN(CudaWeights weights, CudaWeights::Allocate(out_.device_, rows, cols, out_.type_));
    for (const model::TensorSource& source : sources) {
      DT_RETURN_IF_ERROR(Fill(weights, first, source));
      first += source.rows;
    }
    out_.weight_bytes_ += weights.size_bytes();
    return weights;
  }

  // Where tiles of one end with its rows, the next one of the same kind continues: fewer products.
  absl::StatusOr<CudaWeights> KeepBelow(std::span<const model::TensorSource> sources, int64_t cols) {
    std::vector<CudaWeights::KeptRows> kept;
    std::vector<std::span<const model::TensorSource>> members;
    for (size_t i = 0; i < sources.size(); ++i) {
      const QuantKind kind = *KeptKindOf(sources[i], random_);
      if (!kept.empty() && kept.back().kind == kind && kept.back().rows % kernels::cuda::kQuantTileRows == 0) {
        kept.back().rows += sources[i].rows;
        members.back() = sources.subspan(i - members.back().size(), members.back().size() + 1);
      } else {
        kept.push_back({kind, sources[i].rows});
        members.push_back(sources.subspan(i, 1));
      }
    }
    DT_ASSIGN_OR_RETURN(CudaWeights weights, CudaWeights::AllocateKept(out_.device_, kept, cols, out_.type_));
    for (size_t i = 0; i < kept.size(); ++i) {
      DT_RETURN_IF_ERROR(random_ ? FillRandom(weights.kept()[i].matrix)
                                 : loader_->FillKept(weights, i, [&](int64_t tile, kernels::cuda::QuantTile out) {
                                     PackTile(members[i], tile * kernels::cuda::kQuantTileRows, out);
                                   }));
    }
    out_.keeps_ = true;
    out_.weight_bytes_ += weights.size_bytes();
    Show(weights.rows() * cols);
    return weights;
  }

  absl::StatusOr<CudaWeights> KeepExperts(const ExpertStack& stack) {
    const CudaWeights::KeptRows rows = stack.kept_rows();
    DT_ASSIGN_OR_RETURN(CudaWeights weights,
                        CudaWeights::AllocateKept(out_.device_, {&rows, 1}, stack.cols(), out_.type_));
    DT_RETURN_IF_ERROR(random_ ? FillRandom(weights.kept()[0].matrix)
                               : loader_->FillKept(weights, 0, [&](int64_t tile, kernels::cuda::QuantTile out) {
                                   stack.PackTile(tile, out);
                                 }));
    out_.keeps_ = true;
    out_.weight_bytes_ += weights.size_bytes();
    out_.expert_scratch_bytes_ = std::max(out_.expert_scratch_bytes_, stack.scratch_bytes());
    Show(weights.rows() * stack.cols());
    return weights;
  }

  void NoteDequantised(const model::TensorSource& first, uint64_t bytes) {
    if (dequantised_bytes_ == 0) dequantised_first_ = absl::StrCat(std::string(first.stored_name));
    dequantised_bytes_ += bytes;
  }

  // Rows from `first` on of matrices of one kind.
  static void PackTile(std::span<const model::TensorSource> sources, int64_t first, kernels::cuda::QuantTile out) {
    size_t at = 0;
    while (first >= sources[at].rows) first -= sources[at++].rows;
    const auto count = static_cast<size_t>(std::min<int64_t>(kernels::cuda::kQuantTileRows, sources[at].rows - first));
    SourceRow rows[kernels::cuda::kQuantTileRows];
    for (size_t i = 0; i < count; ++i) rows[i] = {&sources[at], first + static_cast<int64_t>(i)};
    PackRows({rows, count}, out);
  }

  // Codes of any bits, and scales that make about the spread of trained weights.
  absl::Status FillRandom(const kernels::cuda::QuantMatrix& w) {
    const kernels::cuda::QuantBytes bytes = QuantBytesOf(w.kind, w.rows, w.cols);
    for (const auto& [to, size] : {std::pair{w.codes, bytes.codes}, std::pair{w.scales, bytes.scales}}) {
      kernels::cuda::RandomLaunch random;
      random.out = const_cast<void*>(to);
      random.type = WireType::kF16;
      random.range = 0.2f / std::sqrt(static_cast<float>(w.cols));
      random.seed = ++seed_;
      random.count = static_cast<int64_t>(size / 2);
      DT_RETURN_IF_ERROR(kernels::cuda::FillRandom(*stream_, random));
    }
    const std::vector<float> ones(bytes.factors / sizeof(float), 1.0f);
    DT_RETURN_IF_ERROR(stream_->Copy(const_cast<float*>(w.factor), ones.data(), bytes.factors));
    return stream_->SynchronizeStatus();
  }

  absl::Status Fill(CudaWeights& weights, int64_t first, const model::TensorSource& source) {
    const size_t row_bytes = static_cast<size_t>(source.cols) * 2;
    std::byte* const at = static_cast<std::byte*>(weights.mutable_data()) + first * row_bytes;
    if (source.stored_name.empty()) {  // zeros
      DT_RETURN_IF_ERROR(stream_->Fill(at, 0, source.rows * row_bytes));
      return stream_->SynchronizeStatus();
    }
    if (random_) {
      // About the spread of trained weights: products keep the size of what goes in.
      kernels::cuda::RandomLaunch random;
      random.out = at;
      random.type = out_.type_;
      random.range = std::sqrt(3.0f / static_cast<float>(source.cols));
      random.seed = ++seed_;
      random.count = source.rows * source.cols;
      DT_RETURN_IF_ERROR(kernels::cuda::FillRandom(*stream_, random));
      DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
    } else {
      DT_RETURN_IF_ERROR(
          loader_->Fill(weights, first, source.rows,
                        [&](int64_t row, int64_t count, std::span<float> out) { source.ReadRows(row, count, out); }));
    }
    Show(source.rows * source.cols);
    return absl::OkStatus();
  }

  void Show(int64_t elements) {
    read_ += 2 * static_cast<uint64_t>(elements);
    if (progress_) progress_(std::min(1.0, static_cast<double>(read_) / static_cast<double>(total_)));
  }

  CudaModel& out_;
  const bool random_, keep_;
  const model::LoadProgress& progress_;
  const uint64_t total_;
  uint64_t seed_ = 0, read_ = 0, dequantised_bytes_ = 0;
  std::string dequantised_first_;  // tensor of the file
  std::unique_ptr<kernels::cuda::CudaWeightLoader> loader_;
  std::unique_ptr<kernels::cuda::CudaStream> stream_;
};

namespace {

absl::Status CheckRoom(CudaDevice& device, uint64_t needed, bool keep, const CudaDevice::Memory& memory) {
  if (needed <= memory.free_bytes) return absl::OkStatus();
  return ResourceExhausted(device.name(), " (", device.info().name,
                           "): ", WeightsThatFit(needed, keep, memory.free_bytes, memory.total_bytes));
}

}  // namespace

std::string WeightsThatFit(uint64_t needed, bool keep, uint64_t free_bytes, uint64_t total_bytes) {
  std::string text =
      absl::StrCat("the weights need ", needed / kMiB, keep ? " MiB as the file has them" : " MiB in 16 bits", ", and ",
                   free_bytes / kMiB, " of ", total_bytes / kMiB, " MiB are free");
  if (needed <= total_bytes) absl::StrAppend(&text, " (others use the rest)");
  absl::StrAppend(&text, "; take ");
  if (!keep) {
    // A scale of 16 bits for each 32 weights.
    for (const auto& [bits, name] : {std::pair{uint64_t{17}, "8"}, {uint64_t{9}, "4"}}) {
      const uint64_t bytes = needed / 32 * bits;
      if (bytes > free_bytes) continue;
      absl::StrAppend(&text, "a file in ", name, " bits with --gpu-weights keep (about ", bytes / kMiB, " MiB), ");
      break;
    }
  }
  return absl::StrCat(text, "a smaller model, another GPU or --device cpu");
}

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Load(CudaDevice& device, const model::LoadedModel& model,
                                                           DType type, bool random, GpuWeights how,
                                                           const model::LoadProgress& progress) {
  const model::ModelConfig& config = model.config();
  DT_RETURN_IF_ERROR(Supports(config, type));
  DT_ASSIGN_OR_RETURN(const CudaDevice::Memory memory, device.memory());
  bool keep = random && how == GpuWeights::kKeep;
  if (!random) {
    DT_ASSIGN_OR_RETURN(keep, Keeps(how, *model.checkpoint, memory.free_bytes));
  }
  DT_ASSIGN_OR_RETURN(const uint64_t needed, keep ? KeptWeightBytes(*model.checkpoint, random)
                                                  : absl::StatusOr<uint64_t>(WeightBytes(config)));
  DT_RETURN_IF_ERROR(CheckRoom(device, needed, keep, memory));
  std::unique_ptr<CudaModel> out(new CudaModel(device, model, WireTypeOf(type)));
  Reader reader(*out, random, keep, progress);
  DT_RETURN_IF_ERROR(reader.Open());
  out->steps_.resize(model.steps.size());
  for (size_t i = 0; i < model.steps.size(); ++i) {
    CudaStep& step = out->steps_[i];
    if (const auto* input = std::get_if<model::InputNorm>(&model.steps[i])) {
      DT_RETURN_IF_ERROR(reader.NormIf(input->norm, step.norm));
    } else if (const auto* query = std::get_if<model::QueryProjection>(&model.steps[i])) {
      const auto* key_value =
          i + 1 < model.steps.size() ? std::get_if<model::KeyValueProjection>(&model.steps[i + 1]) : nullptr;
      if (key_value == nullptr) return Internal("the queries of attention op ", query->op, " have no keys behind them");
      std::vector<const model::Projection*> heads = {&query->q};
      if (!key_value->latent) heads.insert(heads.end(), {&key_value->k, &key_value->v});
      DT_ASSIGN_OR_RETURN(step.first, reader.Stack(heads, /*f32_bias=*/false));
      DT_RETURN_IF_ERROR(reader.NormIf(query->head_norm, step.q_norm));
      DT_RETURN_IF_ERROR(reader.NormIf(key_value->head_norm, step.k_norm));
    } else if (const auto* output = std::get_if<model::OutputProjection>(&model.steps[i])) {
      DT_ASSIGN_OR_RETURN(step.first, reader.Stack({&output->o}, /*f32_bias=*/true));
      DT_RETURN_IF_ERROR(reader.NormIf(output->post_norm, step.post_norm));
    } else if (const auto* mlp = std::get_if<model::GatedMlp>(&model.steps[i])) {
      DT_RETURN_IF_ERROR(reader.NormIf(mlp->norm, step.norm));
      std::vector<const model::Projection*> inner = {&mlp->up};
      if (mlp->activation != model::Activation::kRelu2) inner.insert(inner.begin(), &mlp->gate);
      DT_ASSIGN_OR_RETURN(step.first, reader.Stack(inner, /*f32_bias=*/false));
      DT_ASSIGN_OR_RETURN(step.second, reader.Stack({&mlp->down}, /*f32_bias=*/true));
      DT_RETURN_IF_ERROR(reader.NormIf(mlp->post_norm, step.post_norm));
    } else if (const auto* experts = std::get_if<model::ExpertMlp>(&model.steps[i])) {
      DT_RETURN_IF_ERROR(reader.NormIf(experts->norm, step.norm));
    }
    const bool queries = std::holds_alternative<model::QueryProjection>(model.steps[i]);
    if (IsHybridStep(model.steps[queries ? i + 1 : i]) &&
        !std::holds_alternative<model::KeyValueProjection>(model.steps[i])) {
      DT_ASSIGN_OR_RETURN(step.hybrid, LoadHybridStep(model, i, reader));
    }
  }
  DT_ASSIGN_OR_RETURN(out->embedding_, reader.Matrix("embed.weight"));
  if (!config.tie_embeddings) {
    DT_ASSIGN_OR_RETURN(out->head_, reader.Matrix("lm_head.weight"));
  }
  DT_ASSIGN_OR_RETURN(out->final_norm_, reader.Norm(model.final_norm));
  reader.TellDequantised();
  if (progress) progress(1.0);
  return out;
}

uint32_t CudaModel::PromptBlocks(const proto::AttentionTable& table, int max_step_tokens,
                                 std::optional<uint64_t> bytes) const {
  if (!CudaPromptAttention::Takes(table)) return 0;
  if (!bytes) {
    const auto memory = device_.memory();
    bytes = memory.ok() ? memory->free_bytes / kFreeBytesOfPrompts : 0;
  }
  return PromptScratchBlocks(table, max_step_tokens, bytes);
}

absl::Status CudaModel::RunsLinearPrompts(const proto::AttentionTable& table) const {
  return CudaPromptStates::Takes(device_, table);
}

absl::StatusOr<std::unique_ptr<DenseBackend>> CudaModel::Create(const proto::AttentionTable& table,
                                                                const ComputeWorkerOptions& options,
                                                                exchange::SharedGpu* shared_gpu) const {
  return CudaDense::Create(*this, table, options, shared_gpu);
}

}  // namespace dovetail::compute
