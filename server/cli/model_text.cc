#include "server/cli/model_text.h"

#include <ctime>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "model/gguf.h"
#include "model/tokenizer/tokenizer_gguf.h"
#include "model/tokenizer/tokenizer_json.h"
#include "nlohmann/json.hpp"
#include "server/openai/chat_renderer.h"

namespace dovetail::cli {
namespace fs = std::filesystem;
namespace {

constexpr size_t kMaxTextFileBytes = model::kMaxTokenizerJsonBytes;

// nullopt when there is no such file.
absl::StatusOr<std::optional<std::string>> ReadTextFile(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return std::nullopt;
  const auto size = fs::file_size(path, error);
  if (error || size > kMaxTextFileBytes)
    return InvalidArgument(path.filename().string(), ": is larger than ", kMaxTextFileBytes, " bytes or cannot be read");
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in.good() && !in.eof()) return InvalidArgument(path.filename().string(), ": cannot be read");
  return std::move(text).str();
}

absl::StatusOr<model::TokenizerData> DataFromGguf(const model::GgufFile& gguf) {
  model::GgufTokenizerFields fields;
  const std::string prefix = "tokenizer.ggml.";
  DT_ASSIGN_OR_RETURN(const auto kind, gguf.String(prefix + "model"));
  fields.model = kind.value_or(std::string_view());
  DT_ASSIGN_OR_RETURN(fields.pre, gguf.String(prefix + "pre"));
  const auto take = [&](auto loaded, auto& field) {
    if (!loaded.ok()) return loaded.status();
    if (loaded->has_value()) field = **std::move(loaded);
    return absl::OkStatus();
  };
  DT_RETURN_IF_ERROR(take(gguf.Strings(prefix + "tokens"), fields.tokens));
  DT_RETURN_IF_ERROR(take(gguf.Floats(prefix + "scores"), fields.scores));
  DT_RETURN_IF_ERROR(take(gguf.Ints(prefix + "token_type"), fields.token_type));
  DT_RETURN_IF_ERROR(take(gguf.Strings(prefix + "merges"), fields.merges));
  DT_ASSIGN_OR_RETURN(fields.bos_token_id, gguf.Int(prefix + "bos_token_id"));
  DT_ASSIGN_OR_RETURN(fields.eos_token_id, gguf.Int(prefix + "eos_token_id"));
  DT_ASSIGN_OR_RETURN(fields.unknown_token_id, gguf.Int(prefix + "unknown_token_id"));
  DT_ASSIGN_OR_RETURN(fields.padding_token_id, gguf.Int(prefix + "padding_token_id"));
  DT_ASSIGN_OR_RETURN(fields.eot_token_id, gguf.Int(prefix + "eot_token_id"));
  DT_ASSIGN_OR_RETURN(fields.eom_token_id, gguf.Int(prefix + "eom_token_id"));
  DT_ASSIGN_OR_RETURN(fields.add_bos_token, gguf.Bool(prefix + "add_bos_token"));
  DT_ASSIGN_OR_RETURN(fields.add_eos_token, gguf.Bool(prefix + "add_eos_token"));
  DT_ASSIGN_OR_RETURN(fields.add_space_prefix, gguf.Bool(prefix + "add_space_prefix"));
  return model::TokenizerDataFromGguf(fields);
}

std::string TextOf(const model::Tokenizer* tokenizer, std::optional<TokenId> id) {
  return tokenizer != nullptr && id.has_value() ? std::string(tokenizer->TokenText(*id)) : std::string();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizer(const model::Checkpoint& checkpoint) {
  if (checkpoint.gguf() != nullptr) {
    if (checkpoint.gguf()->Find("tokenizer.ggml.model") == nullptr) return nullptr;
    auto data = DataFromGguf(*checkpoint.gguf());
    if (!data.ok()) return Annotate(data.status(), checkpoint.name());
    DT_ASSIGN_OR_RETURN(auto tokenizer, model::Tokenizer::Create(*std::move(data)));
    return std::shared_ptr<const model::Tokenizer>(std::move(tokenizer));
  }
  DT_ASSIGN_OR_RETURN(const auto json, ReadTextFile(checkpoint.folder() / "tokenizer.json"));
  if (!json.has_value()) return nullptr;
  DT_ASSIGN_OR_RETURN(const auto config, ReadTextFile(checkpoint.folder() / "tokenizer_config.json"));
  std::optional<std::string_view> config_view;
  if (config.has_value()) config_view = *config;
  DT_ASSIGN_OR_RETURN(auto data, model::TokenizerDataFromJson(*json, config_view));
  DT_ASSIGN_OR_RETURN(auto tokenizer, model::Tokenizer::Create(std::move(data)));
  return std::shared_ptr<const model::Tokenizer>(std::move(tokenizer));
}

absl::StatusOr<std::string> LoadChatTemplate(const model::Checkpoint& checkpoint, const std::string& override_path) {
  if (!override_path.empty()) {
    DT_ASSIGN_OR_RETURN(const auto text, ReadTextFile(override_path));
    if (!text.has_value()) return NotFound("--chat-template: there is no file ", fs::path(override_path).filename().string());
    return *text;
  }
  if (checkpoint.gguf() != nullptr) {
    DT_ASSIGN_OR_RETURN(const auto text, checkpoint.gguf()->String("tokenizer.chat_template"));
    return std::string(text.value_or(std::string_view()));
  }
  DT_ASSIGN_OR_RETURN(const auto jinja, ReadTextFile(checkpoint.folder() / "chat_template.jinja"));
  if (jinja.has_value()) return *jinja;
  DT_ASSIGN_OR_RETURN(const auto config, ReadTextFile(checkpoint.folder() / "tokenizer_config.json"));
  if (!config.has_value()) return std::string();
  const auto json = nlohmann::json::parse(*config, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("chat_template")) return std::string();
  const auto& found = json["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  if (found.is_array())
    for (const auto& entry : found)
      if (entry.is_object() && entry.value("name", "") == "default") return entry.value("template", std::string());
  return std::string();
}

absl::StatusOr<std::shared_ptr<const server::ServedModel>> MakeServedModel(const model::Checkpoint& checkpoint, const std::string& name,
                                                                           const std::string& chat_template_path,
                                                                           int64_t max_model_len) {
  const model::ModelConfig& config = checkpoint.config();
  auto served = std::make_shared<server::ServedModel>();
  served->names.push_back(name.empty() ? fs::path(checkpoint.name()).stem().string() : name);
  DT_ASSIGN_OR_RETURN(served->tokenizer, LoadTokenizer(checkpoint));
  DT_ASSIGN_OR_RETURN(const std::string chat_template, LoadChatTemplate(checkpoint, chat_template_path));
  if (!chat_template.empty()) {
    const model::Tokenizer* tokenizer = served->tokenizer.get();
    std::optional<TokenId> eos;
    if (!config.stop_ids.empty()) eos = config.stop_ids.front();
    auto renderer = server::MakeChatRenderer(chat_template, TextOf(tokenizer, config.bos), TextOf(tokenizer, eos));
    if (!renderer.ok()) return Annotate(renderer.status(), "chat template");
    served->chat = *std::move(renderer);
  }
  served->max_model_len = static_cast<int>(max_model_len);
  served->vocab_size = static_cast<int>(config.vocab_size);
  served->end_token_ids = config.stop_ids;
  const model::SamplingDefaults& defaults = config.sampling;
  if (defaults.temperature) served->defaults.temperature = static_cast<float>(*defaults.temperature);
  if (defaults.top_p) served->defaults.top_p = static_cast<float>(*defaults.top_p);
  if (defaults.min_p) served->defaults.min_p = static_cast<float>(*defaults.min_p);
  if (defaults.repetition_penalty) served->defaults.repetition_penalty = static_cast<float>(*defaults.repetition_penalty);
  if (defaults.top_k) served->defaults.top_k = static_cast<int>(*defaults.top_k);
  served->created = std::time(nullptr);
  return std::shared_ptr<const server::ServedModel>(std::move(served));
}

}  // namespace dovetail::cli
