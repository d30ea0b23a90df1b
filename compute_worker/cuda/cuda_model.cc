#include "compute_worker/cuda/cuda_model.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <variant>

#include "compute_worker/cuda/cuda_dense.h"
#include "kernels/cuda/cuda_ops.h"

namespace dovetail::compute {

using kernels::cuda::CudaDevice;
using kernels::cuda::CudaWeights;
using kernels::cuda::WireType;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int64_t kMostHeadDim = 256;

uint64_t Elements(const model::ModelConfig& config) {
  const uint64_t embedding = config.hidden_size * config.vocab_size;
  return LayerElements(config) + embedding * (config.tie_embeddings ? 1 : 2);
}

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
  const bool dense = std::any_of(config.layers.begin(), config.layers.end(), [](const model::LayerConfig& layer) {
    return layer.mlp == model::MlpKind::kDense;
  });
  if (config.hidden_size % 8 != 0 || (dense && config.intermediate_size % 2 != 0)) {
    return Unimplemented("a hidden size of ", config.hidden_size, " and an intermediate size of ",
                         config.intermediate_size, ": multiples of 8 and of 2 run on a GPU");
  }
  return absl::OkStatus();
}

uint64_t CudaModel::WeightBytes(const model::ModelConfig& config) { return 2 * Elements(config); }

// Takes a model's tensors to the GPU.
class CudaModel::Reader final : public CudaWeightReader {
 public:
  Reader(CudaModel& out, bool random, const model::LoadProgress& progress)
      : out_(out), random_(random), progress_(progress), total_(WeightBytes(out.model_.config())) {}

  absl::Status Open() {
    DT_ASSIGN_OR_RETURN(loader_, kernels::cuda::CudaWeightLoader::Create(out_.device_));
    DT_ASSIGN_OR_RETURN(stream_, out_.device_.CreateCudaStream());
    return absl::OkStatus();
  }

  absl::StatusOr<CudaProjection> Stack(const std::vector<const model::Projection*>& parts, bool f32_bias) override {
    int64_t rows = 0;
    bool biased = false;
    for (const model::Projection* part : parts) {
      rows += part->weights.rows();
      biased = biased || !part->bias.empty();
    }
    CudaProjection stacked;
    DT_ASSIGN_OR_RETURN(stacked.weights,
                        CudaWeights::Allocate(out_.device_, rows, parts[0]->weights.cols(), out_.type_));
    int64_t first = 0;
    std::vector<float> bias(biased ? rows : 0, 0.0f);
    for (const model::Projection* part : parts) {
      if (part->name.empty()) {  // zeros
        DT_RETURN_IF_ERROR(Zero(stacked.weights, first, part->weights.rows()));
        first += part->weights.rows();
        continue;
      }
      DT_RETURN_IF_ERROR(Fill(stacked.weights, first, part->name + ".weight"));
      std::copy(part->bias.begin(), part->bias.end(), bias.begin() + (biased ? first : 0));
      first += part->weights.rows();
    }
    if (biased) {
      DT_ASSIGN_OR_RETURN(stacked.bias, Bias(bias, f32_bias));
    }
    return stacked;
  }

  absl::StatusOr<CudaWeights> Matrix(const std::string& name) {
    DT_ASSIGN_OR_RETURN(const model::TensorSource source, out_.model_.checkpoint->Find(name));
    DT_ASSIGN_OR_RETURN(CudaWeights weights, CudaWeights::Allocate(out_.device_, source.rows, source.cols, out_.type_));
    DT_RETURN_IF_ERROR(Fill(weights, 0, name));
    return weights;
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
    DT_ASSIGN_OR_RETURN(const model::TensorSource source,
                        out_.model_.checkpoint->Find(projection.name + ".weight"));
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

  absl::Status Zero(CudaWeights& weights, int64_t first, int64_t count) {
    const size_t row_bytes = static_cast<size_t>(weights.cols()) * 2;
    auto* const at = static_cast<std::byte*>(weights.mutable_data()) + first * row_bytes;
    DT_RETURN_IF_ERROR(stream_->Fill(at, 0, count * row_bytes));
    return stream_->SynchronizeStatus();
  }

  absl::Status Fill(CudaWeights& weights, int64_t first, const std::string& name) {
    DT_ASSIGN_OR_RETURN(const model::TensorSource source, out_.model_.checkpoint->Find(name));
    const size_t row_bytes = static_cast<size_t>(source.cols) * 2;
    if (random_) {
      // About the spread of trained weights: products keep the size of what goes in.
      kernels::cuda::RandomLaunch random;
      random.out = static_cast<std::byte*>(weights.mutable_data()) + first * row_bytes;
      random.type = out_.type_;
      random.range = std::sqrt(3.0f / static_cast<float>(source.cols));
      random.seed = ++seed_;
      random.count = source.rows * source.cols;
      DT_RETURN_IF_ERROR(kernels::cuda::FillRandom(*stream_, random));
      DT_RETURN_IF_ERROR(stream_->SynchronizeStatus());
    } else {
      DT_RETURN_IF_ERROR(loader_->Fill(weights, first, source.rows,
                                       [&](int64_t row, int64_t count, std::span<float> out) {
                                         source.ReadRows(row, count, out);
                                       }));
    }
    out_.weight_bytes_ += row_bytes * source.rows;
    if (progress_) progress_(std::min(1.0, static_cast<double>(out_.weight_bytes_) / static_cast<double>(total_)));
    return absl::OkStatus();
  }

  CudaModel& out_;
  const bool random_;
  const model::LoadProgress& progress_;
  const uint64_t total_;
  uint64_t seed_ = 0;
  std::unique_ptr<kernels::cuda::CudaWeightLoader> loader_;
  std::unique_ptr<kernels::cuda::CudaStream> stream_;
};

namespace {

absl::Status CheckRoom(CudaDevice& device, const model::ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const CudaDevice::Memory memory, device.memory());
  const uint64_t needed = CudaModel::WeightBytes(config);
  if (needed <= memory.free_bytes) return absl::OkStatus();
  return ResourceExhausted(device.name(), " (", device.info().name, "): the weights need ", needed / kMiB,
                           " MiB in 16 bits, and ", memory.free_bytes / kMiB, " of ", memory.total_bytes / kMiB,
                           " MiB are free; take a smaller model, another GPU or --device cpu");
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Load(CudaDevice& device, const model::LoadedModel& model,
                                                           DType type, bool random,
                                                           const model::LoadProgress& progress) {
  const model::ModelConfig& config = model.config();
  DT_RETURN_IF_ERROR(Supports(config, type));
  DT_RETURN_IF_ERROR(CheckRoom(device, config));
  std::unique_ptr<CudaModel> out(new CudaModel(device, model, WireTypeOf(type)));
  Reader reader(*out, random, progress);
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
  if (progress) progress(1.0);
  return out;
}

absl::StatusOr<std::unique_ptr<DenseBackend>> CudaModel::Create(const proto::AttentionTable& table,
                                                                const ComputeWorkerOptions& options,
                                                                bool stay_on_device) const {
  return CudaDense::Create(*this, table, options, stay_on_device);
}

}  // namespace dovetail::compute
