#include "server/cli/model_shape.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "attention_worker/attention_backend.h"
#include "kernels/packed_weights.h"
#include "model/dummy_checkpoint.h"
#include "model/families/checkpoint_tensors.h"
#include "model/formats/dequantize.h"
#include "model/loader.h"

namespace dovetail::cli {
namespace {

void Add(plan::ModelProduct product, std::vector<plan::ModelProduct>& all) {
  for (plan::ModelProduct& known : all)
    if (known.weights == product.weights && known.outputs == product.outputs && known.inputs == product.inputs &&
        known.experts == product.experts && known.head == product.head) {
      ++known.count;
      return;
    }
  all.push_back(std::move(product));
}

}  // namespace

absl::StatusOr<std::unique_ptr<model::Checkpoint>> OpenShape(const std::string& model) {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(model, error))
    if (file.path().extension() == ".safetensors" || file.path().extension() == ".gguf")
      return model::OpenCheckpoint(model);
  return error ? model::OpenCheckpoint(model) : model::OpenDummyCheckpoint(model);
}

absl::StatusOr<plan::ModelWork> WorkOf(const model::Checkpoint& checkpoint, const proto::AttentionTable& attention,
                                       KvStorage kv_storage) {
  const model::ModelConfig& config = checkpoint.config();
  plan::ModelWork work;
  work.name = checkpoint.name();
  work.layers = static_cast<int>(config.layers.size());
  work.vocabulary = config.vocab_size;
  work.max_positions = config.max_positions;
  work.attention = attention;
  work.kv_storage = kv_storage;
  work.kv_block_bytes = attention::KvBlockBytes(attention, kv_storage);
  for (const model::TensorNeed& need : model::TensorsOf(config)) {
    if (need.cols == 0 || need.canonical == "embed.weight") continue;
    DT_ASSIGN_OR_RETURN(const model::TensorSource tensor, checkpoint.Find(need.canonical));
    const auto format = model::PackedFormatOf(model::WeightFormat::kAuto, model::RowFormatOf(tensor.type));
    plan::ModelProduct product{.weights = kernels::Name(format), .outputs = need.rows, .inputs = need.cols};
    product.head = need.canonical == "lm_head.weight";
    const bool of_experts = config.experts.has_value() && need.canonical.find(".experts.") != std::string::npos &&
                            need.canonical.find("latent_") == std::string::npos;
    if (of_experts) {
      product.experts = config.experts->experts;
      product.chosen = config.experts->chosen;
    }
    Add(std::move(product), work.products);
  }
  return work;
}

}  // namespace dovetail::cli
