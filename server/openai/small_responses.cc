#include "server/openai/small_responses.h"

#include <algorithm>

#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"
#include "server/openai/api_error.h"
#include "server/openai/prepare.h"

namespace dovetail::server {
namespace {

Json ModelJson(const ServedModel& model, const std::string& name, int64_t usable_len) {
  Json json = {{"id", name},
               {"object", "model"},
               {"created", model.created},
               {"owned_by", model.owned_by},
               {"root", model.names.front()},
               {"parent", nullptr},
               {"max_model_len", usable_len}};
  if (usable_len < model.max_model_len) json["configured_max_model_len"] = model.max_model_len;
  return json;
}

std::string Shown(const ServedModel& model, TokenId id) {
  std::string pending(model.tokenizer->TokenText(id)), text;
  model::DrainUtf8(pending, /*finish=*/true, text);
  return text;
}

Json SpellingOrNull(const ServedModel& model, const std::optional<TokenId>& id) {
  return id ? Json(Shown(model, *id)) : Json();
}

// llama.cpp's pieces: text where it is text, else the bytes.
Json PieceJson(const ServedModel& model, TokenId id) {
  const std::string_view bytes = model.tokenizer->TokenText(id);
  Json piece;
  if (model::ValidUtf8Prefix(bytes) == bytes.size()) {
    piece = std::string(bytes);
  } else {
    piece = Json::array();
    for (const char c : bytes) piece.push_back(static_cast<uint8_t>(c));
  }
  return {{"id", id}, {"piece", std::move(piece)}};
}

}  // namespace

std::string ModelsBody(const ServedModel& model, int64_t usable_len) {
  Json data = Json::array();
  for (const std::string& name : model.names) data.push_back(ModelJson(model, name, usable_len));
  return Dump({{"object", "list"}, {"data", std::move(data)}});
}

absl::StatusOr<std::string> ModelBody(const ServedModel& model, const std::string& name, int64_t usable_len) {
  if (std::find(model.names.begin(), model.names.end(), name) == model.names.end()) return UnknownModel(name);
  return Dump(ModelJson(model, name, usable_len));
}

absl::StatusOr<std::string> TokenizerInfoBody(const ServedModel& model) {
  if (model.tokenizer == nullptr) return NotFound("this model has no tokenizer");
  const model::SpecialIds& special = model.tokenizer->special();
  return Dump({{"bos_token", SpellingOrNull(model, special.bos)},
               {"eos_token", SpellingOrNull(model, special.eos)},
               {"unk_token", SpellingOrNull(model, special.unk)},
               {"pad_token", SpellingOrNull(model, special.pad)},
               {"bos_token_id", special.bos ? Json(*special.bos) : Json()},
               {"eos_token_id", special.eos ? Json(*special.eos) : Json()},
               {"add_bos_token", !model.tokenizer->prefix_ids().empty()},
               {"vocab_size", model.tokenizer->vocab_size()},
               {"model_max_length", model.max_model_len},
               {"has_chat_template", static_cast<bool>(model.chat)}});
}

absl::StatusOr<std::string> TokenizeBody(const TokenizeRequest& request, const ServedModel& model, int64_t usable_len) {
  std::vector<TokenId> ids;
  if (const auto* chat = std::get_if<ChatPrompt>(&request.input)) {
    DT_ASSIGN_OR_RETURN(ids, EncodeChat(*chat, request.add_special, model));
  } else {
    auto encoded =
        model.tokenizer->Encode(std::get<std::string>(request.input),
                                {.add_special = request.add_special, .parse_special = request.parse_special});
    if (!encoded.ok()) return BadField("prompt", std::string(encoded.status().message()));
    ids = *std::move(encoded);
  }
  Json body = {{"count", ids.size()}, {"max_model_len", usable_len}};
  if (request.with_pieces) {
    body["tokens"] = Json::array();
    for (const TokenId id : ids) body["tokens"].push_back(PieceJson(model, id));
  } else {
    body["tokens"] = ids;
  }
  body["token_strs"] = nullptr;
  if (request.return_token_strs) {
    body["token_strs"] = Json::array();
    for (const TokenId id : ids) body["token_strs"].push_back(Shown(model, id));
  }
  return Dump(body);
}

absl::StatusOr<std::string> CountTokensBody(const ChatRequest& request, const ServedModel& model) {
  const auto ids = EncodeChat(request.prompt, request.fields.add_special_tokens.value_or(false), model);
  if (!ids.ok()) return request.names.Rename(ids.status());
  return Dump({{"input_tokens", ids->size()}});
}

std::string DetokenizeBody(const DetokenizeRequest& request, const ServedModel& model) {
  const std::string text = model.tokenizer->Decode(request.tokens, /*skip_special=*/false);
  return Dump({{"prompt", text}, {"content", text}});
}

}  // namespace dovetail::server
