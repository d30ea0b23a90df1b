#include <algorithm>
#include <array>

#include "server/openai/parse_generation.h"
#include "server/openai/prompt_input.h"
#include "server/openai/shared_fields.h"

namespace dovetail::server {
namespace {

constexpr size_t kMaxSaltBytes = 512;

constexpr std::string_view kOneWay = "vectors come in this form alone; leave it out";
constexpr RefusedField kRefused[] = {
    {"stream", "false", "vectors come whole; leave it out"},
    {"messages", "", "send the text that is to become a vector as input"},
    {"chat_template", "", "send the text that is to become a vector as input"},
    {"chat_template_kwargs", "{}", "send the text that is to become a vector as input"},
    {"embed_dtype", "\"float32\"", kOneWay},
    {"endianness", "\"little\"", kOneWay},
    {"normalize", "true", "vectors have length 1 here; leave it out"},
    {"use_activation", "true", "vectors have length 1 here; leave it out"},
    {"task", "\"embed\"", "only embed is served; leave it out"},
    {"pooling", "", "it is the server's to choose (--pooling); leave it out"},
    {"softmax", "", "this is not a classifier; leave it out"},
    {"activation", "", "this is not a classifier; leave it out"},
    {"truncation_side", "\"left\"", "prompts are cut at their left end"},
    {"mm_processor_kwargs", "{}", "this server reads and writes text only"},
    {"image_data", "[]", "this server reads and writes text only"},
};

absl::Status RequirePooling(const ServedModel& model) {
  if (model.pooling != requests::Pooling::kNone) return absl::OkStatus();
  return BadField("model", model.why_no_pooling);
}

// What both routes share.
absl::StatusOr<EmbeddingRequest> ParseShared(const FieldReader& reader, const std::string& input,
                                             const ServedModel& model) {
  EmbeddingRequest request;
  GenerationFields& fields = request.fields;
  DT_ASSIGN_OR_RETURN(fields.model, ParseModelName(reader, model));
  DT_RETURN_IF_ERROR(RequirePooling(model));
  request.input_field = input;
  DT_ASSIGN_OR_RETURN(request.inputs, ParsePromptInputs(reader, input, kMaxEmbeddingInputs, model));
  if (reader.Has("add_special_tokens")) {
    DT_ASSIGN_OR_RETURN(fields.add_special_tokens, reader.Bool("add_special_tokens", true));
  }
  DT_ASSIGN_OR_RETURN(fields.truncate_prompt_tokens, reader.Int("truncate_prompt_tokens"));
  if (fields.truncate_prompt_tokens == 0)
    return BadField("truncate_prompt_tokens", "0 would leave no prompt; use -1 or a positive number");
  DT_ASSIGN_OR_RETURN(const auto priority, reader.Int("priority"));
  fields.priority = static_cast<int>(priority.value_or(0));
  DT_ASSIGN_OR_RETURN(const auto salt, reader.String("cache_salt", kMaxSaltBytes));
  fields.cache_salt = salt.value_or("");
  return request;
}

absl::Status ParseDimensions(const FieldReader& reader, const ServedModel& model, VectorForm& form) {
  DT_ASSIGN_OR_RETURN(const auto dimensions, reader.Int("dimensions"));
  if (!dimensions) return absl::OkStatus();
  if (model.hidden_size > 0 && *dimensions > model.hidden_size)
    return BadField("dimensions", *dimensions, " is more than the ", model.hidden_size,
                    " values of this model's vectors; ask for at most that");
  form.dimensions = static_cast<int>(*dimensions);
  return absl::OkStatus();
}

absl::Status BoundAnswer(const EmbeddingRequest& request, const ServedModel& model) {
  const int64_t values = request.form.dimensions > 0 ? request.form.dimensions : model.hidden_size;
  const auto inputs = static_cast<int64_t>(request.inputs.size());
  if (values * inputs <= kMaxEmbeddingValues) return absl::OkStatus();
  return BadField(request.input_field, inputs, " vectors of ", values, " values are more than the ",
                  kMaxEmbeddingValues, " of an answer; send at most ", kMaxEmbeddingValues / values, " at once");
}

}  // namespace

absl::StatusOr<EmbeddingRequest> ParseEmbeddingRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  DT_RETURN_IF_ERROR(SharedFields(body, {}, kRefused).status());
  const FieldReader reader(body);
  DT_ASSIGN_OR_RETURN(EmbeddingRequest request, ParseShared(reader, "input", model));
  DT_ASSIGN_OR_RETURN(const auto encoding, reader.String("encoding_format", 64));
  if (encoding && *encoding != "float" && *encoding != "base64")
    return BadField("encoding_format", Describe(*encoding), " is neither \"float\" nor \"base64\"");
  request.form.base64 = encoding == "base64";
  DT_ASSIGN_OR_RETURN(const auto user, reader.String("user", kMaxSaltBytes));  // told, and not used
  DT_RETURN_IF_ERROR(ParseDimensions(reader, model, request.form));
  DT_RETURN_IF_ERROR(BoundAnswer(request, model));
  return request;
}

absl::StatusOr<EmbeddingRequest> ParseLlamaEmbeddingRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  DT_RETURN_IF_ERROR(SharedFields(body, {}, kRefused).status());
  const FieldReader reader(body);
  const bool has_input = reader.Has("input");
  if (has_input && reader.Has("content")) return BadField("content", "stands next to input; send one of them");
  DT_ASSIGN_OR_RETURN(EmbeddingRequest request, ParseShared(reader, has_input ? "input" : "content", model));
  DT_ASSIGN_OR_RETURN(const auto norm, reader.Int("embd_normalize"));
  if (norm && *norm != -1 && *norm != 2)
    return BadField("embd_normalize", *norm, " is not supported; use 2 (length 1) or -1 (as it is)");
  request.form.normalise = norm.value_or(2) == 2;
  request.form.llama = true;
  DT_RETURN_IF_ERROR(BoundAnswer(request, model));
  return request;
}

}  // namespace dovetail::server
