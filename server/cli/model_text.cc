#include "server/cli/model_text.h"

#include <ctime>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "model/chat_template/builtin_templates.h"
#include "model/chat_template/template_source.h"
#include "model/formats/gguf.h"
#include "model/pooling.h"
#include "model/tokenizer/tokenizer_gguf.h"
#include "model/tokenizer/tokenizer_json.h"
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
    return InvalidArgument(path.filename().string(), ": is larger than ", kMaxTextFileBytes,
                           " bytes or cannot be read");
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

absl::StatusOr<std::shared_ptr<const model::Tokenizer>> Build(model::TokenizerData data, const std::string& file) {
  auto tokenizer = model::Tokenizer::Create(data);
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), absl::StrCat(file, ": tokenizer"));
  return std::shared_ptr<const model::Tokenizer>(*std::move(tokenizer));
}

// Null where the folder has no tokenizer.json.
absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadFolderTokenizer(const fs::path& folder,
                                                                            const std::string& name) {
  DT_ASSIGN_OR_RETURN(const auto json, ReadTextFile(folder / "tokenizer.json"));
  if (!json.has_value()) return nullptr;
  DT_ASSIGN_OR_RETURN(const auto config, ReadTextFile(folder / "tokenizer_config.json"));
  std::optional<std::string_view> config_view;
  if (config.has_value()) config_view = *config;
  auto data = model::TokenizerDataFromJson(*json, config_view);
  if (!data.ok()) return Annotate(data.status(), name);
  return Build(*std::move(data), name);
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
    return Build(*std::move(data), checkpoint.name());
  }
  return LoadFolderTokenizer(checkpoint.folder(), checkpoint.name());
}

absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizerAt(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    DT_ASSIGN_OR_RETURN(auto tokenizer, LoadFolderTokenizer(path, path));
    if (tokenizer == nullptr) return NotFound(path, ": holds no tokenizer.json");
    return tokenizer;
  }
  if (!fs::is_regular_file(path, error))
    return NotFound(path, ": there is no such file or folder; give a .gguf file, or a folder with tokenizer.json");
  DT_ASSIGN_OR_RETURN(const auto gguf, model::GgufFile::Open(path));
  if (gguf->Find("tokenizer.ggml.model") == nullptr) return NotFound(path, ": holds no tokenizer");
  auto data = DataFromGguf(*gguf);
  if (!data.ok()) return Annotate(data.status(), path);
  return Build(*std::move(data), path);
}

namespace {

std::vector<std::string> TextsOf(const model::Tokenizer& tokenizer) {
  std::vector<std::string> texts(tokenizer.vocab_size());
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id)
    if (!tokenizer.IsSpecial(id)) texts[id] = tokenizer.TokenText(id);
  return texts;
}

}  // namespace

std::shared_ptr<grammar::GrammarEngine> MakeGrammars(const model::Checkpoint& checkpoint) {
  const auto read = [&checkpoint]() -> absl::StatusOr<std::vector<std::string>> {
    DT_ASSIGN_OR_RETURN(const auto tokenizer, LoadTokenizer(checkpoint));
    if (tokenizer == nullptr) return InvalidArgument(checkpoint.name(), ": holds no tokenizer");
    return TextsOf(*tokenizer);
  };
  return std::make_shared<grammar::GrammarEngine>(read, static_cast<int>(checkpoint.config().vocab_size));
}

namespace {

// The templates that a checkpoint brings, and where from.
absl::StatusOr<model::TemplateSources> OwnTemplates(const model::Checkpoint& checkpoint, std::string& origin) {
  model::TemplateSources sources;
  if (checkpoint.gguf() != nullptr) {
    origin = absl::StrCat(checkpoint.name(), ": tokenizer.chat_template");
    DT_ASSIGN_OR_RETURN(const auto text, checkpoint.gguf()->String("tokenizer.chat_template"));
    if (text) sources.Set("default", std::string(*text));
    return sources;
  }
  const auto in_folder = [&](const char* file) { return absl::StrCat(checkpoint.name(), "/", file); };
  for (const char* file : {"tokenizer_config.json", "chat_template.json"}) {
    DT_ASSIGN_OR_RETURN(const auto json, ReadTextFile(checkpoint.folder() / file));
    if (!json) continue;
    auto read = model::ReadTokenizerConfigTemplates(*json);
    if (!read.ok()) return Annotate(read.status(), in_folder(file));
    if (read->bos_token) sources.bos_token = read->bos_token;
    if (read->eos_token) sources.eos_token = read->eos_token;
    if (read->empty()) continue;
    origin = in_folder(file);
    sources.templates = std::move(read->templates);
  }
  DT_ASSIGN_OR_RETURN(const auto jinja, ReadTextFile(checkpoint.folder() / "chat_template.jinja"));
  if (!jinja) return sources;
  origin = in_folder("chat_template.jinja");
  sources.templates.clear();
  sources.Set("default", *jinja);
  return sources;
}

// A file takes precedence over a built-in template of the same name, since the user made it on purpose.
absl::StatusOr<std::string> AskedTemplate(const std::string& asked) {
  DT_ASSIGN_OR_RETURN(const auto text, ReadTextFile(asked));
  if (text) return *text;
  auto builtin = model::BuiltinTemplate(asked);
  if (builtin.ok()) return builtin;
  return NotFound("--chat-template: there is no file and no built-in template '", asked, "'; built in are ",
                  absl::StrJoin(model::BuiltinTemplateNames(), ", "));
}

}  // namespace

absl::StatusOr<ChatTemplateChoice> ChooseChatTemplate(const model::Checkpoint& checkpoint,
                                                      const model::Tokenizer* tokenizer, const std::string& asked,
                                                      bool chatml_at_last) {
  ChatTemplateChoice choice;
  DT_ASSIGN_OR_RETURN(const model::TemplateSources own, OwnTemplates(checkpoint, choice.origin));
  const model::ModelConfig& config = checkpoint.config();
  std::optional<TokenId> eos;
  if (!config.stop_ids.empty()) eos = config.stop_ids.front();
  choice.bos_token = own.bos_token.value_or(TextOf(tokenizer, config.bos));
  choice.eos_token = own.eos_token.value_or(TextOf(tokenizer, eos));
  if (asked == "none") return choice;
  if (!asked.empty()) {
    choice.origin = absl::StrCat("--chat-template ", fs::path(asked).filename().string());
    DT_ASSIGN_OR_RETURN(choice.source, AskedTemplate(asked));
    return choice;
  }
  if (!own.empty()) {
    auto selected = model::SelectTemplate(own, /*has_tools=*/false);
    if (!selected.ok()) return Annotate(selected.status(), choice.origin);
    choice.source = *std::move(selected);
    DT_ASSIGN_OR_RETURN(choice.tool_source, model::SelectTemplate(own, /*has_tools=*/true));
    return choice;
  }
  if (tokenizer == nullptr) return choice;
  const auto has_token = [&](std::string_view text) {
    const auto id = tokenizer->TokenToId(text);
    return id && tokenizer->TypeOf(*id) != model::TokenType::kNormal;
  };
  const auto name = model::BuiltinTemplateFor(has_token);
  // As llama-server does with GGUF files. A folder's users expect what vLLM does: an error.
  const bool in_any_case = !name && chatml_at_last && checkpoint.gguf() != nullptr;
  if (!name && !in_any_case) return choice;
  const std::string used = name.value_or("chatml");
  choice.origin = absl::StrCat("the built-in chat template ", used);
  DT_ASSIGN_OR_RETURN(choice.source, model::BuiltinTemplate(used));
  if (in_any_case)
    choice.warning = absl::StrCat(checkpoint.name(),
                                  ": brings no chat template; chats are written as ChatML, whose tokens its vocabulary "
                                  "does not have: answers may make little sense; --chat-template chooses another one");
  else
    LogInfo(checkpoint.name(), ": brings no chat template; its vocabulary has the tokens of ", used,
            ", so that built-in one is used");
  return choice;
}

namespace {

// How the answers of this model are taken apart: by name, or by its chat template.
absl::Status ChooseParsers(const server::ChatTemplateText& chat, const ServedModelOptions& options,
                           server::ServedModel& served) {
  served.calls = server::CallsUnder(chat);
  served.thoughts = server::ThoughtsUnder(chat);
  const std::string& calls = options.tool_call_parser;
  if (!calls.empty()) served.calls = calls == "none" ? nullptr : server::FindCallFormat(calls);
  if (!calls.empty() && calls != "none" && served.calls == nullptr)
    return InvalidArgument("--tool-call-parser: there is no '", calls, "'; use none or one of ",
                           absl::StrJoin(server::CallFormatNames(), ", "));
  const std::string& thoughts = options.reasoning_parser;
  if (!thoughts.empty()) served.thoughts = thoughts == "none" ? nullptr : server::FindThoughtFormat(thoughts);
  if (!thoughts.empty() && thoughts != "none" && served.thoughts == nullptr)
    return InvalidArgument("--reasoning-parser: there is no '", thoughts, "'; use none or one of ",
                           absl::StrJoin(server::ThoughtFormatNames(), ", "));
  return absl::OkStatus();
}

absl::Status ChoosePooling(const model::Checkpoint& checkpoint, const std::string& asked, server::ServedModel& served) {
  using requests::Pooling;
  served.hidden_size = checkpoint.config().hidden_size;
  std::string name = asked;
  if (name.empty()) {
    DT_ASSIGN_OR_RETURN(name, model::PoolingOf(checkpoint));
  }
  const std::pair<const char*, Pooling> known[] = {
      {"", Pooling::kLast}, {"mean", Pooling::kMean}, {"last", Pooling::kLast}, {"cls", Pooling::kCls}};
  served.pooling = Pooling::kNone;
  for (const auto& [kind, pooling] : known)
    if (name == kind) served.pooling = pooling;
  if (served.pooling == Pooling::kNone)
    served.why_no_pooling = absl::StrCat("this model's files ask for pooling by ", name,
                                         ", which is not served; start the server with --pooling mean, last or cls");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const server::ServedModel>> MakeServedModel(const model::Checkpoint& checkpoint,
                                                                           const ServedModelOptions& options) {
  const model::ModelConfig& config = checkpoint.config();
  auto served = std::make_shared<server::ServedModel>();
  served->names = options.names;
  if (served->names.empty()) served->names.push_back(fs::path(checkpoint.name()).stem().string());
  served->accept_any_name = options.accept_any_name;
  DT_ASSIGN_OR_RETURN(served->tokenizer, LoadTokenizer(checkpoint));
  DT_ASSIGN_OR_RETURN(const ChatTemplateChoice chat, ChooseChatTemplate(checkpoint, served->tokenizer.get(),
                                                                        options.chat_template, options.chatml_at_last));
  if (!chat.source.empty()) {
    const server::ChatTemplateText text{chat.source, chat.tool_source, chat.bos_token, chat.eos_token};
    auto renderer = server::MakeChatRenderer(text);
    if (!renderer.ok())
      return InvalidArgument(chat.origin, ": ", std::string(renderer.status().message()),
                             "; choose another one with --chat-template");
    served->chat = *std::move(renderer);
    DT_RETURN_IF_ERROR(ChooseParsers(text, options, *served));
  }
  DT_RETURN_IF_ERROR(ChoosePooling(checkpoint, options.pooling, *served));
  served->chat_template = chat.source;
  served->chat_template_warning = chat.warning;
  served->max_num_seqs = options.max_num_seqs;
  served->max_model_len = static_cast<int>(options.max_model_len);
  served->vocab_size = static_cast<int>(config.vocab_size);
  served->end_token_ids = config.stop_ids;
  served->grammars = options.grammars;
  if (served->grammars == nullptr && served->tokenizer != nullptr)
    served->grammars = std::make_shared<grammar::GrammarEngine>(
        [tokenizer = served->tokenizer]() -> absl::StatusOr<std::vector<std::string>> { return TextsOf(*tokenizer); },
        served->vocab_size);
  const model::SamplingDefaults& defaults = config.sampling;
  if (defaults.temperature) served->defaults.temperature = static_cast<float>(*defaults.temperature);
  if (defaults.top_p) served->defaults.top_p = static_cast<float>(*defaults.top_p);
  if (defaults.min_p) served->defaults.min_p = static_cast<float>(*defaults.min_p);
  if (defaults.repetition_penalty)
    served->defaults.repetition_penalty = static_cast<float>(*defaults.repetition_penalty);
  if (defaults.top_k) served->defaults.top_k = static_cast<int>(*defaults.top_k);
  served->created = std::time(nullptr);
  served->fingerprint = absl::StrCat("fp_", absl::Hex(options.model_digest, absl::kZeroPad16));
  return std::shared_ptr<const server::ServedModel>(std::move(served));
}

}  // namespace dovetail::cli
