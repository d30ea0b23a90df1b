#include "tests/cluster/tiny_hybrid.h"

#include <cmath>
#include <fstream>
#include <map>
#include <random>
#include <vector>

#include "base/check.h"
#include "model/config.h"
#include "model/families/checkpoint_tensors.h"
#include "nlohmann/json.hpp"

namespace dovetail::test {
namespace {

using model::TensorNeed;

// Norms around 1, decays as trained models have them, everything else of a variance that keeps activations near 1.
std::vector<float> ValuesOf(const TensorNeed& need, int64_t count, bool minus_one, std::mt19937_64& random) {
  std::vector<float> values(count);
  const auto ends = [&](const char* name) { return need.canonical.ends_with(name); };
  const bool norm = need.canonical.find("norm") != std::string::npos;
  const double scale = need.cols > 0 ? 1.0 / std::sqrt(static_cast<double>(need.cols)) : 0.3;
  for (float& value : values) {
    const double uniform = static_cast<double>(random() >> 40) / (1 << 24);
    const double normal = (uniform - 0.5) * std::sqrt(12.0);
    double x = scale * normal;
    if (ends("a_log")) x = -2 + 3 * uniform;
    if (ends("decay_bias")) x = -4 + 3 * uniform;
    if (norm) x = (need.norm && minus_one ? 0.0 : 1.0) + 0.3 * normal;
    if (ends("embed.weight")) x = normal;
    value = static_cast<float>(x);
  }
  return values;
}

}  // namespace

std::filesystem::path WriteTinyFolder(const std::string& config_text, uint64_t seed,
                                      const std::filesystem::path& folder) {
  const auto json = nlohmann::json::parse(config_text);
  const auto config = model::ConfigFromJson("config.json", json, nullptr);
  DT_CHECK(config.ok(), config.status().ToString());
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << config_text;

  std::mt19937_64 random(seed);
  std::map<std::string, bool> written;  // fused tensors are asked for several times
  nlohmann::ordered_json header;
  std::string data;
  for (const TensorNeed& need : model::TensorsOf(*config)) {
    if (written[need.hf]) continue;
    written[need.hf] = true;
    const int64_t count = need.stored_rows * std::max<int64_t>(need.cols, 1);
    const std::vector<float> values = ValuesOf(need, count, config->norms_stored_minus_one, random);
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    std::vector<int64_t> shape{need.stored_rows};
    if (need.cols > 0) shape.push_back(need.cols);
    header[need.hf] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  std::ofstream out(folder / "model.safetensors", std::ios::binary);
  out.write(reinterpret_cast<const char*>(&size), sizeof(size));
  out << text << data;
  DT_CHECK(out.good());
  return folder;
}

std::string TinyGatedDeltaConfig() {
  return R"({"model_type": "qwen3_5_text", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5}})";
}

std::string TinyLightningConfig() {
  return R"({"model_type": "minimax", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 4, "num_experts_per_tok": 2, "linear_attn_alpha_factor": 1.5, "mlp_alpha_factor": 1.25,
    "full_attn_beta_factor": 0.75, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})";
}

std::string TinyMamba2Config() {
  return R"({"model_type": "mamba2", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
    "head_dim": 16, "n_groups": 2, "state_size": 16, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5,
    "use_conv_bias": true, "use_bias": false, "tie_word_embeddings": false})";
}

}  // namespace dovetail::test
