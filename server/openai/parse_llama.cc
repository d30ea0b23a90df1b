#include <algorithm>
#include <array>

#include "model/tokenizer/tokenizer.h"
#include "server/openai/llama_server.h"
#include "server/openai/parse_generation.h"
#include "server/openai/shared_fields.h"

namespace dovetail::server {
namespace {

constexpr std::string_view kOwn[] = {"prompt",  "logit_bias", "n_probs",      "return_tokens", "timings_per_token",
                                     "id_slot", "n_keep",     "input_prefix", "input_suffix",  "input_extra"};

constexpr std::string_view kOneAnswer = "one answer a request here; use /v1/completions";
constexpr RefusedField kRefused[] = {
    {"n", "1", kOneAnswer},
    {"n_cmpl", "1", kOneAnswer},
    {"best_of", "1", kOneAnswer},
    {"echo", "false", "use /v1/completions"},
    {"logprobs", "0", "use n_probs"},
    {"t_max_predict_ms", "0", "not supported; use n_predict"},
    {"n_indent", "0", "not supported; leave it out"},
    {"min_keep", "0", "not supported; leave it out"},
    {"post_sampling_probs", "false", "probabilities are of the model's distribution before sampling; leave it out"},
    {"response_fields", "[]", "answers have all fields; leave it out"},
};

// [[id, bias], ...] with false for never, or an object as everywhere else.
absl::StatusOr<Json> ReadLogitBias(const Json& value) {
  if (!value.is_array()) return value;
  Json biases = Json::object();
  for (const Json& pair : value) {
    const std::string path = absl::StrCat("logit_bias.", biases.size());
    if (!pair.is_array() || pair.size() != 2) return BadField(path, "must be a pair of a token id and a bias");
    if (!pair[0].is_number_integer()) return BadField(path, "must begin with a token id, not ", Describe(pair[0]));
    const bool never = pair[1].is_boolean() && !pair[1].get<bool>();
    biases[Dump(pair[0])] = never ? Json(-100) : pair[1];
  }
  return biases;
}

// Text and token ids in one array are one prompt here.
absl::StatusOr<Json> ReadPrompt(const Json& value, const ServedModel& model) {
  if (!value.is_array()) return value;
  Json ids = Json::array();
  const auto is_prompt = [](const Json& part) { return part.is_string() || part.is_array(); };
  if (!value.empty() && std::all_of(value.begin(), value.end(), is_prompt))
    return BadField("prompt", "several prompts in one request are not taken here; use /v1/completions");
  for (const Json& part : value) {
    if (!part.is_string()) {
      ids.push_back(part);
      continue;
    }
    if (model.tokenizer == nullptr) return BadField("prompt", "this model has no tokenizer; send token ids");
    const bool first = ids.empty();
    const auto encoded =
        model.tokenizer->Encode(part.get_ref<const std::string&>(), {.add_special = first, .parse_special = true});
    if (!encoded.ok()) return BadField("prompt", std::string(encoded.status().message()));
    for (const TokenId id : *encoded) ids.push_back(id);
  }
  return ids;
}

// All but the prompt.
absl::StatusOr<Json> ToCompletion(const Json& body) {
  const FieldReader reader(body);
  DT_ASSIGN_OR_RETURN(Json completion, SharedFields(body, kOwn, kRefused));
  if (!reader.Has("n_predict") && !reader.Has("max_tokens")) completion["n_predict"] = -1;
  if (const Json* n_probs = reader.Find("n_probs")) {
    DT_ASSIGN_OR_RETURN(const int64_t count, ToInt(*n_probs, "n_probs", {"n_probs", 0, kMaxLogprobs}));
    if (count > 0) completion["logprobs"] = count;
  }
  if (const Json* biases = reader.Find("logit_bias")) {
    DT_ASSIGN_OR_RETURN(completion["logit_bias"], ReadLogitBias(*biases));
  }
  // Slots are not told apart, and nothing is dropped from a prompt: both change no token.
  for (const char* name : {"id_slot", "n_keep"})
    if (const Json* value = reader.Find(name)) DT_RETURN_IF_ERROR(ToInt(*value, name, {name, -1, kInt32Max}).status());
  return completion;
}

absl::StatusOr<CompletionRequest> Parse(const Json& body, Json prompt, const ServedModel& model) {
  const FieldReader reader(body);
  DT_ASSIGN_OR_RETURN(Json completion, ToCompletion(body));
  completion["prompt"] = std::move(prompt);
  DT_ASSIGN_OR_RETURN(CompletionRequest request, ParseCompletionRequest(completion, model));
  request.shape = AnswerShape::kLlama;
  request.repeated = Json::object();
  for (const char* name : {"return_tokens", "timings_per_token"}) {
    DT_ASSIGN_OR_RETURN(request.repeated[name], reader.Bool(name, false));
  }
  return request;
}

// ---- filling in ----

// What stands before, behind and between; a project and a file in it; and what ends an answer besides the model's own
// end. As models spell them: Qwen and those that follow it, StarCoder and Granite, both older, DeepSeek (with bars of
// full width), CodeLlama, GLM.
struct FillInTokens {
  std::string_view prefix, suffix, middle, repo, file, end;
};
constexpr FillInTokens kFillInTokens[] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"},
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<|endoftext|>"},
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<repo-name>", "<file-sep>", "<|endoftext|>"},
    {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", "", "<｜end▁of▁sentence｜>"},
    {"<PRE>", "<SUF>", "<MID>", "", "", "<EOT>"},
    {"▁<PRE>", "▁<SUF>", "▁<MID>", "", "", "▁<EOT>"},
    {"<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "", "", "<|endoftext|>"},
};

const FillInTokens* FillInOf(const ServedModel& model) {
  if (model.tokenizer == nullptr) return nullptr;
  for (const FillInTokens& one : kFillInTokens) {
    const std::array<std::string_view, 3> all = {one.prefix, one.suffix, one.middle};
    if (std::all_of(all.begin(), all.end(), [&](std::string_view token) { return model.tokenizer->TokenToId(token); }))
      return &one;
  }
  return nullptr;
}

absl::StatusOr<std::string> TextOf(const FieldReader& reader, const std::string& name) {
  const Json* value = reader.Find(name);
  if (value == nullptr) return "";
  if (!value->is_string()) return BadField(reader.Path(name), "must be a string, not ", Describe(*value));
  return value->get<std::string>();
}

class FillInPrompt {
 public:
  FillInPrompt(const ServedModel& model, const FillInTokens& tokens) : tokenizer_(*model.tokenizer), tokens_(tokens) {}

  void Token(std::string_view token) {
    if (const auto id = tokenizer_.TokenToId(token)) ids_.push_back(*id);
  }
  bool Has(std::string_view token) const { return !token.empty() && tokenizer_.TokenToId(token).has_value(); }
  // A model that knows projects of several files is told of one, as llama-server tells it: its name, and before the gap
  // that of the file. Neither comes with a request.
  bool KnowsProjects() const { return Has(tokens_.repo) && Has(tokens_.file); }
  absl::Status BeginProject() {
    if (!KnowsProjects()) return absl::OkStatus();
    Token(tokens_.repo);
    return Text("myproject\n", "input_extra");
  }
  absl::Status BeginFile() {
    if (!KnowsProjects()) return absl::OkStatus();
    Token(tokens_.file);
    return Text("filename\n", "input_prefix");
  }
  // Text of a user: it becomes no control token.
  absl::Status Text(const std::string& text, const std::string& field) {
    const auto ids = tokenizer_.Encode(text, {.add_special = false, .parse_special = false});
    if (!ids.ok()) return BadField(field, std::string(ids.status().message()));
    for (const TokenId id : *ids) ids_.push_back(id);
    return absl::OkStatus();
  }
  // Other files first.
  absl::Status Extra(const Json& extra) {
    if (!extra.is_array()) return BadField("input_extra", "must be an array of {filename, text}");
    for (size_t i = 0; i < extra.size(); ++i) {
      const std::string path = absl::StrCat("input_extra.", i);
      if (!extra[i].is_object()) return BadField(path, "must be an object with filename and text");
      const FieldReader reader(extra[i], path);
      DT_ASSIGN_OR_RETURN(const std::string name, TextOf(reader, "filename"));
      DT_ASSIGN_OR_RETURN(const std::string text, TextOf(reader, "text"));
      if (Has(tokens_.file))
        Token(tokens_.file);
      else
        DT_RETURN_IF_ERROR(Text("\n\n--- file ---\n", path));
      DT_RETURN_IF_ERROR(Text(absl::StrCat(name, "\n", text, "\n"), path));
    }
    return absl::OkStatus();
  }
  void Begin() {
    for (const TokenId id : tokenizer_.prefix_ids()) ids_.push_back(id);
  }
  Json ids() && { return std::move(ids_); }

 private:
  const model::Tokenizer& tokenizer_;
  const FillInTokens& tokens_;
  Json ids_ = Json::array();
};

}  // namespace

absl::StatusOr<CompletionRequest> ParseLlamaRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  const Json* given = FieldReader(body).Find("prompt");
  if (given == nullptr) return BadField("prompt", "is required: text, token ids, or an array of both");
  DT_ASSIGN_OR_RETURN(Json prompt, ReadPrompt(*given, model));
  return Parse(body, std::move(prompt), model);
}

absl::StatusOr<CompletionRequest> ParseInfillRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  const FieldReader reader(body);
  const FillInTokens* tokens = FillInOf(model);
  if (tokens == nullptr)
    return BadField("input_prefix",
                    "this model has no tokens to fill in a text (such as <|fim_prefix|>, <|fim_suffix|> and "
                    "<|fim_middle|>); use /completion with a prompt");
  if (!reader.Has("input_prefix") && !reader.Has("input_suffix"))
    return BadField("input_prefix", "input_prefix or input_suffix is required");
  FillInPrompt prompt(model, *tokens);
  prompt.Begin();
  DT_RETURN_IF_ERROR(prompt.BeginProject());
  if (const Json* extra = reader.Find("input_extra")) DT_RETURN_IF_ERROR(prompt.Extra(*extra));
  DT_RETURN_IF_ERROR(prompt.BeginFile());
  for (const auto& [token, field] :
       {std::pair{tokens->prefix, "input_prefix"}, {tokens->suffix, "input_suffix"}, {tokens->middle, "prompt"}}) {
    DT_ASSIGN_OR_RETURN(const std::string text, TextOf(reader, field));
    prompt.Token(token);
    DT_RETURN_IF_ERROR(prompt.Text(text, field));
  }
  DT_ASSIGN_OR_RETURN(CompletionRequest request, Parse(body, std::move(prompt).ids(), model));
  for (const std::string_view end : {tokens->end, tokens->file, tokens->prefix, std::string_view("<|fim_pad|>")})
    if (const auto id = end.empty() ? std::nullopt : model.tokenizer->TokenToId(end))
      request.fields.stop_token_ids.push_back(*id);
  return request;
}

}  // namespace dovetail::server
