#include "tests/golden/converted_gguf.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "kernels/quant_format.h"
#include "model/formats/dequantize.h"
#include "model/formats/safetensors.h"
#include "nlohmann/json.hpp"
#include "tests/model/gguf_builder.h"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace {

using nlohmann::json;

struct Tensor {
  std::vector<int64_t> shape;  // outermost first
  std::vector<float> values;

  int64_t row_size() const { return static_cast<int64_t>(values.size()) / shape[0]; }
  Tensor Rows(int64_t first, int64_t count) const {
    Tensor part{shape, {}};
    part.shape[0] = count;
    part.values.assign(values.begin() + first * row_size(), values.begin() + (first + count) * row_size());
    return part;
  }
  void Append(const Tensor& other) {
    shape[0] += other.shape[0];
    values.insert(values.end(), other.values.begin(), other.values.end());
  }
  void Multiply(int64_t first, int64_t count, double factor) {  // rows
    for (int64_t i = first * row_size(); i < (first + count) * row_size(); ++i)
      values[i] = static_cast<float>(values[i] * factor);
  }
  void Multiply(double factor) { Multiply(0, shape[0], factor); }
};

std::map<std::string, Tensor> ReadFolder(const std::filesystem::path& folder) {
  const auto file = model::SafetensorsFile::OpenFolder(folder);
  DT_CHECK(file.ok(), file.status().ToString());
  std::map<std::string, Tensor> tensors;
  for (const model::SafetensorsTensor& stored : (*file)->tensors()) {
    Tensor tensor{stored.shape, std::vector<float>(static_cast<size_t>(stored.elements))};
    const model::GgmlType type = stored.dtype == "BF16" ? model::GgmlType::kBF16 : model::GgmlType::kF32;
    DT_CHECK(stored.dtype == "BF16" || stored.dtype == "F32");
    model::Dequantize(type, stored.bytes.data(), stored.elements, tensor.values.data());
    tensors[std::string(stored.name)] = std::move(tensor);
  }
  return tensors;
}

// [a][b][size] of a tensor's first dimension to [b][a][size].
Tensor Swapped(const Tensor& in, int64_t a, int64_t b, int64_t size) {
  Tensor out = in;
  const int64_t row = in.row_size() * size;
  for (int64_t i = 0; i < a; ++i)
    for (int64_t j = 0; j < b; ++j)
      std::copy_n(in.values.begin() + (i * b + j) * row, row, out.values.begin() + (j * a + i) * row);
  return out;
}

// The halves of each head's rows, interleaved.
Tensor Interleaved(const Tensor& in, int64_t heads) {
  const int64_t dim = in.shape[0] / heads;
  Tensor out{in.shape, {}};
  for (int64_t head = 0; head < heads; ++head) {
    const Tensor swapped = Swapped(in.Rows(head * dim, dim), 2, dim / 2, 1);
    out.values.insert(out.values.end(), swapped.values.begin(), swapped.values.end());
  }
  return out;
}

Tensor Transposed(const Tensor& in) {
  Tensor out{{in.shape[1], in.shape[0]}, std::vector<float>(in.values.size())};
  for (int64_t i = 0; i < in.shape[0]; ++i)
    for (int64_t j = 0; j < in.shape[1]; ++j) out.values[j * in.shape[0] + i] = in.values[i * in.shape[1] + j];
  return out;
}

constexpr std::pair<const char*, const char*> kLayerNames[] = {
    {"input_layernorm", "attn_norm"},
    {"norm", "attn_norm"},
    {"post_attention_layernorm", "ffn_norm"},
    {"pre_ff_layernorm", "ffn_norm"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"},
    {"self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"},
    {"self_attn.kv_a_layernorm", "attn_kv_a_norm"},
    {"self_attn.q_conv1d", "ssm_conv1d_q"},
    {"self_attn.k_conv1d", "ssm_conv1d_k"},
    {"self_attn.v_conv1d", "ssm_conv1d_v"},
    {"self_attn.f_a_proj", "ssm_f_a"},
    {"self_attn.f_b_proj", "ssm_f_b"},
    {"self_attn.b_proj", "ssm_beta"},
    {"self_attn.g_a_proj", "ssm_g_a"},
    {"self_attn.g_b_proj", "ssm_g_b"},
    {"self_attn.o_norm", "ssm_norm"},
    {"self_attn.A_log", "ssm_a"},
    {"self_attn.dt_bias", "ssm_dt.bias"},
    {"mixer.q_proj", "attn_q"},
    {"mixer.k_proj", "attn_k"},
    {"mixer.v_proj", "attn_v"},
    {"mixer.o_proj", "attn_output"},
    {"mixer.gate", "ffn_gate_inp"},
    {"mixer.gate.e_score_correction_bias", "exp_probs_b.bias"},
    {"mixer.shared_experts.up_proj", "ffn_up_shexp"},
    {"mixer.shared_experts.down_proj", "ffn_down_shexp"},
    {"mixer.fc1_latent_proj", "ffn_latent_down"},
    {"mixer.fc2_latent_proj", "ffn_latent_up"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"mlp.gate", "ffn_gate_inp"},
    {"mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
    {"mlp.shared_expert.up_proj", "ffn_up_shexp"},
    {"mlp.shared_expert.down_proj", "ffn_down_shexp"},
    {"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
    {"feed_forward.gate_proj", "ffn_gate"},
    {"feed_forward.up_proj", "ffn_up"},
    {"feed_forward.down_proj", "ffn_down"},
    {"block_sparse_moe.gate_proj", "ffn_gate"},
    {"block_sparse_moe.up_proj", "ffn_up"},
    {"block_sparse_moe.down_proj", "ffn_down"},
    {"block_sparse_moe.gate", "ffn_gate_inp"},
    {"block_sparse_moe.router.layer", "ffn_gate_inp"},
    {"block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"},
    {"block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias"},
    {"block_sparse_moe.output_linear", "ffn_down_exps"},
    {"block_sparse_moe.shared_experts.gate_proj", "ffn_gate_shexp"},
    {"block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"},
    {"block_sparse_moe.shared_experts.down_proj", "ffn_down_shexp"},
    {"linear_attn.in_proj_qkv", "attn_qkv"},
    {"linear_attn.in_proj_z", "attn_gate"},
    {"linear_attn.in_proj_ba", "ssm_ba"},
    {"linear_attn.in_proj_b", "ssm_beta"},
    {"linear_attn.in_proj_a", "ssm_alpha"},
};

class Converter {
 public:
  Converter(const std::filesystem::path& folder, const std::string& arch, LatentKeys keys, model::GgmlType experts)
      : arch_(arch),
        config_(json::parse(ReadFile(folder / "config.json"))),
        keys_(keys),
        experts_(experts),
        tensors_(ReadFolder(folder)) {
    if (keys != LatentKeys::kAsTheyAre) WidenLatentKeys();
  }

  std::string Convert() {
    Keys();
    for (auto& [name, tensor] : tensors_) Whole(name, std::move(tensor));
    for (auto& [name, experts] : stacks_) Stack(name, experts);
    return file_.Build();
  }

 private:
  bool Is(const std::set<std::string>& archs) const { return archs.contains(arch_); }
  int64_t Int(const char* key, int64_t missing = -1) const {
    const auto it = config_.find(key);
    return it == config_.end() || it->is_null() ? missing : it->get<int64_t>();
  }
  double Number(const char* key, double missing) const { return config_.value(key, missing); }
  void U32(const std::string& key, int64_t value) {
    if (value >= 0) file_.U32(arch_ + "." + key, static_cast<uint32_t>(value));
  }
  void F32(const std::string& key, double value) { file_.F32(arch_ + "." + key, static_cast<float>(value)); }

  void Keys() {
    file_.Text("general.architecture", arch_);
    file_.U32("tokenizer.ggml.bos_token_id", 1).U32("tokenizer.ggml.eos_token_id", 2);
    const int64_t heads = Int("num_attention_heads");
    const auto blocks = config_.find("layers_block_type");
    const int64_t layers = blocks != config_.end() ? static_cast<int64_t>(blocks->size()) : Int("num_hidden_layers");
    U32("block_count", layers + (arch_ == "qwen35moe" ? 1 : 0));
    if (arch_ == "qwen35moe") PredictedLayer(layers);
    U32("embedding_length", Int("hidden_size"));
    U32("context_length", Int("max_position_embeddings", Int("model_max_length")));
    F32("attention.layer_norm_rms_epsilon", Number("rms_norm_eps", Number("layer_norm_epsilon", 0)));
    U32("attention.head_count", heads);
    if (arch_ != "nemotron_h_moe") U32("feed_forward_length", Int("intermediate_size"));
    if (config_.contains("rope_parameters"))
      F32("rope.freq_base", config_["rope_parameters"]["rope_theta"].get<double>());
    if (Is({"llama", "qwen3moe", "minimax-m2", "qwen3next", "qwen35", "qwen35moe", "falcon-h1"}))
      U32("attention.head_count_kv", Int("num_key_value_heads"));
    if (Is({"qwen3moe", "minimax-m2", "qwen3next", "qwen35", "qwen35moe", "falcon-h1", "nemotron_h_moe"})) {
      U32("attention.key_length", Int("head_dim"));
      U32("attention.value_length", Int("head_dim"));
    }
    if (const double part = Number("partial_rotary_factor", RopeNumber("partial_rotary_factor")); part < 1)
      U32("rope.dimension_count",
          static_cast<int64_t>(part * static_cast<double>(Int("head_dim", Int("hidden_size") / heads))));
    ExpertKeys();
    if (Is({"qwen3next", "qwen35", "qwen35moe"})) GatedDeltaKeys();
    if (arch_ == "kimi-linear") KimiKeys(layers);
    if (Is({"granitehybrid", "falcon-h1", "nemotron_h_moe"})) MambaKeys(layers);
  }
  // Published files have a layer of multi-token prediction behind the others.
  void PredictedLayer(int64_t layer) {
    U32("nextn_predict_layers", 1);
    const int64_t hidden = Int("hidden_size");
    const std::string name = "blk." + std::to_string(layer) + ".nextn.";
    Put(name + "eh_proj.weight", {{hidden, 2 * hidden}, std::vector<float>(2 * hidden * hidden, 0.5f)});
    Put(name + "enorm.weight", {{hidden}, std::vector<float>(hidden, 1.0f)});
  }
  double RopeNumber(const char* key) const {
    return config_.contains("rope_parameters") ? config_["rope_parameters"].value(key, 1.0) : 1.0;
  }

  void ExpertKeys() {
    const int64_t count = Int("num_local_experts", Int("num_experts", Int("n_routed_experts", 0)));
    if (count == 0) return;
    U32("expert_count", count);
    U32("expert_used_count", Int("num_experts_per_tok", Int("num_experts_per_token")));
    U32("expert_feed_forward_length", Int("moe_intermediate_size"));
    if (Is({"minimax-m2"})) U32("expert_feed_forward_length", Int("intermediate_size"));
    if (Is({"minimax-m2", "kimi-linear"})) U32("expert_gating_func", 2);
    if (arch_ == "granitehybrid") U32("expert_shared_feed_forward_length", Int("shared_intermediate_size"));
    if (Is({"qwen3next", "qwen35moe"}))
      U32("expert_shared_feed_forward_length", Int("shared_expert_intermediate_size"));
    if (arch_ == "nemotron_h_moe") {
      U32("expert_shared_feed_forward_length", Int("moe_shared_expert_intermediate_size"));
      U32("expert_shared_count", Int("n_shared_experts"));
      U32("expert_group_count", Int("n_group"));
      U32("expert_group_used_count", Int("topk_group"));
      U32("moe_latent_size", Int("moe_latent_size"));
      file_.Bool(arch_ + ".expert_weights_norm", config_["norm_topk_prob"].get<bool>());
    }
    if (arch_ == "kimi-linear") U32("expert_shared_count", Int("num_shared_experts"));
    if (config_.contains("routed_scaling_factor")) F32("expert_weights_scale", Number("routed_scaling_factor", 1));
  }

  void GatedDeltaKeys() {
    U32("ssm.conv_kernel", Int("linear_conv_kernel_dim"));
    U32("ssm.state_size", Int("linear_key_head_dim"));
    U32("ssm.group_count", Int("linear_num_key_heads"));
    U32("ssm.time_step_rank", Int("linear_num_value_heads"));
    U32("ssm.inner_size", Int("linear_value_head_dim") * Int("linear_num_value_heads"));
    U32("full_attention_interval", 4);
  }

  void KimiKeys(int64_t layers) {
    std::vector<int32_t> kv;
    for (int64_t i = 0; i < layers; ++i) kv.push_back(config_["layer_types"][i] == "full_attention" ? 1 : 0);
    file_.I32s(arch_ + ".attention.head_count_kv", kv);
    U32("ssm.conv_kernel", Int("linear_conv_kernel_dim"));
    U32("kda.head_dim", Int("linear_head_dim"));
    U32("attention.kv_lora_rank", Int("kv_lora_rank"));
    U32("rope.dimension_count", Int("qk_rope_head_dim"));
    U32("attention.key_length", Int("kv_lora_rank") + Int("qk_rope_head_dim"));
    U32("attention.key_length_mla", Int("qk_nope_head_dim") + Int("qk_rope_head_dim"));
    U32("attention.value_length_mla", Int("v_head_dim"));
    U32("leading_dense_block_count", 1);
  }

  bool Attends(int64_t layer) const {
    if (arch_ == "nemotron_h_moe") return config_["layers_block_type"][layer] == "full_attention";
    if (config_.contains("layer_types")) return config_["layer_types"][layer] == "full_attention";
    for (const auto& index : config_["attn_layer_indices"])
      if (index == layer) return true;
    return false;
  }

  void MambaKeys(int64_t layers) {
    const bool nemotron = arch_ == "nemotron_h_moe";
    const int64_t count = Int("mamba_n_heads", Int("mamba_num_heads"));
    U32("ssm.conv_kernel", Int("mamba_d_conv", Int("conv_kernel")));
    U32("ssm.state_size", Int("mamba_d_state", Int("ssm_state_size")));
    U32("ssm.group_count", Int("mamba_n_groups", Int("n_groups")));
    U32("ssm.time_step_rank", count);
    U32("ssm.inner_size", count * Int("mamba_d_head", Int("mamba_head_dim")));
    if (arch_ == "falcon-h1") return;
    std::vector<int32_t> kv, mlp;
    for (int64_t i = 0; i < layers; ++i) {
      kv.push_back(Attends(i) ? static_cast<int32_t>(Int("num_key_value_heads")) : 0);
      const bool sparse = nemotron && config_["layers_block_type"][i] == "moe";
      mlp.push_back(sparse ? static_cast<int32_t>(Int("moe_intermediate_size")) : 0);
    }
    file_.I32s(arch_ + ".attention.head_count_kv", kv);
    if (nemotron) return (void)file_.I32s(arch_ + ".feed_forward_length", mlp);
    file_.Bool(arch_ + ".rope.scaling.finetuned",
               config_["model_type"] == "bamba" || config_.value("position_embedding_type", "") == "rope");
    if (!config_.contains("attention_multiplier")) return;
    F32("attention.scale", Number("attention_multiplier", 1));
    F32("embedding_scale", Number("embedding_multiplier", 1));
    F32("residual_scale", Number("residual_multiplier", 1));
    F32("logit_scale", Number("logits_scaling", 1));
  }

  void Put(const std::string& name, const Tensor& tensor) {
    file_.Tensor(name, std::vector<uint64_t>(tensor.shape.rbegin(), tensor.shape.rend()), tensor.values);
  }

  void Whole(const std::string& name, Tensor tensor) {
    const bool one_more = Is({"qwen3next", "qwen35", "qwen35moe"}) && name.ends_with("norm.weight") &&
                          !name.ends_with("linear_attn.norm.weight");
    if (one_more)
      for (float& value : tensor.values) value += 1;
    if (arch_ == "falcon-h1") Falcon(name, tensor);
    const size_t layers = name.find("layers.");
    if (name == "lm_head.weight") return Put("output.weight", tensor);
    if (layers == std::string::npos)
      return Put(name.find("embed") != std::string::npos ? "token_embd.weight" : "output_norm.weight", tensor);
    const size_t dot = name.find('.', layers + 7);
    layer_ = name.substr(layers + 7, dot - layers - 7);
    InLayer(name.substr(dot + 1), std::move(tensor));
  }

  // The multipliers become parts of the weights.
  void Falcon(const std::string& name, Tensor& tensor) {
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    const double in = Number("attention_in_multiplier", 1);
    if (has("down_proj")) return tensor.Multiply(config_["mlp_multipliers"][1].get<double>());
    if (has("gate_proj")) return tensor.Multiply(config_["mlp_multipliers"][0].get<double>());
    if (has("k_proj")) return tensor.Multiply(Number("key_multiplier", 1) * in);
    if (has("q_proj") || has("v_proj")) return tensor.Multiply(in);
    if (has("o_proj")) return tensor.Multiply(Number("attention_out_multiplier", 1));
    if (has("out_proj")) return tensor.Multiply(Number("ssm_out_multiplier", 1));
    if (has("lm_head")) return tensor.Multiply(Number("lm_head_multiplier", 1));
    if (has("embed_tokens")) return tensor.Multiply(Number("embedding_multiplier", 1));
    if (!has("in_proj")) return;
    const int64_t inner = Int("mamba_d_ssm"), keys = Int("mamba_n_groups") * Int("mamba_d_state");
    tensor.Multiply(Number("ssm_in_multiplier", 1));
    int64_t first = 0, part = 0;
    for (const int64_t rows : {inner, inner, keys, keys, Int("mamba_n_heads")}) {
      tensor.Multiply(first, rows, config_["ssm_multipliers"][part++].get<double>());
      first += rows;
    }
  }

  void InLayer(const std::string& name, Tensor tensor) {
    const std::string blk = "blk." + layer_ + ".";
    if (Fused(name, blk, tensor)) return;
    if (const size_t experts = name.find("experts."); experts != std::string::npos && name[experts + 8] <= '9') {
      const std::string part = name.substr(name.find('.', experts + 8) + 1);
      const char* kind = part.starts_with("gate") || part.starts_with("w1")   ? "gate"
                         : part.starts_with("down") || part.starts_with("w2") ? "down"
                                                                              : "up";
      stacks_[blk + "ffn_" + kind + "_exps.weight"][std::stoi(name.substr(experts + 8))] = std::move(tensor);
      return;
    }
    const size_t end = name.rfind('.');
    std::string base = name, ending;
    if (name.ends_with(".weight") || name.ends_with(".bias")) base = name.substr(0, end), ending = name.substr(end);
    std::string gguf;
    for (const auto& [hf, own] : kLayerNames)
      if (base == hf) gguf = own;
    if (base == "post_attention_layernorm" && Is({"qwen3next", "qwen35", "qwen35moe"})) gguf = "post_attention_norm";
    if (base == "pre_ff_layernorm" && arch_ == "falcon-h1") ending.clear();  // the mapping has the ending in its key
    if (gguf.empty()) gguf = State(base, tensor);
    if (base.ends_with("A_log"))
      for (float& value : tensor.values) value = static_cast<float>(-std::exp(static_cast<double>(value)));
    if (base.find("conv1d") != std::string::npos && ending == ".weight" && tensor.shape.size() == 3)
      tensor.shape = base.starts_with("self_attn") ? std::vector<int64_t>{1, tensor.shape[0], 1, tensor.shape[2]}
                                                   : std::vector<int64_t>{tensor.shape[0], tensor.shape[2]};
    if (Is({"llama", "granitehybrid"}) && (base == "self_attn.q_proj" || base == "self_attn.k_proj"))
      tensor = Interleaved(tensor, Int(base == "self_attn.q_proj" ? "num_attention_heads" : "num_key_value_heads"));
    if (Is({"qwen35", "qwen35moe"})) Tile(base, tensor);
    Put(blk + gguf + ending, tensor);
  }

  // Of mamba., mixer. and linear_attn.
  std::string State(const std::string& base, Tensor& tensor) const {
    const std::string part = base.substr(base.find('.') + 1);
    const bool mamba = !base.starts_with("linear_attn.");
    if (part == "in_proj") return "ssm_in";
    if (part == "conv1d") return "ssm_conv1d";
    if (part == "dt_bias") return "ssm_dt.bias";
    if (part == "out_proj") return "ssm_out";
    if (part == "norm") {
      const int64_t groups = Int("mamba_n_groups", Int("n_groups"));
      if (mamba) tensor.shape = {groups, tensor.shape[0] / groups};
      return "ssm_norm";
    }
    DT_CHECK(part == "A_log" || part == "D", base);
    if (mamba) tensor.shape.push_back(1);
    return part == "D" ? "ssm_d" : "ssm_a";
  }

  // What is taken apart.
  bool Fused(const std::string& name, const std::string& blk, const Tensor& tensor) {
    if (name == "linear_attn.in_proj_qkvz.weight") return SplitQkvz(blk, tensor), true;
    if (name == "self_attn.kv_b_proj.weight") return SplitLatent(blk, tensor), true;
    const bool experts = name == "block_sparse_moe.input_linear.weight";
    if (!experts && !name.starts_with("shared_mlp.")) return false;
    const std::string kind = experts ? "_exps.weight" : Int("num_local_experts", 0) > 0 ? "_shexp.weight" : ".weight";
    if (name == "shared_mlp.output_linear.weight") return Put(blk + "ffn_down" + kind, tensor), true;
    const int64_t count = experts ? tensor.shape[0] : 1, rows = tensor.shape[experts ? 1 : 0] / 2;
    Tensor flat{{2 * rows * count, tensor.shape.back()}, tensor.values};
    for (const int64_t half : {0, 1}) {
      Tensor out{{0, tensor.shape.back()}, {}};
      for (int64_t x = 0; x < count; ++x) out.Append(flat.Rows((2 * x + half) * rows, rows));
      if (experts) out.shape = {count, rows, tensor.shape.back()};
      Put(blk + (half == 0 ? "ffn_gate" : "ffn_up") + kind, out);
    }
    return true;
  }

  void SplitQkvz(const std::string& blk, const Tensor& tensor) {
    const int64_t dk = Int("linear_key_head_dim"), dv = Int("linear_value_head_dim");
    const int64_t keys = Int("linear_num_key_heads");
    const int64_t width = Int("linear_num_value_heads") / keys * dv, stride = 2 * dk + 2 * width;
    Tensor parts[4];
    for (Tensor& part : parts) part.shape = {0, tensor.shape[1]};
    for (int64_t head = 0; head < keys; ++head) {
      int64_t at = head * stride;
      for (int i = 0; i < 4; ++i) {
        parts[i].Append(tensor.Rows(at, i < 2 ? dk : width));
        at += i < 2 ? dk : width;
      }
    }
    parts[0].Append(parts[1]);
    parts[0].Append(parts[2]);
    Put(blk + "attn_qkv.weight", parts[0]);
    Put(blk + "attn_gate.weight", parts[3]);
  }

  void SplitLatent(const std::string& blk, const Tensor& tensor) {
    const int64_t heads = Int("num_key_value_heads"), own = Int("qk_nope_head_dim"), dv = Int("v_head_dim");
    Tensor k{{0, own}, {}}, v{{0, tensor.shape[1]}, {}};
    for (int64_t head = 0; head < heads; ++head) {
      k.Append(Transposed(tensor.Rows(head * (own + dv), own)));
      v.Append(tensor.Rows(head * (own + dv) + own, dv));
    }
    k.shape = {heads, tensor.shape[1], own};
    v.shape = {heads, dv, tensor.shape[1]};
    const std::string name = blk + "attn_k_b.weight";
    if (keys_ == LatentKeys::kAsTheyAre) {
      Put(name, k);
    } else {
      const std::string blocks = InQ8(k.values);
      if (keys_ == LatentKeys::kWideInQ8) {
        file_.Tensor(name, std::vector<uint64_t>(k.shape.rbegin(), k.shape.rend()), model::GgmlType::kQ8_0, blocks);
      } else {
        model::Dequantize(model::GgmlType::kQ8_0, reinterpret_cast<const std::byte*>(blocks.data()),
                          static_cast<int64_t>(k.values.size()), k.values.data());
        Put(name, k);
      }
    }
    Put(blk + "attn_v_b.weight", v);
  }

  static std::string InQ8(const std::vector<float>& values) {
    std::string bytes;
    for (size_t first = 0; first < values.size(); first += 32) {
      float most = 0;
      for (size_t i = 0; i < 32; ++i) most = std::max(most, std::abs(values[first + i]));
      const dovetail::F16 scale = dovetail::ToF16(most / 127);
      bytes.append(reinterpret_cast<const char*>(&scale.bits), sizeof(scale.bits));
      for (size_t i = 0; i < 32; ++i)
        bytes.push_back(static_cast<char>(std::lround(most > 0 ? values[first + i] / dovetail::ToFloat(scale) : 0)));
    }
    return bytes;
  }

  static std::string InQ4(const std::vector<float>& values) {
    std::string bytes;
    for (size_t first = 0; first < values.size(); first += 32) {
      float most = 0;  // the value of the largest magnitude becomes code 0, which is -8
      for (size_t i = 0; i < 32; ++i)
        if (std::abs(values[first + i]) > std::abs(most)) most = values[first + i];
      const dovetail::F16 scale = dovetail::ToF16(most / -8);
      const float of_one = dovetail::ToFloat(scale);
      const auto code = [&](size_t i) {
        return std::clamp(of_one != 0 ? std::lround(values[first + i] / of_one) + 8 : 8, 0L, 15L);
      };
      bytes.append(reinterpret_cast<const char*>(&scale.bits), sizeof(scale.bits));
      for (size_t i = 0; i < 16; ++i) bytes.push_back(static_cast<char>(code(i) | code(i + 16) << 4));
    }
    return bytes;
  }

  static std::string InMxfp4(const std::vector<float>& values) {
    constexpr int kBias = 128;  // of the exponent, for values that are doubled
    std::string bytes;
    for (size_t first = 0; first < values.size(); first += 32) {
      float most = 1e-6f;
      for (size_t i = 0; i < 32; ++i) most = std::max(most, std::abs(values[first + i]));
      const int exponent = static_cast<int>(std::ceil(std::log2(most / 12)));  // the largest value is 6
      const auto code = [&](size_t i) {
        const float wanted = std::ldexp(values[first + i], -exponent);
        int best = 0;
        for (int c = 1; c < 16; ++c)
          if (std::abs(kernels::kFp4Doubled[c] - wanted) < std::abs(kernels::kFp4Doubled[best] - wanted)) best = c;
        return best;
      };
      bytes.push_back(static_cast<char>(exponent + kBias));
      for (size_t i = 0; i < 16; ++i) bytes.push_back(static_cast<char>(code(i) | code(i + 16) << 4));
    }
    return bytes;
  }

  // Twice the channels that keys have from the latent; new ones are the old ones in another order, halved.
  void WidenLatentKeys() {
    const int64_t own = Int("qk_nope_head_dim"), heads = Int("num_attention_heads");
    for (auto& [name, tensor] : tensors_) {
      const size_t end = name.find("self_attn.");
      if (end == std::string::npos || !tensors_.contains(name.substr(0, end) + "self_attn.kv_b_proj.weight")) continue;
      const bool q = name.ends_with("self_attn.q_proj.weight");
      if (!q && !name.ends_with("self_attn.kv_b_proj.weight")) continue;
      const int64_t stride = own + Int(q ? "qk_rope_head_dim" : "v_head_dim");
      Tensor wide{{0, tensor.shape[1]}, {}};
      for (int64_t head = 0; head < heads; ++head) {
        wide.Append(tensor.Rows(head * stride, own));
        for (int64_t k = own; k-- > 0;) wide.Append(tensor.Rows(head * stride + k, 1));
        wide.Multiply(wide.shape[0] - own, own, 0.5);
        wide.Append(tensor.Rows(head * stride + own, stride - own));
      }
      tensor = std::move(wide);
    }
    config_["qk_nope_head_dim"] = 2 * own;
  }

  // Value heads sorted by their place among those that share a key head.
  void Tile(const std::string& base, Tensor& tensor) const {
    const int64_t keys = Int("linear_num_key_heads"), each = Int("linear_num_value_heads") / keys;
    const int64_t dv = Int("linear_value_head_dim"), first = 2 * keys * Int("linear_key_head_dim");
    if (base == "linear_attn.in_proj_z") tensor = Swapped(tensor, keys, each, dv);
    if (base == "linear_attn.in_proj_a" || base == "linear_attn.in_proj_b" || base == "linear_attn.A_log" ||
        base == "linear_attn.dt_bias")
      tensor = Swapped(tensor, keys, each, 1);
    if (base == "linear_attn.in_proj_qkv" || base == "linear_attn.conv1d") {
      Tensor out = tensor.Rows(0, first);
      out.Append(Swapped(tensor.Rows(first, tensor.shape[0] - first), keys, each, dv));
      tensor = std::move(out);
    }
    if (base == "linear_attn.out_proj") tensor = Transposed(Swapped(Transposed(tensor), keys, each, dv));
  }

  void Stack(const std::string& name, const std::map<int, Tensor>& experts) {
    Tensor all = experts.at(0);
    for (size_t x = 1; x < experts.size(); ++x) all.Append(experts.at(static_cast<int>(x)));
    all.shape.insert(all.shape.begin(), static_cast<int64_t>(experts.size()));
    all.shape[1] /= all.shape[0];
    if (experts_ == model::GgmlType::kF32 || all.shape.back() % 32 != 0) return Put(name, all);
    const std::string bytes = experts_ == model::GgmlType::kQ8_0   ? InQ8(all.values)
                              : experts_ == model::GgmlType::kQ4_0 ? InQ4(all.values)
                                                                   : InMxfp4(all.values);
    file_.Tensor(name, std::vector<uint64_t>(all.shape.rbegin(), all.shape.rend()), experts_, bytes);
  }

  const std::string arch_;
  json config_;
  const LatentKeys keys_;
  const model::GgmlType experts_;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::map<int, Tensor>> stacks_;
  std::string layer_;
  model::test::GgufBuilder file_;
};

}  // namespace

std::string ConvertedGguf(const std::filesystem::path& folder, const std::string& arch, LatentKeys keys,
                          model::GgmlType experts) {
  return Converter(folder, arch, keys, experts).Convert();
}

}  // namespace dovetail::test
