#include "model/families/hybrid_needs.h"

// Weights of layers with experts; canonical names are in checkpoint_tensors_hybrid.cc.

namespace dovetail::model {
namespace {

void AppendGatedMlp(HybridNeeds& needs, const std::string& canonical, const std::string& gate, const std::string& up,
                    const std::string& down, int64_t intermediate) {
  const int64_t h = needs.config.hidden_size;
  needs.Add(canonical + "gate_proj.weight", gate, intermediate, h);
  needs.Add(canonical + "up_proj.weight", up, intermediate, h);
  needs.Add(canonical + "down_proj.weight", down, h, intermediate);
}

// Expert x also as rows of a tensor of all experts, as transformers 5 keeps them in memory: each has `outs` there.
void OrFused(HybridNeeds& needs, TensorNeed& need, const std::string& fused, int64_t x, int64_t first, int64_t outs) {
  StoredPlace place;
  place.names = {needs.Stored(fused)};
  place.pattern = {need.rows, 0, x * outs + first};
  place.stored_rows = needs.config.experts->experts * outs;
  need.others.push_back(std::move(place));
}

// Gate and up of all experts in one tensor, down in another; the dense MLP is an expert for every token.
void AppendGranite(HybridNeeds& needs) {
  const ExpertConfig& e = *needs.config.experts;
  const int64_t h = needs.config.hidden_size, i = e.intermediate, s = e.shared_intermediate;
  needs.Add("router.weight", "block_sparse_moe.router.layer.weight", e.experts, h);
  for (int64_t x = 0; x < e.experts; ++x) {
    const std::string expert = absl::StrCat("experts.", x, ".");
    const std::string in = "block_sparse_moe.input_linear.weight";
    needs.Add(expert + "gate_proj.weight", in, i, h, {i, 0, 2 * i * x}, 2 * i * e.experts);
    needs.Add(expert + "up_proj.weight", in, i, h, {i, 0, 2 * i * x + i}, 2 * i * e.experts);
    needs.Add(expert + "down_proj.weight", "block_sparse_moe.output_linear.weight", h, i, {h, 0, h * x}, h * e.experts);
  }
  needs.Add("shared_expert.gate_proj.weight", "shared_mlp.input_linear.weight", s, h, {s, 0, 0}, 2 * s);
  needs.Add("shared_expert.up_proj.weight", "shared_mlp.input_linear.weight", s, h, {s, 0, s}, 2 * s);
  needs.Add("shared_expert.down_proj.weight", "shared_mlp.output_linear.weight", h, s);
}

// Where GPT-OSS keeps one of the projections of an expert.
struct GptOssProjection {
  const char* canonical;
  const char* stored;  // of all experts
  int64_t outs;        // out features there
  RowPattern pattern;  // which of them
  const char* gguf;    // of all experts, and nothing else
};

// Hugging Face folders hold codes and scales of MXFP4, or a transposed matrix if they were never quantised; GGUF files
// hold rows.
void AppendGptOssProjection(HybridNeeds& needs, const GptOssProjection& projection, int64_t x, int64_t rows,
                            int64_t cols) {
  const int64_t experts = needs.config.experts->experts, outs = projection.outs;
  const std::string canonical = absl::StrCat("experts.", x, ".", projection.canonical);
  const std::string stored = absl::StrCat("mlp.experts.", projection.stored);
  StoredPlace mxfp4, columns, biases;
  mxfp4.names = {needs.Stored(stored + "_blocks"), needs.Stored(stored + "_scales")};
  mxfp4.layout = TensorLayout::kMxfp4;
  mxfp4.stored_rows = experts * outs;
  mxfp4.pattern = projection.pattern;
  mxfp4.pattern.first += x * outs;
  columns.names = {needs.Stored(stored)};
  columns.layout = TensorLayout::kColumns;
  columns.stored_rows = experts * cols;
  columns.stored_cols = outs;
  columns.first_row = x * cols;
  columns.pattern = projection.pattern;
  biases.names = {needs.Stored(stored + "_bias")};
  biases.stored_rows = experts * outs;
  biases.pattern = mxfp4.pattern;
  const RowPattern own = {rows, 0, rows * x};
  TensorNeed& weight = needs.Add(canonical + ".weight", "", rows, cols, own, experts * rows);
  weight.hf.clear();
  weight.gguf = needs.Gguf(absl::StrCat(projection.gguf, ".weight"));
  weight.others = {std::move(mxfp4), std::move(columns)};
  TensorNeed& bias = needs.Add(canonical + ".bias", "", rows, 0, own, experts * rows);
  bias.hf.clear();
  bias.gguf = needs.Gguf(absl::StrCat(projection.gguf, ".bias"));
  bias.others = {std::move(biases)};
}

void AppendGptOss(HybridNeeds& needs) {
  const ExpertConfig& e = *needs.config.experts;
  const int64_t h = needs.config.hidden_size, i = e.intermediate;
  needs.Project("router", "mlp.router", e.experts, h, e.router_bias);
  for (int64_t x = 0; x < e.experts; ++x) {
    AppendGptOssProjection(needs, {"gate_proj", "gate_up_proj", 2 * i, {1, 2, 0}, "ffn_gate_exps"}, x, i, h);
    AppendGptOssProjection(needs, {"up_proj", "gate_up_proj", 2 * i, {1, 2, 1}, "ffn_up_exps"}, x, i, h);
    AppendGptOssProjection(needs, {"down_proj", "down_proj", h, {h, 0, 0}, "ffn_down_exps"}, x, h, i);
  }
}

// Experts without a gate, maybe behind a projection to fewer dimensions that they share.
void AppendNemotron(HybridNeeds& needs) {
  const ExpertConfig& e = *needs.config.experts;
  const int64_t h = needs.config.hidden_size, in = e.latent > 0 ? e.latent : h, i = e.intermediate;
  const std::string m = "mixer.";
  needs.Add("router.weight", m + "gate.weight", e.experts, h);
  needs.Add("router.selection_bias", m + "gate.e_score_correction_bias", e.experts, 0);
  if (e.latent > 0) {
    needs.Add("experts.latent_down_proj.weight", m + "fc1_latent_proj.weight", in, h);
    needs.Add("experts.latent_up_proj.weight", m + "fc2_latent_proj.weight", h, in);
  }
  for (int64_t x = 0; x < e.experts; ++x) {
    const std::string expert = absl::StrCat("experts.", x, "."), stored = m + expert;
    TensorNeed& up = needs.Add(expert + "up_proj.weight", stored + "up_proj.weight", i, in);
    OrFused(needs, up, m + "experts.up_proj", x, 0, i);
    TensorNeed& down = needs.Add(expert + "down_proj.weight", stored + "down_proj.weight", in, i);
    OrFused(needs, down, m + "experts.down_proj", x, 0, in);
  }
  const int64_t s = e.shared_intermediate;
  needs.Add("shared_expert.up_proj.weight", m + "shared_experts.up_proj.weight", s, h);
  needs.Add("shared_expert.down_proj.weight", m + "shared_experts.down_proj.weight", h, s);
}

// Expert by expert.
void AppendListed(HybridNeeds& needs) {
  const ExpertConfig& e = *needs.config.experts;
  const Architecture family = needs.config.architecture;
  const bool qwen =
      family == Architecture::kQwen3Moe || family == Architecture::kQwen3Next || family == Architecture::kQwen35Moe;
  const bool kimi = family == Architecture::kKimiLinear;
  const int64_t h = needs.config.hidden_size;
  const std::string moe = qwen ? "mlp." : "block_sparse_moe.";
  needs.Add("router.weight", moe + "gate.weight", e.experts, h);
  if (e.selection_bias)
    needs.Add("router.selection_bias", moe + (kimi ? "gate." : "") + "e_score_correction_bias", e.experts, 0);
  for (int64_t x = 0; x < e.experts; ++x) {
    const std::string expert = absl::StrCat("experts.", x, "."), stored = moe + expert;
    const auto add = [&](const char* canonical, const char* name, int64_t rows, int64_t cols, const char* fused,
                         int64_t first, int64_t outs) {
      TensorNeed& need = needs.Add(expert + canonical, stored + name, rows, cols);
      OrFused(needs, need, moe + "experts." + fused, x, first, outs);
    };
    const int64_t i = e.intermediate;
    add("gate_proj.weight", qwen ? "gate_proj.weight" : "w1.weight", i, h, "gate_up_proj", 0, 2 * i);
    add("up_proj.weight", qwen ? "up_proj.weight" : "w3.weight", i, h, "gate_up_proj", i, 2 * i);
    add("down_proj.weight", qwen ? "down_proj.weight" : "w2.weight", h, i, "down_proj", 0, h);
  }
  if (e.shared_intermediate == 0) return;
  const std::string shared = moe + (kimi ? "shared_experts." : "shared_expert.");
  AppendGatedMlp(needs, "shared_expert.", shared + "gate_proj.weight", shared + "up_proj.weight",
                 shared + "down_proj.weight", e.shared_intermediate);
  if (e.shared_gate) needs.Add("shared_gate.weight", moe + "shared_expert_gate.weight", 1, h);
}

}  // namespace

void AppendExperts(HybridNeeds& needs) {
  switch (needs.config.architecture) {
    case Architecture::kGraniteHybrid: return AppendGranite(needs);
    case Architecture::kGptOss: return AppendGptOss(needs);
    case Architecture::kNemotronH: return AppendNemotron(needs);
    default: return AppendListed(needs);
  }
}

}  // namespace dovetail::model
