#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/thread_pool.h"
#include "model/formats/dequantize.h"
#include "model/layer_steps.h"
#include "model/loaded_model.h"

namespace dovetail::model {

// The packed format that `wanted` means for rows stored like this.
kernels::PackedFormat PackedFormatOf(WeightFormat wanted, kernels::RowFormat stored);

// Reads canonical tensors of one checkpoint into typed steps.
// Errors: kNotFound: the checkpoint lacks a tensor; kResourceExhausted: no memory for the packed weights.
// Threads: thread-compatible; rows are packed on the caller and the pool.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, WeightFormat format, kernels::ThreadPool* pool, const LoadProgress& progress)
      : checkpoint_(checkpoint), format_(format), pool_(pool), progress_(progress) {
    for (const std::string& name : checkpoint.names()) total_bytes_ += checkpoint.Find(name)->bytes.size();
  }

  const Checkpoint& checkpoint() const { return checkpoint_; }
  const ModelConfig& config() const { return checkpoint_.config(); }

  absl::StatusOr<Projection> ReadProjection(const std::string& name, bool has_bias) {
    return ReadProjection(name, has_bias, format_);
  }
  absl::StatusOr<Projection> ReadProjection(const std::string& name, bool has_bias, WeightFormat format) {
    Projection projection;
    DT_ASSIGN_OR_RETURN(const TensorSource tensor, checkpoint_.Find(name + ".weight"));
    projection.name = name;
    if (format == WeightFormat::kElsewhere) {
      projection.weights = kernels::PackedWeights::ShapeOf(tensor.rows, tensor.cols);
    } else {
      DT_ASSIGN_OR_RETURN(projection.weights, Pack(tensor, format));
    }
    if (has_bias) {
      DT_ASSIGN_OR_RETURN(const TensorSource bias, checkpoint_.Find(name + ".bias"));
      projection.bias = bias.ReadAll();
    }
    return projection;
  }

  // A projection of h that gives `rows` zeros.
  absl::StatusOr<Projection> Zeros(int64_t rows) {
    const std::vector<float> row(static_cast<size_t>(config().hidden_size));
    const auto row_at = [&](int64_t) { return reinterpret_cast<const std::byte*>(row.data()); };
    Projection projection;
    DT_ASSIGN_OR_RETURN(
        projection.weights,
        kernels::PackWeights(kernels::PackedFormat::kF32,
                             kernels::RowSource{kernels::RowFormat::kF32, rows, config().hidden_size, row_at}, pool_));
    return projection;
  }

  absl::StatusOr<RmsNorm> ReadNorm(const std::string& name) {
    DT_ASSIGN_OR_RETURN(const TensorSource tensor, checkpoint_.Find(name + ".weight"));
    return RmsNorm{tensor.ReadAll(), static_cast<float>(checkpoint_.config().norm_eps)};
  }

  absl::StatusOr<std::vector<float>> ReadVector(const std::string& name) {
    DT_ASSIGN_OR_RETURN(const TensorSource tensor, checkpoint_.Find(name));
    return tensor.ReadAll();
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
  absl::StatusOr<kernels::PackedWeights> Pack(const TensorSource& tensor, WeightFormat format) {
    const kernels::RowFormat row_format = RowFormatOf(tensor.type);
    const std::vector<std::byte> rows = tensor.has_rows() ? std::vector<std::byte>() : tensor.CopyRows();
    const auto row_at = [&](int64_t row) {
      return rows.empty() ? tensor.bytes.data() + tensor.SourceRow(row) * tensor.row_bytes
                          : rows.data() + row * tensor.row_bytes;
    };
    auto packed = kernels::PackWeights(PackedFormatOf(format, row_format),
                                       kernels::RowSource{row_format, tensor.rows, tensor.cols, row_at}, pool_);
    if (!packed.ok())
      return Annotate(packed.status(),
                      absl::StrCat(std::string(tensor.file), ": tensor ", std::string(tensor.stored_name)));
    weight_bytes_ += packed->size_bytes();
    Progress(tensor);
    return packed;
  }

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

// The steps of one layer of a model with linear states or experts (IsHybrid). Its first attention op is `ops`, which is
// then counted up (AttentionOpsOf).
// Threads: as the Loader.
absl::Status ReadHybridLayer(Loader& loader, int layer, int& ops, std::vector<LayerStep>& steps);

}  // namespace dovetail::model
