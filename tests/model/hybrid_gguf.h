#pragma once
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/families/hybrid_needs.h"
#include "model/rope.h"
#include "tests/model/gguf_builder.h"

// Writes what a Hugging Face folder holds as the GGUF file that llama.cpp's converter would make of it: its names, its
// shapes, -exp(A_log), experts stacked and taken apart. For LFM2, Mamba-2, Nemotron-H without experts and GPT-OSS.

namespace dovetail::model::test {

class HybridGguf {
 public:
  explicit HybridGguf(const Checkpoint& from) : from_(from), c_(from.config()) {
    arch_ = c_.architecture == Architecture::kGptOss ? "gpt-oss" : std::string(Name(c_.architecture));
  }

  std::string Build() {
    Keys();
    for (const std::string& name : from_.names()) Tensor(name);
    for (const auto& [name, experts] : stacks_) Stack(name, experts);
    return file.Build();
  }

  GgufBuilder file;  // keys may be added before Build

 private:
  void U32(const std::string& key, int64_t value) { file.U32(arch_ + "." + key, static_cast<uint32_t>(value)); }
  void F32(const std::string& key, double value) { file.F32(arch_ + "." + key, static_cast<float>(value)); }

  void Keys() {
    file.Text("general.architecture", arch_);
    file.U32("tokenizer.ggml.bos_token_id", 1).U32("tokenizer.ggml.eos_token_id", 2);
    U32("block_count", static_cast<int64_t>(c_.layers.size()));
    U32("embedding_length", c_.hidden_size);
    U32("context_length", c_.max_positions);
    F32("attention.layer_norm_rms_epsilon", c_.norm_eps);
    std::vector<int32_t> kv, mlp;
    for (const LayerConfig& layer : c_.layers) {
      kv.push_back(HasAttention(layer.kind) ? static_cast<int32_t>(c_.kv_heads) : 0);
      mlp.push_back(layer.mlp == MlpKind::kNone ? 0 : static_cast<int32_t>(c_.intermediate_size));
    }
    const bool mamba = c_.architecture == Architecture::kMamba2;
    if (mamba) {
      U32("feed_forward_length", 0);
      U32("attention.head_count", 0);
    } else {
      file.I32s(arch_ + ".feed_forward_length", mlp);
      file.I32s(arch_ + ".attention.head_count_kv", kv);
      U32("attention.head_count", c_.heads);
      U32("attention.key_length", c_.key_dim);
      U32("attention.value_length", c_.value_dim);
    }
    if (!c_.ropes.empty()) Rope(c_.ropes[0]);
    if (c_.state && c_.state->family == StateConfig::Family::kConvolution)
      U32("shortconv.l_cache", c_.state->conv_width);
    if (c_.state && c_.state->family == StateConfig::Family::kMamba2) {
      U32("ssm.conv_kernel", c_.state->conv_width);
      U32("ssm.state_size", c_.state->key_dim);
      U32("ssm.group_count", c_.state->key_heads);
      U32("ssm.time_step_rank", c_.state->heads);
      U32("ssm.inner_size", c_.state->value_width());
    }
    if (c_.experts) {
      U32("expert_count", c_.experts->experts);
      U32("expert_used_count", c_.experts->chosen);
      U32("expert_feed_forward_length", c_.experts->intermediate);
    }
    for (const LayerConfig& layer : c_.layers)
      if (layer.window > 0) return U32("attention.sliding_window", layer.window);
  }

  void Rope(const RopeSpec& rope) {
    F32("rope.freq_base", rope.theta);
    if (rope.kind != RopeKind::kYarn) return;
    file.Text(arch_ + ".rope.scaling.type", "yarn");
    F32("rope.scaling.factor", rope.factor);
    U32("rope.scaling.original_context_length", rope.original_max_positions);
  }

  // Whole stored tensors, once each; experts wait until all are there.
  void Tensor(const std::string& canonical) {
    const TensorSource source = *from_.Find(canonical);
    if (const size_t experts = canonical.find(".experts."); experts != std::string::npos) {
      const size_t end = canonical.find('.', experts + 9);
      const std::string part = canonical.substr(end + 1);  // gate_proj.weight
      const std::string gguf = "blk." + canonical.substr(7, experts - 7) + ".ffn_" + part.substr(0, part.find('_')) +
                               "_exps" + part.substr(part.rfind('.'));
      stacks_[gguf].push_back(source);
      return;
    }
    const std::string from(source.stored_name);
    if (source.layout != TensorLayout::kRows || !written_.insert(from).second) return;
    const std::string name = GgufOf(from);
    std::vector<uint64_t> dims;  // innermost first, without those of 1 of a convolution
    std::vector<float> values;
    for (const StoredTensor& stored : from_.stored_tensors()) {
      if (stored.name != source.stored_name) continue;
      for (auto size = stored.shape.rbegin(); size != stored.shape.rend(); ++size)
        if (*size != 1 || stored.shape.size() < 3) dims.push_back(static_cast<uint64_t>(*size));
      TensorSource whole = source;
      whole.pattern = {};
      whole.rows = stored.elements / whole.cols;
      values = whole.ReadAll();
    }
    if (name.ends_with("ssm_a"))
      for (float& a : values) a = static_cast<float>(-std::exp(static_cast<double>(a)));
    if (name.ends_with("ssm_a") || name.ends_with("ssm_d")) dims.insert(dims.begin(), 1);
    file.Tensor(name, dims, values);
  }

  std::string GgufOf(const std::string& stored) const {
    const std::string layers = c_.tensor_prefix + "layers.";
    if (stored.starts_with(layers)) {
      const size_t end = stored.find('.', layers.size());
      return "blk." + stored.substr(layers.size(), end - layers.size()) + "." + GgufName(stored.substr(end + 1));
    }
    if (stored == "lm_head.weight") return "output.weight";
    if (stored.find("embed") != std::string::npos && stored.find("norm") == std::string::npos)
      return "token_embd.weight";
    return c_.architecture == Architecture::kLfm2 ? "token_embd_norm.weight" : "output_norm.weight";
  }

  void Stack(const std::string& name, const std::vector<TensorSource>& experts) {
    std::string bytes;
    for (const TensorSource& expert : experts) {
      const std::vector<std::byte> rows = expert.CopyRows();
      bytes.append(reinterpret_cast<const char*>(rows.data()), rows.size());
    }
    std::vector<uint64_t> dims;
    if (name.ends_with(".weight")) dims.push_back(static_cast<uint64_t>(experts[0].cols));
    dims.push_back(static_cast<uint64_t>(experts[0].rows));
    dims.push_back(experts.size());
    file.Tensor(name, dims, experts[0].type, bytes);
  }

  const Checkpoint& from_;
  const ModelConfig& c_;
  std::string arch_;
  std::set<std::string> written_;
  std::map<std::string, std::vector<TensorSource>> stacks_;
};

}  // namespace dovetail::model::test
