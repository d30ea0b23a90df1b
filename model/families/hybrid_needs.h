#pragma once
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "model/config.h"
#include "model/families/checkpoint_tensors.h"

namespace dovetail::model {

// What GGUF files call a layer's tensor that Hugging Face folders call `stored`; that itself where no GGUF is read.
// Threads: pure. The functions below are, too, except for the list that they append to.
std::string GgufName(const std::string& stored);

// The weights of one layer of a hybrid, on their way into a list of needs. Names are given without the layer's prefix.
// Views the config and the list, which outlive it.
// Threads: thread-compatible.
class HybridNeeds {
 public:
  HybridNeeds(const ModelConfig& model, size_t index, std::vector<TensorNeed>& out)
      : config(model),
        layer(model.layers[index]),
        layer_(index),
        canonical_(absl::StrCat("layers.", index, ".")),
        stored_(absl::StrCat(model.tensor_prefix, "layers.", index, ".")),
        out_(out) {}

  const ModelConfig& config;
  const LayerConfig& layer;

  // [rows, cols], or a vector of `rows` where cols is 0.
  TensorNeed& Add(const std::string& canonical, const std::string& stored, int64_t rows, int64_t cols,
                  const RowPattern& pattern = {}, int64_t stored_rows = 0) {
    TensorNeed need;
    need.canonical = canonical_ + canonical;
    need.hf = stored_ + stored;
    need.gguf = Gguf(GgufName(stored));
    need.rows = rows;
    need.cols = cols;
    need.pattern = pattern;
    need.stored_rows = stored_rows > 0 ? stored_rows : rows;
    need.flattened = true;
    return out_.emplace_back(std::move(need));
  }

  // <canonical>.weight and, if it has one, its bias, as rows of <stored>.weight and .bias.
  void Project(const std::string& canonical, const std::string& stored, int64_t rows, int64_t cols, bool bias,
               const RowPattern& pattern = {}, int64_t stored_rows = 0) {
    Add(canonical + ".weight", stored + ".weight", rows, cols, pattern, stored_rows);
    if (bias) Add(canonical + ".bias", stored + ".bias", rows, 0, pattern, stored_rows);
  }

  TensorNeed& Norm(const char* canonical, const std::string& stored, int64_t size = 0) {
    TensorNeed& need =
        Add(absl::StrCat(canonical, ".weight"), stored + ".weight", size > 0 ? size : config.hidden_size, 0);
    need.norm = true;
    return need;
  }

  std::string Stored(const std::string& name) const { return stored_ + name; }
  std::string Gguf(const std::string& name) const { return absl::StrCat("blk.", layer_, ".", name); }

  // The same tensor, a weight, under another name.
  void OrCalled(TensorNeed& need, const std::string& stored) const {
    StoredPlace place;
    place.names = {Stored(stored + ".weight")};
    place.pattern = need.pattern;
    place.stored_rows = need.stored_rows;
    need.others.push_back(std::move(place));
  }

 private:
  const size_t layer_;
  const std::string canonical_, stored_;
  std::vector<TensorNeed>& out_;
};

// Says of the needs from index `first` on, those of one layer, where GGUF files of newer hybrids keep them.
void PlaceInGguf(const ModelConfig& config, size_t layer, size_t first, std::vector<TensorNeed>& needs);

void AppendState(HybridNeeds& needs);    // checkpoint_tensors_states.cc
void AppendExperts(HybridNeeds& needs);  // checkpoint_tensors_experts.cc

}  // namespace dovetail::model
