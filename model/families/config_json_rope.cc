#include "model/families/config_json_rope.h"

#include <algorithm>

#include "model/formats/file_errors.h"

namespace dovetail::model {
namespace {

struct RopeDefaults {
  double theta;
  double partial;  // share of the head's dimensions that turn
};

absl::StatusOr<RopeKind> ReadRopeKind(const JsonFields& scaling) {
  DT_ASSIGN_OR_RETURN(const auto new_spelling, scaling.String("rope_type"));
  DT_ASSIGN_OR_RETURN(const auto old_spelling, scaling.String("type"));
  const std::string kind = new_spelling.value_or(old_spelling.value_or("default"));
  if (kind == "default") return RopeKind::kDefault;
  if (kind == "su") return RopeKind::kLongRope;  // Phi-3's first spelling
  for (const RopeKind known :
       {RopeKind::kLinear, RopeKind::kDynamic, RopeKind::kLlama3, RopeKind::kYarn, RopeKind::kLongRope}) {
    if (kind == Name(known)) return known;
  }
  return Unimplemented(scaling.file(), ": rope type '", Printable(kind),
                       "' is not served; served are default, linear, dynamic, llama3, yarn and longrope");
}

absl::Status Read(const JsonFields& fields, const char* field, double& value) {
  DT_ASSIGN_OR_RETURN(const auto read, fields.Float(field));
  if (read) value = *read;
  return absl::OkStatus();
}

absl::Status ReadFactorLists(const JsonFields& scaling, RopeSpec& rope) {
  for (const auto& [field, list] :
       {std::pair("short_factor", &rope.short_factor), std::pair("long_factor", &rope.long_factor)}) {
    DT_ASSIGN_OR_RETURN(const auto values, scaling.Floats(field));
    if (!values) return scaling.Error(field, "is missing");
    list->assign(values->begin(), values->end());
  }
  return absl::OkStatus();
}

absl::Status ReadAttentionFactor(const JsonFields& scaling, RopeSpec& rope) {
  DT_ASSIGN_OR_RETURN(const auto explicit_factor, scaling.Float("attention_factor"));
  if (explicit_factor) {
    rope.attention_factor = *explicit_factor;
  } else if (rope.kind == RopeKind::kLongRope) {
    rope.attention_factor = LongRopeMultiplier(rope.factor, rope.original_max_positions);
  } else if (rope.kind == RopeKind::kYarn) {
    double mscale = 0, mscale_all = 0;
    DT_RETURN_IF_ERROR(Read(scaling, "mscale", mscale));
    DT_RETURN_IF_ERROR(Read(scaling, "mscale_all_dim", mscale_all));
    rope.attention_factor = mscale != 0 && mscale_all != 0
                                ? YarnMscale(rope.factor, mscale) / YarnMscale(rope.factor, mscale_all)
                                : YarnMscale(rope.factor);
  }
  return absl::OkStatus();
}

// `scaling` is rope_parameters (5) or rope_scaling (4); `top` is the config around it.
absl::StatusOr<RopeSpec> ReadRope(const JsonFields& top, const JsonFields& scaling, RopeDefaults defaults,
                                  const ModelConfig& config) {
  RopeSpec rope;
  DT_ASSIGN_OR_RETURN(rope.kind, ReadRopeKind(scaling));
  rope.theta = defaults.theta;
  DT_RETURN_IF_ERROR(Read(scaling, "rope_theta", rope.theta));
  double partial = defaults.partial;
  DT_RETURN_IF_ERROR(Read(scaling, "partial_rotary_factor", partial));
  if (!(partial > 0 && partial <= 1))
    return scaling.Error("partial_rotary_factor", absl::StrCat("is ", partial, "; it must be in (0, 1]"));
  rope.rotary_dims = static_cast<int>(static_cast<double>(config.key_dim) * partial);
  rope.max_positions = config.max_positions;
  if (rope.kind == RopeKind::kDefault) return rope;

  DT_ASSIGN_OR_RETURN(auto original, scaling.Int("original_max_position_embeddings"));
  if (!original) {
    DT_ASSIGN_OR_RETURN(original, top.Int("original_max_position_embeddings"));
  }
  if (!original && (rope.kind == RopeKind::kLlama3 || rope.kind == RopeKind::kLongRope)) {
    return scaling.Error("original_max_position_embeddings", "is missing");
  }
  rope.original_max_positions = original.value_or(config.max_positions);
  if (rope.original_max_positions < 1) return scaling.Error("original_max_position_embeddings", "must be at least 1");
  DT_ASSIGN_OR_RETURN(const auto factor, scaling.Float("factor"));
  if (!factor && rope.kind != RopeKind::kYarn && rope.kind != RopeKind::kLongRope)
    return scaling.Error("factor", "is missing");
  const double stretched = static_cast<double>(config.max_positions) / static_cast<double>(rope.original_max_positions);
  rope.factor = factor.value_or(std::max(1.0, stretched));
  if (!(rope.factor >= 1.0 && rope.factor <= 1e6))
    return scaling.Error("factor", absl::StrCat("is ", rope.factor, "; it must be in [1, 1e6]"));

  DT_RETURN_IF_ERROR(Read(scaling, "low_freq_factor", rope.low_freq_factor));
  DT_RETURN_IF_ERROR(Read(scaling, "high_freq_factor", rope.high_freq_factor));
  DT_RETURN_IF_ERROR(Read(scaling, "beta_fast", rope.beta_fast));
  DT_RETURN_IF_ERROR(Read(scaling, "beta_slow", rope.beta_slow));
  DT_ASSIGN_OR_RETURN(const auto truncate, scaling.Bool("truncate"));
  rope.truncate = truncate.value_or(true);
  if (rope.kind == RopeKind::kLongRope) DT_RETURN_IF_ERROR(ReadFactorLists(scaling, rope));
  DT_RETURN_IF_ERROR(ReadAttentionFactor(scaling, rope));
  return rope;
}

}  // namespace

absl::StatusOr<JsonRopes> ReadRopes(const JsonFields& top, double theta_default, const ModelConfig& config) {
  static const nlohmann::json kNothing = nlohmann::json::object();
  const JsonFields nothing(top.file(), kNothing);
  RopeDefaults defaults{theta_default, 1.0};
  DT_RETURN_IF_ERROR(Read(top, "rope_theta", defaults.theta));
  DT_RETURN_IF_ERROR(Read(top, "partial_rotary_factor", defaults.partial));
  RopeDefaults local = defaults;
  const bool gemma = config.architecture == Architecture::kGemma3;
  if (gemma) {
    local.theta = 1e4;
    DT_RETURN_IF_ERROR(Read(top, "rope_local_base_freq", local.theta));
  }
  DT_ASSIGN_OR_RETURN(const auto parameters, top.Object("rope_parameters"));
  if (parameters && (parameters->Has("full_attention") || parameters->Has("sliding_attention"))) {
    JsonRopes ropes;
    DT_ASSIGN_OR_RETURN(const auto full, parameters->Object("full_attention"));
    DT_ASSIGN_OR_RETURN(const auto sliding, parameters->Object("sliding_attention"));
    DT_ASSIGN_OR_RETURN(ropes.full, ReadRope(top, full.value_or(nothing), defaults, config));
    DT_ASSIGN_OR_RETURN(ropes.sliding, ReadRope(top, sliding.value_or(nothing), local, config));
    return ropes;
  }
  DT_ASSIGN_OR_RETURN(const auto scaling, top.Object("rope_scaling"));
  JsonRopes ropes;
  DT_ASSIGN_OR_RETURN(ropes.full,
                      ReadRope(top, parameters ? *parameters : scaling.value_or(nothing), defaults, config));
  ropes.sliding = ropes.full;
  if (gemma) {  // the local layers are never scaled
    DT_ASSIGN_OR_RETURN(ropes.sliding, ReadRope(top, nothing, local, config));
  }
  return ropes;
}

}  // namespace dovetail::model
