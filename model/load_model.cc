#include <algorithm>
#include <utility>

#include "kernels/thread_pool.h"
#include "model/dequantize.h"
#include "model/loaded_model.h"

namespace dovetail::model {
namespace {

kernels::PackedFormat PackedFormatOf(WeightFormat wanted, kernels::RowFormat stored) {
  switch (wanted) {
    case WeightFormat::kF32: return kernels::PackedFormat::kF32;
    case WeightFormat::kBF16: return kernels::PackedFormat::kBF16;
    case WeightFormat::kAuto: break;
  }
  return kernels::DirectFormat(stored);
}

// Reads canonical tensors of one checkpoint into typed steps.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, WeightFormat format, kernels::ThreadPool* pool, const LoadProgress& progress)
      : checkpoint_(checkpoint), format_(format), pool_(pool), progress_(progress) {
    for (const std::string& name : checkpoint.names()) total_bytes_ += checkpoint.Find(name)->bytes.size();
  }

  absl::StatusOr<Projection> ReadProjection(const std::string& name, bool has_bias) {
    Projection projection;
    DT_ASSIGN_OR_RETURN(const TensorSource tensor, checkpoint_.Find(name + ".weight"));
    const kernels::RowFormat row_format = RowFormatOf(tensor.type);
    const auto row_at = [&](int64_t row) { return tensor.bytes.data() + tensor.SourceRow(row) * tensor.row_bytes; };
    auto packed = kernels::PackWeights(PackedFormatOf(format_, row_format),
                                       kernels::RowSource{row_format, tensor.rows, tensor.cols, row_at}, pool_);
    if (!packed.ok())
      return Annotate(packed.status(), absl::StrCat(std::string(tensor.file), ": tensor ", std::string(tensor.stored_name)));
    projection.weights = *std::move(packed);
    weight_bytes_ += projection.weights.size_bytes();
    Progress(tensor);
    if (has_bias) {
      DT_ASSIGN_OR_RETURN(const TensorSource bias, checkpoint_.Find(name + ".bias"));
      projection.bias = bias.ReadAll();
    }
    return projection;
  }

  absl::StatusOr<RmsNorm> ReadNorm(const std::string& name) {
    DT_ASSIGN_OR_RETURN(const TensorSource tensor, checkpoint_.Find(name + ".weight"));
    return RmsNorm{tensor.ReadAll(), static_cast<float>(checkpoint_.config().norm_eps)};
  }

  absl::StatusOr<std::optional<RmsNorm>> ReadNormIf(bool wanted, const std::string& name) {
    if (!wanted) return std::nullopt;
    DT_ASSIGN_OR_RETURN(RmsNorm norm, ReadNorm(name));
    return std::optional<RmsNorm>(std::move(norm));
  }

  absl::Status ReadAttention(int layer, std::vector<LayerStep>& steps) {
    const ModelConfig& config = checkpoint_.config();
    const std::string prefix = absl::StrCat("layers.", layer, ".");
    const int rope = config.layers[layer].rope;
    DT_ASSIGN_OR_RETURN(RmsNorm norm, ReadNorm(prefix + "input_norm"));
    steps.push_back(InputNorm{std::move(norm)});

    QueryProjection query{layer, {}, {}, rope};
    DT_ASSIGN_OR_RETURN(query.q, ReadProjection(prefix + "attn.q_proj", config.q_bias));
    DT_ASSIGN_OR_RETURN(query.head_norm, ReadNormIf(config.qk_norm, prefix + "attn.q_norm"));
    steps.push_back(std::move(query));

    KeyValueProjection key_value{layer, {}, {}, {}, rope};
    DT_ASSIGN_OR_RETURN(key_value.k, ReadProjection(prefix + "attn.k_proj", config.k_bias));
    DT_ASSIGN_OR_RETURN(key_value.v, ReadProjection(prefix + "attn.v_proj", config.v_bias));
    DT_ASSIGN_OR_RETURN(key_value.head_norm, ReadNormIf(config.qk_norm, prefix + "attn.k_norm"));
    steps.push_back(std::move(key_value));

    steps.push_back(AttentionCut{layer});

    OutputProjection output{layer, {}, {}};
    DT_ASSIGN_OR_RETURN(output.o, ReadProjection(prefix + "attn.o_proj", config.o_bias));
    DT_ASSIGN_OR_RETURN(output.post_norm, ReadNormIf(config.post_norms, prefix + "post_attn_norm"));
    steps.push_back(std::move(output));
    return absl::OkStatus();
  }

  absl::Status ReadMlp(int layer, std::vector<LayerStep>& steps) {
    const ModelConfig& config = checkpoint_.config();
    const std::string prefix = absl::StrCat("layers.", layer, ".");
    GatedMlp mlp;
    mlp.activation = config.activation;
    DT_ASSIGN_OR_RETURN(mlp.norm, ReadNorm(prefix + "pre_mlp_norm"));
    DT_ASSIGN_OR_RETURN(mlp.gate, ReadProjection(prefix + "mlp.gate_proj", config.mlp_bias));
    DT_ASSIGN_OR_RETURN(mlp.up, ReadProjection(prefix + "mlp.up_proj", config.mlp_bias));
    DT_ASSIGN_OR_RETURN(mlp.down, ReadProjection(prefix + "mlp.down_proj", config.mlp_bias));
    DT_ASSIGN_OR_RETURN(mlp.post_norm, ReadNormIf(config.post_norms, prefix + "post_mlp_norm"));
    steps.push_back(std::move(mlp));
    return absl::OkStatus();
  }

  size_t weight_bytes() const { return weight_bytes_; }

 private:
  void Progress(const TensorSource& tensor) {
    done_bytes_ += tensor.bytes.size();
    if (progress_ && total_bytes_ > 0) progress_(std::min(1.0, static_cast<double>(done_bytes_) / total_bytes_));
  }

  const Checkpoint& checkpoint_;
  const WeightFormat format_;
  kernels::ThreadPool* const pool_;
  const LoadProgress& progress_;
  size_t total_bytes_ = 0, done_bytes_ = 0, weight_bytes_ = 0;
};

}  // namespace

Embedding::Embedding(const Checkpoint& checkpoint, const TensorSource& tensor, float scale)
    : checkpoint_(&checkpoint), tensor_(tensor), scale_(scale) {}

absl::Status Embedding::Gather(std::span<const TokenId> ids, float* out) const {
  for (const TokenId id : ids)
    if (id < 0 || id >= tensor_.rows)
      return InvalidArgument("token ", id, " is outside the vocabulary of ", tensor_.rows);
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::span<float> row(out + i * tensor_.cols, tensor_.cols);
    tensor_.ReadRows(ids[i], 1, row);
    if (scale_ != 1.0f)
      for (float& x : row) x *= scale_;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(std::unique_ptr<Checkpoint> checkpoint, WeightFormat format,
                                                       kernels::ThreadPool* pool, const LoadProgress& progress) {
  auto model = std::make_unique<LoadedModel>();
  Loader loader(*checkpoint, format, pool, progress);
  const ModelConfig& config = checkpoint->config();
  for (int layer = 0; layer < static_cast<int>(config.layers.size()); ++layer) {
    DT_RETURN_IF_ERROR(loader.ReadAttention(layer, model->steps));
    DT_RETURN_IF_ERROR(loader.ReadMlp(layer, model->steps));
  }
  model->attention_ops = static_cast<int>(config.layers.size());
  DT_ASSIGN_OR_RETURN(const TensorSource embedding, checkpoint->Find("embed.weight"));
  model->embedding = Embedding(*checkpoint, embedding, config.embedding_scale);
  DT_ASSIGN_OR_RETURN(model->final_norm, loader.ReadNorm("final_norm"));
  DT_ASSIGN_OR_RETURN(model->head, loader.ReadProjection("lm_head", false));
  model->weight_bytes = loader.weight_bytes();
  if (progress) progress(1.0);  // weights used twice, or not at all, leave the sum short
  model->checkpoint = std::move(checkpoint);
  return model;
}

}  // namespace dovetail::model
