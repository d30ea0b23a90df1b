#include "model/describe.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "model/formats/file_errors.h"
#include "model/formats/gguf.h"
#include "model/formats/json_file.h"

namespace dovetail::model {
namespace {

namespace fs = std::filesystem;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

std::string Line(const char* label, const std::string& text) { return absl::StrFormat("  %-14s %s\n", label, text); }

std::string Binary(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return absl::StrFormat("%.2f GiB", value / (1 << 30));
  if (bytes >= int64_t{1} << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (bytes >= int64_t{1} << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::string Count(int64_t count) {
  const auto value = static_cast<double>(count);
  if (count >= 1'000'000'000) return absl::StrFormat("%.2f billion", value / 1e9);
  if (count >= 1'000'000) return absl::StrFormat("%.1f million", value / 1e6);
  return Commas(static_cast<uint64_t>(count));
}

std::string StateText(const StateConfig& state) {
  const char* family = state.family == StateConfig::Family::kLightning    ? "lightning"
                       : state.family == StateConfig::Family::kGatedDelta ? "gated delta rule"
                       : state.family == StateConfig::Family::kKda        ? "delta rule, decays by channel"
                                                                          : "Mamba-2";
  if (state.family == StateConfig::Family::kConvolution)
    return absl::StrCat(" (short convolution, ", state.value_width(), " channels, ", state.conv_width, " taps)");
  return absl::StrCat(" (", family, ", ", state.heads, " heads of ", state.key_dim, " x ", state.value_dim, ")");
}

std::string LayersText(const ModelConfig& config) {
  std::map<std::string, int> kinds;
  for (const LayerConfig& layer : config.layers) {
    std::string kind = "full attention";
    if (layer.kind == LayerKind::kLinearState) kind = "linear state" + StateText(*config.state);
    if (layer.kind == LayerKind::kSlidingAttention) kind = absl::StrCat("attention over the last ", layer.window);
    if (layer.kind == LayerKind::kMlpOnly) kind = "MLP only";
    if (layer.rope < 0 && HasAttention(layer.kind)) kind += " without rope";
    if (layer.kind == LayerKind::kAttentionAndState) kind += " with a linear state" + StateText(*config.state);
    if (layer.mlp == MlpKind::kExperts)
      absl::StrAppend(&kind, ", ", config.experts->chosen, " of ", config.experts->experts, " experts");
    if (layer.mlp == MlpKind::kExperts && config.experts->groups > 1)
      absl::StrAppend(&kind, " from ", config.experts->chosen_groups, " of ", config.experts->groups, " groups");
    ++kinds[kind];
  }
  const auto format = [](std::string* out, const std::pair<const std::string, int>& kind) {
    absl::StrAppend(out, kind.second, " ", kind.first);
  };
  return absl::StrCat(config.layers.size(), ": ", absl::StrJoin(kinds, ", ", format));
}

const char* ActivationText(Activation activation) {
  switch (activation) {
    case Activation::kSilu: return " (silu)";
    case Activation::kGeluTanh: return " (gelu)";
    case Activation::kClampedSwiglu: return " (clamped swiglu)";
    case Activation::kRelu2: return " (squared relu, no gate)";
  }
  return "";
}

std::string HeadsText(const ModelConfig& config) {
  std::string text =
      absl::StrCat(config.heads, " query, ", config.kv_heads, " key/value, of ", config.key_dim, " dimensions");
  if (config.value_dim != config.key_dim) absl::StrAppend(&text, " (values ", config.value_dim, ")");
  if (config.qk_norm) text += ", normalised";
  return text;
}

std::string RopeText(const RopeSpec& rope, const ModelConfig& config) {
  std::string text = absl::StrFormat("%s, base %g", View(Name(rope.kind)), rope.theta);
  if (rope.rotary_dims != config.key_dim)
    absl::StrAppend(&text, ", ", rope.rotary_dims, " of ", config.key_dim, " dimensions");
  if (rope.kind != RopeKind::kDefault) absl::StrAppend(&text, absl::StrFormat(", factor %g", rope.factor));
  if (!rope.divisors.empty()) text += ", with the file's divisors";
  if (rope.original_max_positions > 0) absl::StrAppend(&text, ", made for ", rope.original_max_positions, " positions");
  return text;
}

std::string VocabularyText(const ModelConfig& config) {
  std::string text = absl::StrCat(Commas(static_cast<uint64_t>(config.vocab_size)), " tokens");
  if (config.bos) absl::StrAppend(&text, ", begins with ", *config.bos);
  if (!config.stop_ids.empty()) absl::StrAppend(&text, ", ends at ", absl::StrJoin(config.stop_ids, ", "));
  return text;
}

std::string GgufTokenizer(const GgufFile& gguf) {
  const auto kind = gguf.String("tokenizer.ggml.model"), pre = gguf.String("tokenizer.ggml.pre");
  if (!kind.ok() || !*kind) return "absent";
  std::string text = Printable(**kind);
  if (pre.ok() && *pre) absl::StrAppend(&text, " (", Printable(**pre), ")");
  return text;
}

bool Exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string FolderTokenizer(const fs::path& folder) {
  if (!Exists(folder / "tokenizer.json")) return "absent";
  const auto json = ReadJsonFile(folder / "tokenizer.json");
  const auto model = json.ok() && json->is_object() && json->contains("model")
                         ? JsonFields("", (*json)["model"]).String("type")
                         : absl::StatusOr<std::optional<std::string>>(std::nullopt);
  return model.ok() && *model ? absl::StrCat("tokenizer.json (", Printable(**model), ")")
                              : std::string("tokenizer.json");
}

bool HasChatTemplate(const Checkpoint& checkpoint) {
  if (checkpoint.gguf() != nullptr) return checkpoint.gguf()->Find("tokenizer.chat_template") != nullptr;
  if (Exists(checkpoint.folder() / "chat_template.jinja")) return true;
  const auto json = ReadJsonFile(checkpoint.folder() / "tokenizer_config.json");
  return json.ok() && JsonFields("", *json).Has("chat_template");
}

std::string TensorsText(const Checkpoint& checkpoint) {
  struct Sum {
    int64_t tensors = 0, bytes = 0;
  };
  std::map<std::string, Sum> types;
  for (const StoredTensor& tensor : checkpoint.stored_tensors()) {
    Sum& sum = types[std::string(tensor.type)];
    ++sum.tensors;
    sum.bytes += tensor.bytes;
  }
  const auto format = [](std::string* out, const std::pair<const std::string, Sum>& type) {
    absl::StrAppend(out, type.second.tensors, " ", type.first, " (", Binary(type.second.bytes), ")");
  };
  return absl::StrJoin(types, ", ", format);
}

int64_t WeightBytes(const Checkpoint& checkpoint) {
  int64_t bytes = 0;
  for (const StoredTensor& tensor : checkpoint.stored_tensors()) bytes += tensor.bytes;
  return bytes;
}

std::string Holds(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  const bool gguf = checkpoint.gguf() != nullptr;
  std::string text = absl::StrCat(
      checkpoint.name(),
      gguf ? absl::StrCat(": GGUF version ", checkpoint.gguf()->version()) : std::string(": Hugging Face folder"),
      "\n");
  text +=
      Line("architecture", absl::StrCat(View(Name(config.architecture)),
                                        config.name.empty() ? "" : absl::StrCat(", \"", Printable(config.name), "\"")));
  text += Line("parameters", absl::StrCat(Count(Parameters(checkpoint)),
                                          config.tie_embeddings ? ", output shared with the embedding" : ""));
  text += Line("layers", LayersText(config));
  text += Line("heads", HeadsText(config));
  text += Line("sizes", absl::StrCat("hidden ", config.hidden_size, ", MLP ", config.intermediate_size,
                                     ActivationText(config.activation)));
  text += Line("context", absl::StrCat(Commas(static_cast<uint64_t>(config.max_positions)), " positions"));
  for (const RopeSpec& rope : config.ropes) text += Line("rope", RopeText(rope, config));
  text += Line("vocabulary", VocabularyText(config));
  text += Line("tokenizer", gguf ? GgufTokenizer(*checkpoint.gguf()) : FolderTokenizer(checkpoint.folder()));
  text += Line("chat template", HasChatTemplate(checkpoint) ? "yes" : "no");
  text += Line("tensors", TensorsText(checkpoint));
  return text;
}

}  // namespace

int64_t KvBytes(const ModelConfig& config, int64_t tokens, DType kv) {
  const int64_t per_token = config.kv_heads * (config.key_dim + config.value_dim) * static_cast<int64_t>(SizeOf(kv));
  int64_t bytes = 0;
  for (const LayerConfig& layer : config.layers)
    if (HasAttention(layer.kind)) bytes += per_token * (layer.window > 0 ? std::min(tokens, layer.window) : tokens);
  return bytes;
}

int64_t StateBytes(const ModelConfig& config) {
  if (!config.state) return 0;
  const int64_t layers = std::count_if(config.layers.begin(), config.layers.end(),
                                       [](const LayerConfig& layer) { return HasState(layer.kind); });
  const StateConfig& s = *config.state;
  const bool convolution = s.family == StateConfig::Family::kConvolution;  // what it remembers is all
  return layers * s.heads * s.value_dim * (convolution ? s.conv_width - 1 : s.key_dim) * int64_t{4};
}

int64_t Parameters(const Checkpoint& checkpoint) {
  int64_t count = 0;
  for (const std::string& name : checkpoint.names()) {
    if (name == "lm_head.weight" && checkpoint.config().tie_embeddings) continue;
    const auto source = checkpoint.Find(name);
    if (source.ok()) count += source->rows * source->cols;
  }
  return count;
}

std::string Describe(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  std::string text = Holds(checkpoint) + "needs\n";
  text += Line("weights", Binary(WeightBytes(checkpoint)));
  text += Line("KV cache", absl::StrCat(Binary(KvBytes(config, 1, DType::kBF16)), " per token in bfloat16; ",
                                        Binary(KvBytes(config, 1024, DType::kBF16)), " for 1k tokens, ",
                                        Binary(KvBytes(config, 8192, DType::kBF16)), " for 8k"));
  if (config.state)
    text += Line("states", absl::StrCat(Binary(StateBytes(config)),
                                        " per sequence in float32 (--state-dtype bfloat16: half), however long"));
  for (const std::string& warning : checkpoint.warnings()) absl::StrAppend(&text, "warning: ", warning, "\n");
  return text;
}

}  // namespace dovetail::model
