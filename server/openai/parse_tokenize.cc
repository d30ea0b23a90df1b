#include "server/openai/parse_generation.h"

namespace dovetail::server {

// vLLM sends {prompt | messages, add_special_tokens, return_token_strs}, llama.cpp's clients {content, add_special,
// parse_special, with_pieces}. The key tells which; their defaults differ.
absl::StatusOr<TokenizeRequest> ParseTokenizeRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  const FieldReader reader(body);
  TokenizeRequest request;
  DT_ASSIGN_OR_RETURN(request.model, ParseModelName(reader, model));
  if (model.tokenizer == nullptr) return BadField("prompt", "this model has no tokenizer");
  if (reader.Has("chat_template"))
    return BadField("chat_template", "the chat template belongs to the server; a request cannot bring one");
  const int inputs = reader.Has("prompt") + reader.Has("messages") + reader.Has("content");
  if (inputs != 1) return BadField("prompt", "exactly one of prompt, messages and content is required");

  DT_ASSIGN_OR_RETURN(const bool add_generation_prompt, reader.Bool("add_generation_prompt", true));
  if (const Json* messages = reader.Find("messages")) {
    if (!model.chat) return BadField("messages", "this model has no chat template; send a prompt");
    ChatPrompt chat;
    DT_ASSIGN_OR_RETURN(chat.messages, ParseMessages(*messages));
    chat.add_generation_prompt = add_generation_prompt;
    DT_RETURN_IF_ERROR(ParseTools(body, model, /*with_format=*/false, chat.tools).status());
    request.input = std::move(chat);
    request.add_special = false;  // the template writes them
  } else {
    const char* name = reader.Has("prompt") ? "prompt" : "content";
    const Json& text = *reader.Find(name);
    if (!text.is_string()) return BadField(name, "must be a string, not ", Describe(text));
    request.input = text.get_ref<const std::string&>();
    request.add_special = reader.Has("prompt");
  }
  DT_ASSIGN_OR_RETURN(request.add_special, reader.Bool("add_special", request.add_special));
  DT_ASSIGN_OR_RETURN(request.add_special, reader.Bool("add_special_tokens", request.add_special));
  DT_ASSIGN_OR_RETURN(request.parse_special, reader.Bool("parse_special", true));
  DT_ASSIGN_OR_RETURN(request.with_pieces, reader.Bool("with_pieces", false));
  DT_ASSIGN_OR_RETURN(request.return_token_strs, reader.Bool("return_token_strs", false));
  return request;
}

absl::StatusOr<DetokenizeRequest> ParseDetokenizeRequest(const Json& body, const ServedModel& model) {
  DT_RETURN_IF_ERROR(RequireObject(body));
  const FieldReader reader(body);
  DetokenizeRequest request;
  DT_ASSIGN_OR_RETURN(request.model, ParseModelName(reader, model));
  if (model.tokenizer == nullptr) return BadField("tokens", "this model has no tokenizer");
  DT_ASSIGN_OR_RETURN(auto tokens, reader.TokenIds("tokens", 1'000'000, model.vocab_size));
  if (!tokens) return BadField("tokens", "is required: an array of token ids");
  request.tokens = *std::move(tokens);
  return request;
}

}  // namespace dovetail::server
