#include "control/generation_messages.h"

#include <cmath>
#include <utility>

#include "proto/step_plan.h"

namespace dovetail::control {
namespace {

using requests::GenerationRequest;
using requests::GenerationUpdate;

constexpr size_t kMaxTenantBytes = 1024;
constexpr size_t kMaxErrorBytes = 16 << 10;

absl::Status CheckCount(const char* field, int64_t count, int64_t most) {
  if (count >= 0 && count <= most) return absl::OkStatus();
  return InvalidArgument(field, ": ", count, " is outside 0..", most);
}

void LogprobToProto(const proto::TokenLogprob& logprob, v1::TokenLogprob& out) {
  out.set_token(logprob.token);
  out.set_logprob(logprob.logprob);
  out.set_rank(logprob.rank);
}

void LogprobsToProto(const proto::PositionLogprobs& logprobs, v1::PositionLogprobs& out) {
  LogprobToProto(logprobs.chosen, *out.mutable_chosen());
  for (const proto::TokenLogprob& top : logprobs.top) LogprobToProto(top, *out.add_top());
}

absl::StatusOr<proto::PositionLogprobs> LogprobsFromProto(const v1::PositionLogprobs& in) {
  DT_RETURN_IF_ERROR(CheckCount("logprobs.top", in.top_size(), proto::kMaxTopLogprobs));
  const auto one = [](const v1::TokenLogprob& from) {
    return proto::TokenLogprob{from.token(), from.logprob(), from.rank()};
  };
  proto::PositionLogprobs logprobs;
  logprobs.chosen = one(in.chosen());
  for (const v1::TokenLogprob& top : in.top()) logprobs.top.push_back(one(top));
  return logprobs;
}

void ToProto(const proto::SamplingParams& sampling, v1::Sampling& out) {
  out.set_temperature(sampling.temperature);
  out.set_top_k(sampling.top_k);
  out.set_top_p(sampling.top_p);
  out.set_min_p(sampling.min_p);
  out.set_repetition_penalty(sampling.repetition_penalty);
  out.set_presence_penalty(sampling.presence_penalty);
  out.set_frequency_penalty(sampling.frequency_penalty);
  out.set_seed(sampling.seed);
  for (const auto& [token, value] : sampling.logit_bias) {
    out.add_bias_tokens(token);
    out.add_bias_values(value);
  }
  out.mutable_allowed_token_ids()->Add(sampling.allowed_token_ids.begin(), sampling.allowed_token_ids.end());
  out.mutable_banned_token_ids()->Add(sampling.banned_token_ids.begin(), sampling.banned_token_ids.end());
  if (sampling.logprobs >= 0) out.set_logprobs(sampling.logprobs);
  out.set_grammar(sampling.grammar.source);
  out.mutable_grammar_ends()->Add(sampling.grammar.ends.begin(), sampling.grammar.ends.end());
}

absl::StatusOr<proto::SamplingParams> FromProto(const v1::Sampling& in) {
  for (const float value : {in.temperature(), in.top_p(), in.min_p(), in.repetition_penalty(), in.presence_penalty(),
                            in.frequency_penalty()})
    if (!std::isfinite(value)) return InvalidArgument("sampling: holds a number that is not finite");
  if (in.temperature() < 0) return InvalidArgument("sampling.temperature: ", in.temperature(), " is negative");
  if (in.top_k() < 0) return InvalidArgument("sampling.top_k: ", in.top_k(), " is negative");
  if (in.top_p() < 0 || in.top_p() > 1) return InvalidArgument("sampling.top_p: ", in.top_p(), " is outside 0..1");
  if (in.min_p() < 0 || in.min_p() > 1) return InvalidArgument("sampling.min_p: ", in.min_p(), " is outside 0..1");
  if (in.repetition_penalty() <= 0)
    return InvalidArgument("sampling.repetition_penalty: ", in.repetition_penalty(), " is not positive");
  if (in.bias_tokens_size() != in.bias_values_size())
    return InvalidArgument("sampling: ", in.bias_tokens_size(), " biased tokens, but ", in.bias_values_size(),
                           " biases");
  DT_RETURN_IF_ERROR(CheckCount("sampling.bias_tokens", in.bias_tokens_size(), proto::kMaxLogitBias));
  DT_RETURN_IF_ERROR(CheckCount("sampling.allowed_token_ids", in.allowed_token_ids_size(), proto::kMaxTokenList));
  DT_RETURN_IF_ERROR(CheckCount("sampling.banned_token_ids", in.banned_token_ids_size(), proto::kMaxTokenList));
  DT_RETURN_IF_ERROR(CheckCount("sampling.grammar", in.grammar().size(), proto::kMaxGrammar));
  DT_RETURN_IF_ERROR(CheckCount("sampling.grammar_ends", in.grammar_ends_size(), proto::kMaxGrammarEnds));
  DT_RETURN_IF_ERROR(CheckCount("sampling.logprobs", in.logprobs(), proto::kMaxTopLogprobs));
  proto::SamplingParams sampling;
  sampling.temperature = in.temperature();
  sampling.top_k = in.top_k();
  sampling.top_p = in.top_p();
  sampling.min_p = in.min_p();
  sampling.repetition_penalty = in.repetition_penalty();
  sampling.presence_penalty = in.presence_penalty();
  sampling.frequency_penalty = in.frequency_penalty();
  sampling.seed = in.seed();
  for (int i = 0; i < in.bias_tokens_size(); ++i) {
    if (!std::isfinite(in.bias_values(i))) return InvalidArgument("sampling.bias_values: entry ", i, " is not finite");
    sampling.logit_bias.emplace_back(in.bias_tokens(i), in.bias_values(i));
  }
  sampling.allowed_token_ids.assign(in.allowed_token_ids().begin(), in.allowed_token_ids().end());
  sampling.banned_token_ids.assign(in.banned_token_ids().begin(), in.banned_token_ids().end());
  sampling.grammar = {in.grammar(), {in.grammar_ends().begin(), in.grammar_ends().end()}};
  sampling.follows_grammar = !in.grammar().empty();
  sampling.logprobs = in.has_logprobs() ? static_cast<int32_t>(in.logprobs()) : -1;
  return sampling;
}

}  // namespace

void ToProto(const GenerationRequest& request, v1::GenerationRequest& out) {
  out.Clear();
  out.set_tenant(request.tenant);
  out.set_cache_salt(request.cache_salt);
  out.set_priority(request.priority);
  out.mutable_prompt()->Add(request.prompt.begin(), request.prompt.end());
  out.set_choices(request.choices);
  ToProto(request.sampling, *out.mutable_sampling());
  out.set_max_tokens(request.max_tokens);
  out.set_min_tokens(request.min_tokens);
  out.mutable_stop_token_ids()->Add(request.stop_token_ids.begin(), request.stop_token_ids.end());
  if (request.prompt_logprobs >= 0) out.set_prompt_logprobs(request.prompt_logprobs);
  out.set_logits_last(request.logits_last);
  out.set_logits_of_output(request.logits_of_output);
  out.set_use_prefix_cache(request.use_prefix_cache);
  out.set_prompt_progress(request.prompt_progress);
  out.set_call(request.call);
  out.set_pooling(static_cast<uint32_t>(request.pooling));
  if (!request.trace.sampled) return;
  out.mutable_trace()->set_trace_high(request.trace.trace_high);
  out.mutable_trace()->set_trace_low(request.trace.trace_low);
  out.mutable_trace()->set_span(request.trace.span);
}

absl::StatusOr<GenerationRequest> FromProto(const v1::GenerationRequest& in) {
  if (in.tenant().size() > kMaxTenantBytes || in.cache_salt().size() > kMaxTenantBytes)
    return InvalidArgument("tenant or cache_salt: longer than ", kMaxTenantBytes, " bytes");
  if (in.prompt_size() < 1) return InvalidArgument("prompt: has no token");
  DT_RETURN_IF_ERROR(CheckCount("prompt", in.prompt_size(), kMaxPromptTokens));
  if (in.choices() < 1 || in.choices() > requests::kMaxChoices)
    return InvalidArgument("choices: ", in.choices(), " is outside 1..", requests::kMaxChoices);
  DT_RETURN_IF_ERROR(CheckCount("max_tokens", in.max_tokens(), 1 << 26));
  DT_RETURN_IF_ERROR(CheckCount("min_tokens", in.min_tokens(), 1 << 26));
  DT_RETURN_IF_ERROR(CheckCount("stop_token_ids", in.stop_token_ids_size(), proto::kMaxTokenList));
  DT_RETURN_IF_ERROR(CheckCount("prompt_logprobs", in.prompt_logprobs(), proto::kMaxTopLogprobs));
  DT_RETURN_IF_ERROR(CheckCount("logits_last", in.logits_last(), in.prompt_size()));
  DT_RETURN_IF_ERROR(CheckCount("pooling", in.pooling(), static_cast<int64_t>(requests::Pooling::kCls)));
  GenerationRequest request;
  request.tenant = in.tenant();
  request.cache_salt = in.cache_salt();
  request.priority = in.priority();
  request.prompt.assign(in.prompt().begin(), in.prompt().end());
  request.choices = static_cast<int>(in.choices());
  DT_ASSIGN_OR_RETURN(request.sampling, FromProto(in.sampling()));
  request.max_tokens = static_cast<int>(in.max_tokens());
  request.min_tokens = static_cast<int>(in.min_tokens());
  request.stop_token_ids.assign(in.stop_token_ids().begin(), in.stop_token_ids().end());
  request.prompt_logprobs = in.has_prompt_logprobs() ? static_cast<int>(in.prompt_logprobs()) : -1;
  request.logits_last = static_cast<int>(in.logits_last());
  request.logits_of_output = in.logits_of_output();
  request.use_prefix_cache = in.use_prefix_cache();
  request.prompt_progress = in.prompt_progress();
  request.call = in.call();
  request.pooling = static_cast<requests::Pooling>(in.pooling());
  if (in.has_trace())
    request.trace = {in.trace().trace_high(), in.trace().trace_low(), in.trace().span(), /*sampled=*/true};
  return request;
}

void ToProto(const GenerationUpdate& update, v1::Update& out) {
  out.Clear();
  out.set_request(update.request.value());
  out.set_choice(update.choice);
  out.mutable_tokens()->Add(update.tokens.begin(), update.tokens.end());
  out.set_first_index(update.first_index);
  for (const auto& logprobs : update.logprobs) LogprobsToProto(logprobs, *out.add_logprobs());
  for (const auto& logits : update.logits) out.add_logits()->mutable_values()->Add(logits.begin(), logits.end());
  for (const auto& logprobs : update.prompt_logprobs) LogprobsToProto(logprobs, *out.add_prompt_logprobs());
  out.mutable_prompt_logits()->Add(update.prompt_logits.begin(), update.prompt_logits.end());
  out.set_prompt_done(update.prompt_done);
  out.mutable_pooled()->Add(update.pooled.begin(), update.pooled.end());
  out.set_choice_finished(update.choice_finished);
  out.set_reason(static_cast<uint32_t>(update.reason));
  out.set_stop_token(update.stop_token);
  out.set_error(update.error);
  out.set_error_code(static_cast<uint32_t>(update.error_code));
  out.set_request_finished(update.request_finished);
  out.set_prompt_tokens(update.prompt_tokens);
  out.set_cached_tokens(update.cached_tokens);
  out.set_queued_us(update.queued_us);
}

absl::StatusOr<GenerationUpdate> FromProto(const v1::Update& in) {
  if (in.choice() >= static_cast<uint32_t>(requests::kMaxChoices))
    return InvalidArgument("choice: ", in.choice(), " is too large");
  if (in.reason() > static_cast<uint32_t>(requests::FinishReason::kError))
    return InvalidArgument("reason: ", in.reason(), " is unknown");
  if (in.error_code() > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated))
    return InvalidArgument("error_code: ", in.error_code(), " is unknown");
  if (in.error().size() > kMaxErrorBytes) return InvalidArgument("error: longer than ", kMaxErrorBytes, " bytes");
  DT_RETURN_IF_ERROR(CheckCount("first_index", in.first_index(), 1 << 26));
  DT_RETURN_IF_ERROR(CheckCount("prompt_done", in.prompt_done(), kMaxPromptTokens));
  GenerationUpdate update;
  update.request = RequestId(in.request());
  update.choice = static_cast<int>(in.choice());
  update.tokens.assign(in.tokens().begin(), in.tokens().end());
  update.first_index = static_cast<int>(in.first_index());
  for (const auto& from : in.logprobs()) {
    DT_ASSIGN_OR_RETURN(update.logprobs.emplace_back(), LogprobsFromProto(from));
  }
  for (const auto& from : in.logits()) update.logits.emplace_back(from.values().begin(), from.values().end());
  for (const auto& from : in.prompt_logprobs()) {
    DT_ASSIGN_OR_RETURN(update.prompt_logprobs.emplace_back(), LogprobsFromProto(from));
  }
  update.prompt_logits.assign(in.prompt_logits().begin(), in.prompt_logits().end());
  update.prompt_done = static_cast<int>(in.prompt_done());
  update.pooled.assign(in.pooled().begin(), in.pooled().end());
  update.choice_finished = in.choice_finished();
  update.reason = static_cast<requests::FinishReason>(in.reason());
  update.stop_token = in.stop_token();
  update.error = in.error();
  update.error_code = static_cast<absl::StatusCode>(in.error_code());
  update.request_finished = in.request_finished();
  update.prompt_tokens = static_cast<int>(in.prompt_tokens());
  update.cached_tokens = static_cast<int>(in.cached_tokens());
  update.queued_us = in.queued_us();
  return update;
}

}  // namespace dovetail::control
