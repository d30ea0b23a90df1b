#include "server/grpc/generate_request.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "server/openai/chat_body.h"
#include "server/openai/requests.h"

namespace dovetail::server {

namespace pb = vllm::grpc::engine;

namespace {

absl::Status CheckServed(const pb::GenerateRequest& request) {
  const pb::SamplingParams& params = request.sampling_params();
  const bool constrained = params.constraint_case() != pb::SamplingParams::CONSTRAINT_NOT_SET &&
                           (!params.has_json_object() || params.json_object());
  if (constrained && params.ignore_eos())
    return InvalidArgument("sampling_params.ignore_eos: cannot stand together with a constraint");
  if (constrained && params.min_tokens() > 0)
    return InvalidArgument("sampling_params.min_tokens: cannot stand together with a constraint");
  if (request.has_data_parallel_rank() && request.data_parallel_rank() != 0)
    return InvalidArgument("data_parallel_rank: ", request.data_parallel_rank(), "; there is only rank 0");
  if (request.input_case() == pb::GenerateRequest::INPUT_NOT_SET)
    return InvalidArgument("input: give tokenized.input_ids or text");
  for (const float value : {params.temperature(), params.top_p(), params.min_p(), params.repetition_penalty(),
                            params.presence_penalty(), params.frequency_penalty()})
    if (!std::isfinite(value)) return InvalidArgument("sampling_params: holds a number that is not finite");
  for (const auto& [token, bias] : params.logit_bias())
    if (!std::isfinite(bias)) return InvalidArgument("sampling_params.logit_bias: of token ", token, " is not finite");
  return absl::OkStatus();
}

// What the text may be, as a completion's structured_outputs; null: anything. `names` gets what its fields are here.
Json ConstraintOf(const pb::SamplingParams& params, FieldNames& names) {
  const auto as = [&names](const char* name, const char* own, Json value) {
    names.Add(std::string("structured_outputs.") + name, std::string("sampling_params.") + own);
    return Json{{name, std::move(value)}};
  };
  switch (params.constraint_case()) {
    case pb::SamplingParams::kJsonSchema: return as("json", "json_schema", params.json_schema());
    case pb::SamplingParams::kRegex: return as("regex", "regex", params.regex());
    case pb::SamplingParams::kGrammar: return as("grammar", "grammar", params.grammar());
    case pb::SamplingParams::kJsonObject: return as("json_object", "json_object", params.json_object());
    case pb::SamplingParams::kChoice: {
      const auto& choices = params.choice().choices();
      return as("choice", "choice.choices", std::vector<std::string>(choices.begin(), choices.end()));
    }
    case pb::SamplingParams::kStructuralTag: return as("structural_tag", "structural_tag", params.structural_tag());
    case pb::SamplingParams::CONSTRAINT_NOT_SET: break;
  }
  return nullptr;
}

// The request as the body of a completion. One validator, for every transport: ranges, model limits and texts are those
// of HTTP.
Json BodyOf(const pb::GenerateRequest& request, const ServedModel& model, FieldNames& names) {
  const pb::SamplingParams& params = request.sampling_params();
  Json body = {{"model", model.names.front()}};
  if (request.has_text()) {
    body["prompt"] = request.text();
  } else {
    const auto& ids = request.tokenized().input_ids();
    body["prompt"] = std::vector<uint32_t>(ids.begin(), ids.end());
  }
  if (params.has_temperature()) body["temperature"] = params.temperature();
  if (params.top_p() != 0) body["top_p"] = params.top_p();
  if (params.top_k() != 0) body["top_k"] = params.top_k();
  if (params.min_p() != 0) body["min_p"] = params.min_p();
  if (params.repetition_penalty() != 0) body["repetition_penalty"] = params.repetition_penalty();
  body["frequency_penalty"] = params.frequency_penalty();
  body["presence_penalty"] = params.presence_penalty();
  if (params.has_max_tokens()) body["max_tokens"] = params.max_tokens();
  body["min_tokens"] = params.min_tokens();
  if (params.stop_size() > 0) body["stop"] = std::vector<std::string>(params.stop().begin(), params.stop().end());
  if (params.stop_token_ids_size() > 0)
    body["stop_token_ids"] = std::vector<uint32_t>(params.stop_token_ids().begin(), params.stop_token_ids().end());
  body["ignore_eos"] = params.ignore_eos();
  if (params.n() != 0) body["n"] = params.n();
  if (params.has_logprobs()) body["logprobs"] = params.logprobs();
  if (params.has_prompt_logprobs()) body["prompt_logprobs"] = params.prompt_logprobs();
  if (params.has_seed()) body["seed"] = params.seed();
  body["include_stop_str_in_output"] = params.include_stop_str_in_output();
  if (params.has_truncate_prompt_tokens()) body["truncate_prompt_tokens"] = params.truncate_prompt_tokens();
  body["structured_outputs"] = ConstraintOf(params, names);
  for (const auto& [token, bias] : params.logit_bias()) body["logit_bias"][std::to_string(token)] = bias;
  return body;
}

}  // namespace

absl::StatusOr<PreparedGeneration> PrepareGrpcRequest(const pb::GenerateRequest& request, const ServedModel& model,
                                                      const RequestContext& context) {
  DT_RETURN_IF_ERROR(CheckServed(request));
  FieldNames names;
  const Json body = BodyOf(request, model, names);
  auto read = ParseCompletionRequest(body, model);
  if (!read.ok()) return names.Rename(read.status());
  CompletionRequest& parsed = *read;
  // Over HTTP a stream has no place for what a prompt yields; here its first chunk has.
  parsed.fields.stream = request.stream();
  if (!request.sampling_params().has_max_tokens()) parsed.fields.max_tokens.reset();  // as many as fit
  auto prepared = Prepare(parsed, model, context);
  if (!prepared.ok()) return names.Rename(prepared.status());
  if (prepared->requests.size() != 1) return InvalidArgument("input: exactly one prompt is taken");
  return prepared;
}

absl::StatusOr<PreparedGeneration> PrepareGrpcRequest(const pb::EmbedRequest& request, const ServedModel& model,
                                                      const RequestContext& context) {
  const auto& ids = request.tokenized().input_ids();
  if (ids.empty()) return InvalidArgument("tokenized.input_ids: is empty");
  const Json body = {{"model", model.names.front()}, {"input", std::vector<uint32_t>(ids.begin(), ids.end())}};
  DT_ASSIGN_OR_RETURN(const EmbeddingRequest parsed, ParseEmbeddingRequest(body, model));
  return Prepare(parsed, model, context);
}

}  // namespace dovetail::server
