#include "server/openai/prepare.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "model/tokenizer/tokenizer.h"
#include "server/openai/answers/marks.h"
#include "server/openai/api_error.h"
#include "server/openai/llama_server.h"
#include "server/openai/structured_output.h"

namespace dovetail::server {
namespace {

absl::StatusOr<proto::SamplingParams> MakeSampling(const GenerationFields& fields, const ServedModel& model,
                                                   const RequestContext& context) {
  const SamplingDefaults& defaults = model.defaults;
  proto::SamplingParams sampling;
  sampling.temperature = fields.temperature.value_or(defaults.temperature.value_or(1.0f));
  // top_p 0 means "the best one", which any smaller positive bound also means; a filter must leave something.
  sampling.top_p = std::max(fields.top_p.value_or(defaults.top_p.value_or(1.0f)), 1e-6f);
  sampling.min_p = fields.min_p.value_or(defaults.min_p.value_or(0.0f));
  sampling.top_k = fields.top_k.value_or(defaults.top_k.value_or(0));
  sampling.repetition_penalty = fields.repetition_penalty.value_or(defaults.repetition_penalty.value_or(1.0f));
  sampling.presence_penalty = fields.presence_penalty.value_or(0.0f);
  sampling.frequency_penalty = fields.frequency_penalty.value_or(0.0f);
  sampling.seed = fields.seed ? static_cast<uint64_t>(*fields.seed) : context.random_seed;
  sampling.logit_bias = fields.logit_bias;
  sampling.allowed_token_ids = fields.allowed_token_ids;
  sampling.logprobs = fields.best_of > fields.n ? std::max(fields.logprobs, 0) : fields.logprobs;
  for (size_t i = 0; i < fields.bad_words.size(); ++i) {
    const std::string param = absl::StrCat("bad_words.", i);
    if (model.tokenizer == nullptr) return BadField(param, "this model has no tokenizer; use logit_bias");
    const model::EncodeOptions plain{.add_special = false, .parse_special = false};
    DT_ASSIGN_OR_RETURN(const auto ids, model.tokenizer->Encode(fields.bad_words[i], plain));
    if (ids.size() != 1) return BadField(param, "is ", ids.size(), " tokens; only words of one token can be banned");
    sampling.banned_token_ids.push_back(ids[0]);
    DT_ASSIGN_OR_RETURN(const auto after_space, model.tokenizer->Encode(absl::StrCat(" ", fields.bad_words[i]), plain));
    if (after_space.size() == 1 && after_space[0] != ids[0]) sampling.banned_token_ids.push_back(after_space[0]);
  }
  return sampling;
}

constexpr char kNeedsCompiling[] = "dovetail/needs_compiling";

absl::Status Follow(const std::string& grammar, const std::string& param, const ServedModel& model,
                    const RequestContext& context, proto::SamplingParams& sampling) {
  if (context.may_compile || !CompilesGrammar(grammar, model))
    return ChooseGrammar(grammar, param, model, context.cancel, sampling);
  absl::Status status = FailedPrecondition("its grammar has to be compiled");
  status.SetPayload(kNeedsCompiling, absl::Cord());
  return status;
}

absl::Status Truncate(const GenerationFields& fields, int64_t least_output, const ServedModel& model,
                      std::vector<TokenId>& prompt) {
  if (!fields.truncate_prompt_tokens) return absl::OkStatus();
  int64_t keep = *fields.truncate_prompt_tokens;
  if (keep < 0)
    keep = std::max<int64_t>(1, model.max_model_len - std::max(fields.max_tokens.value_or(least_output), least_output));
  if (keep > model.max_model_len)
    return BadField("truncate_prompt_tokens", keep, " is more than the model's ", model.max_model_len, " positions");
  if (static_cast<int64_t>(prompt.size()) > keep) prompt.erase(prompt.begin(), prompt.end() - keep);
  return absl::OkStatus();
}

// A prompt that does not fit is counted up to so many times the model's positions, for clients that shorten it by the
// number; what is longer is told a lower bound.
constexpr int64_t kCountedTimes = 2;

// The words by which LiteLLM knows such an error: "this model's maximum context length is".
// A prompt with output leaves a position free.
absl::Status TooLong(const std::string& param, int64_t tokens, bool at_least, const ServedModel& model,
                     bool with_output = true) {
  const int64_t positions = model.max_model_len;
  return ContextExceeded(
      param, tokens, positions,
      absl::StrCat(at_least ? "at least " : "", tokens, " tokens, but this model's maximum context length is ",
                   positions, with_output ? " tokens for prompt and output" : " tokens", "; shorten it to at most ",
                   with_output ? positions - 1 : positions));
}

// Reading text that cannot fit, whatever its tokens, costs time that others need.
absl::Status RefuseByBytes(int64_t least_tokens, const std::string& param, const ServedModel& model,
                           bool with_output = true) {
  if (least_tokens + (with_output ? 1 : 0) <= model.max_model_len) return absl::OkStatus();
  return TooLong(param, least_tokens, /*at_least=*/true, model, with_output);
}

// How many tokens may follow a prompt of this length.
absl::StatusOr<int> OutputTokens(const GenerationFields& fields, const ServedModel& model, size_t prompt_tokens,
                                 bool chat) {
  const int64_t used = static_cast<int64_t>(prompt_tokens);
  const int64_t positions = model.max_model_len;
  if (used == 0) return BadField(chat ? "messages" : "prompt", "no token is left to begin with");
  if (used >= positions) return TooLong(chat ? "messages" : "prompt", used, /*at_least=*/false, model);
  const int64_t fits = positions - used;
  if (!fields.max_tokens) return static_cast<int>(fits);
  if (fields.max_tokens == 16 && fits < 16)
    return static_cast<int>(fits);  // completions' default asks for no more than there is
  if (*fields.max_tokens > fits)
    return ContextExceeded(
        "max_tokens", used, positions,
        absl::StrCat(*fields.max_tokens, " exceeds what fits: this model's maximum context length is ", positions,
                     " tokens and the prompt uses ", used, "; ask for at most ", fits));
  return static_cast<int>(std::max<int64_t>(*fields.max_tokens, 1));
}

absl::StatusOr<requests::GenerationRequest> MakeRequest(const GenerationFields& fields, const ServedModel& model,
                                                        const RequestContext& context,
                                                        const proto::SamplingParams& sampling,
                                                        std::vector<TokenId> prompt, bool chat) {
  DT_RETURN_IF_ERROR(Truncate(fields, 1, model, prompt));
  requests::GenerationRequest request;
  DT_ASSIGN_OR_RETURN(request.max_tokens, OutputTokens(fields, model, prompt.size(), chat));
  if (fields.min_tokens > request.max_tokens)
    return BadField("min_tokens", fields.min_tokens, " exceeds the ", request.max_tokens,
                    " tokens that may be generated");
  request.tenant = context.tenant;
  request.cache_salt = absl::StrCat(fields.cache_salt, context.cache_epoch);
  request.priority = fields.priority;
  request.prompt = std::move(prompt);
  request.choices = fields.best_of;
  request.sampling = sampling;
  request.min_tokens = fields.min_tokens;
  if (!fields.ignore_eos) request.stop_token_ids = model.end_token_ids;
  for (TokenId id : fields.stop_token_ids)
    if (std::find(request.stop_token_ids.begin(), request.stop_token_ids.end(), id) == request.stop_token_ids.end())
      request.stop_token_ids.push_back(id);
  request.prompt_logprobs = fields.prompt_logprobs;
  if (fields.echo) request.prompt_logprobs = std::max(fields.prompt_logprobs, fields.logprobs);
  request.use_prefix_cache = fields.use_prefix_cache;
  request.prompt_progress = fields.stream && fields.return_progress;
  return request;
}

ResponseSpec MakeSpec(const GenerationFields& fields, const ServedModel& model, const RequestContext& context,
                      Endpoint endpoint) {
  ResponseSpec spec;
  spec.endpoint = endpoint;
  spec.id = absl::StrCat(endpoint == Endpoint::kChat ? "chatcmpl-" : "cmpl-", context.id);
  spec.model = fields.model;
  spec.created = context.created;
  spec.stream = fields.stream;
  spec.include_usage = fields.include_usage;
  spec.continuous_usage = fields.continuous_usage;
  spec.n = fields.n;
  spec.best_of = fields.best_of;
  spec.echo = fields.echo;
  spec.drop_output = fields.max_tokens == 0;
  spec.min_tokens = fields.min_tokens;
  spec.stop = fields.stop;
  spec.user_stop_token_ids = fields.stop_token_ids;
  spec.include_stop = fields.include_stop_str_in_output;
  spec.skip_special_tokens = fields.skip_special_tokens;
  spec.logprobs = fields.logprobs;
  spec.prompt_logprobs = fields.prompt_logprobs;
  spec.return_token_ids = fields.return_token_ids || model.tokenizer == nullptr;
  spec.tokens_as_ids = fields.return_tokens_as_token_ids;
  return spec;
}

// A template or tokenizer refuses what cannot be a prompt (raised errors, beyond its limits, too long): that is the
// field's fault.
absl::Status AboutField(const absl::Status& status, const std::string& param, const ServedModel& model,
                        bool with_output = true) {
  if (absl::IsOutOfRange(status))
    return TooLong(param, kCountedTimes * model.max_model_len + 1, /*at_least=*/true, model, with_output);
  const bool theirs =
      status.code() == absl::StatusCode::kInvalidArgument || status.code() == absl::StatusCode::kResourceExhausted;
  return theirs ? BadField(param, std::string(status.message())) : status;
}

// What is cut to length may be longer than the model's positions.
size_t MaxTokens(const GenerationFields& fields, const ServedModel& model) {
  return fields.truncate_prompt_tokens ? SIZE_MAX : static_cast<size_t>(kCountedTimes * model.max_model_len);
}

// The prompts of a request in one field.
struct Inputs {
  const std::vector<PromptInput>& prompts;
  const std::string field;
  const bool with_output;

  std::string ParamOf(size_t prompt) const { return prompts.size() == 1 ? field : absl::StrCat(field, ".", prompt); }
};

absl::Status RefuseLongPrompts(const Inputs& inputs, const GenerationFields& fields, const ServedModel& model) {
  if (fields.truncate_prompt_tokens) return absl::OkStatus();
  for (size_t i = 0; i < inputs.prompts.size(); ++i)
    if (const auto* text = std::get_if<std::string>(&inputs.prompts[i]))
      DT_RETURN_IF_ERROR(
          RefuseByBytes(model.tokenizer->LeastTokens(*text), inputs.ParamOf(i), model, inputs.with_output));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenId>> EncodePrompt(const Inputs& inputs, size_t i, const GenerationFields& fields,
                                                  const ServedModel& model) {
  const auto* const text = std::get_if<std::string>(&inputs.prompts[i]);
  if (text == nullptr) return std::get<std::vector<TokenId>>(inputs.prompts[i]);
  auto encoded = model.tokenizer->Encode(*text, {.add_special = fields.add_special_tokens.value_or(true),
                                                 .parse_special = true,
                                                 .max_tokens = MaxTokens(fields, model)});
  if (!encoded.ok()) return AboutField(encoded.status(), inputs.ParamOf(i), model, inputs.with_output);
  return encoded;
}

absl::StatusOr<std::vector<TokenId>> EncodeParts(const std::vector<model::PromptPart>& parts, bool add_special,
                                                 size_t max_tokens, const ServedModel& model) {
  auto ids = model.tokenizer->EncodeParts(parts, {.add_special = add_special, .max_tokens = max_tokens});
  if (!ids.ok()) return AboutField(ids.status(), "messages", model);
  return ids;
}

absl::StatusOr<std::vector<model::PromptPart>> Render(const ChatPrompt& prompt, const ServedModel& model) {
  auto parts = model.chat(prompt);
  if (!parts.ok()) return AboutField(parts.status(), "messages", model);
  return parts;
}

absl::StatusOr<std::vector<TokenId>> EncodeThatFits(const std::vector<model::PromptPart>& parts,
                                                    const GenerationFields& fields, const ServedModel& model) {
  if (!fields.truncate_prompt_tokens) {
    std::string text;  // that a token may cover where two parts meet
    for (const model::PromptPart& part : parts) text += part.text;
    DT_RETURN_IF_ERROR(RefuseByBytes(model.tokenizer->LeastTokens(text), "messages", model));
  }
  return EncodeParts(parts, fields.add_special_tokens.value_or(false), MaxTokens(fields, model), model);
}

AnswerSpec MakeAnswerSpec(const ChatRequest& request, ThoughtState thought, const ServedModel& model,
                          const RequestContext& context) {
  AnswerSpec spec;
  if (request.tools.any()) spec.calls = model.calls;
  spec.tools = request.tools.tools;
  spec.parallel_calls = request.tools.parallel;
  if (thought != ThoughtState::kNone) spec.thoughts = model.thoughts;
  spec.thought_begun = thought == ThoughtState::kBegun;
  spec.show_reasoning = request.show_reasoning;
  spec.marks = MarkTokens(model, spec.calls, spec.thoughts);
  spec.id_seed = context.id_seed;
  return spec;
}

}  // namespace

absl::Status RequestContext::CheckWanted() const {
  return cancel != nullptr && cancel->cancelled() ? absl::CancelledError("the client left") : absl::OkStatus();
}

absl::StatusOr<std::vector<TokenId>> EncodeChat(const ChatPrompt& prompt, bool add_special, const ServedModel& model) {
  DT_ASSIGN_OR_RETURN(const auto parts, Render(prompt, model));
  return EncodeParts(parts, add_special, SIZE_MAX, model);
}

absl::StatusOr<PreparedGeneration> Prepare(const CompletionRequest& request, const ServedModel& model,
                                           const RequestContext& context) {
  const GenerationFields& fields = request.fields;
  PreparedGeneration prepared{MakeSpec(fields, model, context, Endpoint::kCompletions), {}};
  const Inputs inputs{request.prompts, "prompt", /*with_output=*/true};
  DT_RETURN_IF_ERROR(RefuseLongPrompts(inputs, fields, model));
  DT_ASSIGN_OR_RETURN(auto sampling, MakeSampling(fields, model, context));
  DT_RETURN_IF_ERROR(Follow(fields.grammar, fields.grammar_param, model, context, sampling));
  for (size_t i = 0; i < request.prompts.size(); ++i) {
    DT_RETURN_IF_ERROR(context.CheckWanted());
    DT_ASSIGN_OR_RETURN(std::vector<TokenId> ids, EncodePrompt(inputs, i, fields, model));
    DT_ASSIGN_OR_RETURN(auto made, MakeRequest(fields, model, context, sampling, std::move(ids), /*chat=*/false));
    prepared.spec.prompts.push_back(made.prompt);
    prepared.requests.push_back(std::move(made));
  }
  prepared.spec.shape = request.shape;
  prepared.spec.repeated = request.repeated;
  if (request.shape == AnswerShape::kLlama)
    prepared.spec.repeated["settings"] = LlamaSettings(fields, prepared.requests.front());
  return prepared;
}

absl::StatusOr<PreparedGeneration> Prepare(const EmbeddingRequest& request, const ServedModel& model,
                                           const RequestContext& context) {
  const GenerationFields& fields = request.fields;
  PreparedGeneration prepared{MakeSpec(fields, model, context, Endpoint::kCompletions), {}};
  prepared.spec.id = absl::StrCat("embd-", context.id);
  prepared.spec.shape = AnswerShape::kVectors;
  prepared.spec.form = request.form;
  const Inputs inputs{request.inputs, request.input_field, /*with_output=*/false};
  DT_RETURN_IF_ERROR(RefuseLongPrompts(inputs, fields, model));
  for (size_t i = 0; i < request.inputs.size(); ++i) {
    DT_RETURN_IF_ERROR(context.CheckWanted());
    requests::GenerationRequest made;
    DT_ASSIGN_OR_RETURN(made.prompt, EncodePrompt(inputs, i, fields, model));
    DT_RETURN_IF_ERROR(Truncate(fields, 0, model, made.prompt));
    const auto tokens = static_cast<int64_t>(made.prompt.size());
    if (tokens == 0) return BadField(inputs.ParamOf(i), "has no token");
    if (tokens > model.max_model_len)
      return TooLong(inputs.ParamOf(i), tokens, /*at_least=*/false, model, /*with_output=*/false);
    made.tenant = context.tenant;
    made.cache_salt = absl::StrCat(fields.cache_salt, context.cache_epoch);
    made.priority = fields.priority;
    made.max_tokens = 0;
    made.pooling = model.pooling;
    made.use_prefix_cache = fields.use_prefix_cache;
    prepared.spec.prompts.push_back(made.prompt);
    prepared.requests.push_back(std::move(made));
  }
  return prepared;
}

namespace {

absl::StatusOr<PreparedGeneration> PrepareChat(const ChatRequest& request, const ServedModel& model,
                                               const RequestContext& context) {
  const GenerationFields& fields = request.fields;
  PreparedGeneration prepared{MakeSpec(fields, model, context, Endpoint::kChat), {}};
  prepared.spec.shape = request.shape;
  prepared.spec.repeated = request.repeated;
  if (request.shape == AnswerShape::kResponses) prepared.spec.id = absl::StrCat("resp_", context.id);
  if (request.shape == AnswerShape::kMessages) prepared.spec.id = absl::StrCat("msg_", context.id);
  DT_ASSIGN_OR_RETURN(auto sampling, MakeSampling(fields, model, context));
  DT_RETURN_IF_ERROR(context.CheckWanted());
  DT_ASSIGN_OR_RETURN(const auto parts, Render(request.prompt, model));
  DT_RETURN_IF_ERROR(context.CheckWanted());
  const ThoughtState thought = ThoughtAfter(parts, model);
  const std::string grammar = AnswerGrammar(fields.grammar, request.tools, thought, model);
  const std::string& param = fields.grammar.empty() ? request.tools.param : fields.grammar_param;
  DT_RETURN_IF_ERROR(Follow(grammar, param, model, context, sampling));
  DT_ASSIGN_OR_RETURN(auto ids, EncodeThatFits(parts, fields, model));
  DT_ASSIGN_OR_RETURN(auto made, MakeRequest(fields, model, context, sampling, std::move(ids), /*chat=*/true));
  prepared.spec.answer = MakeAnswerSpec(request, thought, model, context);
  prepared.spec.prompts.push_back(made.prompt);
  prepared.requests.push_back(std::move(made));
  return prepared;
}

}  // namespace

absl::StatusOr<PreparedGeneration> Prepare(const ChatRequest& request, const ServedModel& model,
                                           const RequestContext& context) {
  auto prepared = PrepareChat(request, model, context);
  if (!prepared.ok()) return request.names.Rename(prepared.status());
  return prepared;
}

absl::StatusOr<PreparedGeneration> Prepare(const ParsedGeneration& request, const ServedModel& model,
                                           const RequestContext& context) {
  return std::visit([&](const auto& parsed) { return Prepare(parsed, model, context); }, request);
}

bool NeedsCompiling(const absl::Status& status) { return status.GetPayload(kNeedsCompiling).has_value(); }

}  // namespace dovetail::server
