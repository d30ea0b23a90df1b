#include <utility>

#include "model/families/checkpoint_tensors.h"
#include "model/loader.h"

namespace dovetail::model {
kernels::PackedFormat PackedFormatOf(WeightFormat wanted, kernels::RowFormat stored) {
  switch (wanted) {
    case WeightFormat::kF32: return kernels::PackedFormat::kF32;
    case WeightFormat::kBF16: return kernels::PackedFormat::kBF16;
    case WeightFormat::kAuto:
    case WeightFormat::kElsewhere: break;
  }
  return kernels::DirectFormat(stored);
}

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
  int ops = 0;
  for (int layer = 0; layer < static_cast<int>(config.layers.size()); ++layer) {
    if (IsHybrid(config)) {
      DT_RETURN_IF_ERROR(ReadHybridLayer(loader, layer, ops, model->steps));
      continue;
    }
    DT_RETURN_IF_ERROR(loader.ReadAttention(layer, model->steps));
    DT_RETURN_IF_ERROR(loader.ReadMlp(layer, model->steps));
    ++ops;
  }
  model->attention_ops = ops;
  DT_ASSIGN_OR_RETURN(const TensorSource embedding, checkpoint->Find("embed.weight"));
  model->embedding = Embedding(*checkpoint, embedding, config.embedding_scale);
  DT_ASSIGN_OR_RETURN(model->final_norm, loader.ReadNorm("final_norm"));
  for (float& weight : model->final_norm.weight) weight *= config.logits_scale;  // the head is linear
  DT_ASSIGN_OR_RETURN(model->head, loader.ReadProjection("lm_head", false));
  model->weight_bytes = loader.weight_bytes();
  if (progress) progress(1.0);  // weights used twice, or not at all, leave the sum short
  model->checkpoint = std::move(checkpoint);
  return model;
}

}  // namespace dovetail::model
