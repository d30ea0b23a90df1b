#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "grammar/grammar_engine.h"
#include "kernels/device.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/layer_steps.h"

namespace dovetail::model {

// How weights are held and multiplied.
enum class WeightFormat : uint8_t {
  kAuto = 0,       // quantised blocks directly, everything else in the type of the file (f16 as f32)
  kF32 = 1,        // everything dequantised once to f32
  kBF16 = 2,       // everything rounded to bf16
  kElsewhere = 3,  // projections have a name and a shape only: their weights go to another device
};

// Rows of the token embedding, read from the mapped file: a tied head is not held twice.
// Threads: immutable once loaded.
class Embedding {
 public:
  Embedding() = default;
  Embedding(const Checkpoint& checkpoint, const TensorSource& tensor, float scale);

  // out [ids.size(), hidden] f32 = scale * row. kInvalidArgument for an id outside the table.
  absl::Status Gather(std::span<const TokenId> ids, float* out) const;

 private:
  const Checkpoint* checkpoint_ = nullptr;
  TensorSource tensor_;
  float scale_ = 1;
};

// Weights packed for a device, as typed steps. Keeps the checkpoint (its file mapping) alive.
// Threads: immutable.
struct LoadedModel {
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<LayerStep> steps;  // all layers, in order
  int attention_ops = 0;
  Embedding embedding;
  RmsNorm final_norm;
  Projection head;                                   // [vocab, hidden]
  size_t weight_bytes = 0;                           // as packed
  std::shared_ptr<grammar::GrammarEngine> grammars;  // with the server in the same process; null: none can be followed

  const ModelConfig& config() const { return checkpoint->config(); }
};

// Called with the part done, 0..1, from the loading thread.
using LoadProgress = std::function<void(double)>;

// Packs all weights. Blocks; spreads packing over `pool`. Errors name file and tensor.
// Threads: thread-safe; packs rows on the caller and the pool, and blocks on the file.
absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(std::unique_ptr<Checkpoint> checkpoint, WeightFormat format,
                                                       kernels::ThreadPool* pool, const LoadProgress& progress);

}  // namespace dovetail::model
