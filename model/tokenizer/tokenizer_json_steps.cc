#include "model/tokenizer/tokenizer_json_steps.h"

#include <string>
#include <utility>
#include <vector>

namespace dovetail::model {
namespace {

using nlohmann::json;

struct Step {
  std::string type;
  const json* fields = nullptr;
};

// `value` as a flat list of steps; Sequences (whose field for the list has one of several names) are opened.
absl::Status Flatten(const char* field, const json& value, std::vector<Step>& steps) {
  if (value.is_null()) return absl::OkStatus();
  const auto type = value.is_object() ? value.find("type") : value.end();
  if (!value.is_object() || type == value.end() || !type->is_string()) {
    return InvalidArgument(field, ": a step without a \"type\"");
  }
  if (*type != "Sequence") {
    steps.push_back({type->get<std::string>(), &value});
    return absl::OkStatus();
  }
  for (const char* list : {"normalizers", "pretokenizers", "processors", "decoders"}) {
    const auto found = value.find(list);
    if (found == value.end() || !found->is_array()) continue;
    for (const json& inner : *found) DT_RETURN_IF_ERROR(Flatten(field, inner, steps));
  }
  return absl::OkStatus();
}

absl::Status Unsupported(const char* field, const std::string& what) {
  return Unimplemented(field, ": ", what, " is not something this engine knows how to do");
}

bool IsTrue(const Step& step, const char* name, bool otherwise) {
  const auto found = step.fields->find(name);
  return found == step.fields->end() || !found->is_boolean() ? otherwise : found->get<bool>();
}

std::string Text(const Step& step, const char* name) {
  const auto found = step.fields->find(name);
  return found == step.fields->end() || !found->is_string() ? std::string() : found->get<std::string>();
}

// {"String": "..."} or {"Regex": "..."}.
std::string PatternText(const Step& step, const char* kind) {
  const auto pattern = step.fields->find("pattern");
  if (pattern == step.fields->end() || !pattern->is_object()) return {};
  const auto found = pattern->find(kind);
  return found == pattern->end() || !found->is_string() ? std::string() : found->get<std::string>();
}

bool ReplacesSpaces(const Step& step) {
  return step.type == "Replace" && PatternText(step, "String") == " " && Text(step, "content") == kSpmSpace;
}

absl::Status ReadNormalizer(const std::vector<Step>& steps, TokenizerData& data, bool& spm) {
  for (const Step& step : steps) {
    if (step.type == "NFC") {
      data.normalize_nfc = true;
    } else if (ReplacesSpaces(step)) {
      spm = true;
    } else if (step.type == "Prepend" && Text(step, "prepend") == kSpmSpace) {
      data.space_prefix = SpacePrefix::kEveryText;
    } else {
      return Unsupported("normalizer", step.type);
    }
  }
  if (data.space_prefix != SpacePrefix::kNone && !spm) return Unsupported("normalizer", "Prepend without Replace");
  return absl::OkStatus();
}

// "first", "always" or "never"; before there was such a field, add_prefix_space.
absl::Status ReadMetaspace(const Step& step, TokenizerData& data) {
  if (Text(step, "replacement") != kSpmSpace) return Unsupported("pre_tokenizer", "a Metaspace other than U+2581");
  if (IsTrue(step, "split", true)) return Unsupported("pre_tokenizer", "Metaspace that splits at spaces");
  std::string scheme = Text(step, "prepend_scheme");
  if (scheme.empty()) scheme = IsTrue(step, "add_prefix_space", true) ? "always" : "never";
  if (scheme == "always") {
    data.space_prefix = SpacePrefix::kEveryText;
  } else if (scheme == "first") {
    data.space_prefix = SpacePrefix::kFirstText;
  } else if (scheme != "never") {
    return Unsupported("pre_tokenizer", "Metaspace with prepend_scheme " + QuoteToken(scheme));
  }
  data.prefix_only_if_missing = true;
  return absl::OkStatus();
}

// Splits that keep every byte in its place: isolated matches, or the gaps between non-matches removed.
bool CutsAtMatches(const Step& step) {
  const std::string behavior = Text(step, "behavior");
  const bool invert = IsTrue(step, "invert", false);
  return (behavior == "Isolated" && !invert) || (behavior == "Removed" && invert);
}

// A byte-level sequence: Splits by patterns, or Digits, and then ByteLevel, with or without its own pattern.
absl::Status ReadByteLevelSteps(const std::vector<Step>& steps, TokenizerData& data) {
  std::vector<std::string> patterns;
  const Step& last = steps.back();
  for (const Step& step : steps) {
    if (&step == &last) continue;
    if (step.type == "Split" && CutsAtMatches(step) && !PatternText(step, "Regex").empty()) {
      patterns.push_back(PatternText(step, "Regex"));
    } else if (step.type == "Digits" && IsTrue(step, "individual_digits", false)) {
      patterns.push_back(R"(\p{N})");
    } else {
      return Unsupported("pre_tokenizer", step.type + " with these settings");
    }
  }
  if (IsTrue(last, "add_prefix_space", true)) return Unsupported("pre_tokenizer", "ByteLevel with add_prefix_space");
  if (IsTrue(last, "use_regex", true)) patterns.emplace_back(PatternsOf(PreTokenizer::kGpt2).front());
  DT_ASSIGN_OR_RETURN(data.pre_tokenizer, PreTokenizerOfPatterns(patterns));
  return absl::OkStatus();
}

absl::Status ReadPreTokenizer(const std::vector<Step>& steps, TokenizerData& data, bool spm_normalizer) {
  if (!steps.empty() && steps.back().type == "ByteLevel" && !spm_normalizer) {
    data.kind = TokenizerKind::kByteLevelBpe;
    return ReadByteLevelSteps(steps, data);
  }
  data.kind = TokenizerKind::kSpmBpe;
  data.pre_tokenizer = PreTokenizer::kNone;
  if (steps.size() == 1 && steps[0].type == "Metaspace" && !spm_normalizer) return ReadMetaspace(steps[0], data);
  if (!spm_normalizer)
    return Unsupported("pre_tokenizer", steps.empty() ? "none at all" : steps.back().type + " at the end");
  for (const Step& step : steps) {
    // Gemma: splits at spaces after the normalizer has replaced them all, so it never splits.
    const bool idle =
        step.type == "Split" && PatternText(step, "String") == " " && Text(step, "behavior") == "MergedWithPrevious";
    if (!idle) return Unsupported("pre_tokenizer", step.type + " after spaces were replaced");
  }
  return absl::OkStatus();
}

absl::Status ReadDecoder(const std::vector<Step>& steps, TokenizerData& data) {
  const bool spm = data.kind == TokenizerKind::kSpmBpe;
  for (const Step& step : steps) {
    if (!spm && step.type == "ByteLevel") continue;
    if (step.type == "ByteFallback" || step.type == "Fuse") continue;
    if (spm && step.type == "Replace" && PatternText(step, "String") == kSpmSpace && Text(step, "content") == " ")
      continue;
    if (spm && step.type == "Strip" && Text(step, "content") == " " && step.fields->value("start", json()) == 1 &&
        step.fields->value("stop", json()) == 0) {
      data.strip_first_space = true;
      continue;
    }
    if (spm && step.type == "Metaspace" && Text(step, "replacement") == kSpmSpace) {
      data.strip_first_space = Text(step, "prepend_scheme") != "never" && IsTrue(step, "add_prefix_space", true);
      continue;
    }
    return Unsupported("decoder", step.type + " with these settings");
  }
  return absl::OkStatus();
}

// {"SpecialToken": {"id": "<s>"}}: the id to put before or after the text; {"Sequence": {"id": "A"}}: the text.
absl::Status ReadTemplate(const Step& step, TokenizerData& data) {
  const auto single = step.fields->find("single");
  const auto tokens = step.fields->find("special_tokens");
  if (single == step.fields->end() || !single->is_array())
    return InvalidArgument("post_processor: no array \"single\"");
  std::vector<TokenId>* affix = &data.prefix_ids;
  for (const json& part : *single) {
    if (part.is_object() && part.contains("Sequence")) {
      affix = &data.suffix_ids;
      continue;
    }
    const auto special = part.is_object() ? part.find("SpecialToken") : part.end();
    if (!part.is_object() || special == part.end() || !special->is_object() || !special->contains("id") ||
        !(*special)["id"].is_string() || tokens == step.fields->end() || !tokens->is_object()) {
      return InvalidArgument("post_processor.single: an entry is neither a SpecialToken nor a Sequence");
    }
    const auto entry = tokens->find((*special)["id"].get<std::string>());
    const auto ids = entry != tokens->end() && entry->is_object() ? entry->find("ids") : tokens->end();
    if (entry == tokens->end() || !entry->is_object() || ids == entry->end() || !ids->is_array()) {
      return InvalidArgument("post_processor.special_tokens: no ids for a token of the template");
    }
    for (const json& id : *ids) {
      const bool fits = id.is_number_integer() && id.get<int64_t>() >= 0 &&
                        id.get<int64_t>() < static_cast<int64_t>(data.tokens.size());
      if (!fits) return InvalidArgument("post_processor.special_tokens: an id outside the vocabulary");
      affix->push_back(id.get<TokenId>());
    }
  }
  if (data.prefix_ids.size() == 1) data.special.bos = data.prefix_ids.front();
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadTextSteps(const json& normalizer, const json& pre_tokenizer, const json& decoder,
                           TokenizerData& data) {
  std::vector<Step> normal, pre, decode;
  DT_RETURN_IF_ERROR(Flatten("normalizer", normalizer, normal));
  DT_RETURN_IF_ERROR(Flatten("pre_tokenizer", pre_tokenizer, pre));
  DT_RETURN_IF_ERROR(Flatten("decoder", decoder, decode));
  bool spm = false;
  DT_RETURN_IF_ERROR(ReadNormalizer(normal, data, spm));
  DT_RETURN_IF_ERROR(ReadPreTokenizer(pre, data, spm));
  return ReadDecoder(decode, data);
}

absl::Status ReadPostProcessor(const json& post_processor, TokenizerData& data) {
  std::vector<Step> steps;
  DT_RETURN_IF_ERROR(Flatten("post_processor", post_processor, steps));
  for (const Step& step : steps) {
    if (step.type == "ByteLevel") continue;  // offsets only
    if (step.type != "TemplateProcessing") return Unsupported("post_processor", step.type);
    DT_RETURN_IF_ERROR(ReadTemplate(step, data));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::model
