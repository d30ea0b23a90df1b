#include "server/http/openapi.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/http/routes.h"
#include "server/openai/json.h"
#include "server/openai/parameters.h"

namespace dovetail::server {
namespace {

// What an operation is for, and the schema of its body.
struct Operation {
  RouteId id;
  const char* summary;
  const char* body = "";  // of a POST
  bool streams = false;
  const char* answer = "application/json";
};

constexpr Operation kOperations[] = {
    {RouteId::kPage, "The built-in page", "", false, "text/html"},
    {RouteId::kDocs, "This description, to be read", "", false, "text/html"},
    {RouteId::kOpenApi, "This description"},
    {RouteId::kModels, "The names of the model that is served"},
    {RouteId::kModel, "One of them"},
    {RouteId::kCompletions, "Goes on from a prompt", "Completion", true},
    {RouteId::kChat, "Answers a conversation", "Chat", true},
    {RouteId::kResponses, "Answers a conversation: OpenAI's Responses API; nothing is stored", "Responses", true},
    {RouteId::kMessages, "Answers a conversation: Anthropic's Messages API", "Messages", true},
    {RouteId::kCountTokens, "How many tokens the same request of /v1/messages has", "CountTokens"},
    {RouteId::kLlama, "Goes on from a prompt, in llama-server's own form", "Llama", true},
    {RouteId::kInfill, "Fills in between two texts, in llama-server's own form", "Infill", true},
    {RouteId::kEmbeddings, "A vector of each text", "Embedding"},
    {RouteId::kLlamaEmbeddings, "A vector of each text, in llama-server's own form", "LlamaEmbedding"},
    {RouteId::kApplyTemplate, "The prompt that the chat template makes of a conversation", "ApplyTemplate"},
    {RouteId::kProps, "The model's properties, as llama-server has them"},
    {RouteId::kSlots, "What may run at once, as llama-server's slots"},
    {RouteId::kTokenize, "The tokens of a text or a conversation", "Tokenize"},
    {RouteId::kDetokenize, "The text of tokens", "Detokenize"},
    {RouteId::kTokenizerInfo, "Special tokens and sizes of the tokenizer"},
    {RouteId::kHealth, "Whether the engine makes progress"},
    {RouteId::kLive, "Whether this process answers"},
    {RouteId::kReady, "Whether requests are taken now"},
    {RouteId::kVersion, "The version of this server"},
    {RouteId::kMetrics, "Prometheus metrics", "", false, "text/plain"},
};

const Operation& OperationOf(RouteId id) {
  const auto found = std::find_if(std::begin(kOperations), std::end(kOperations),
                                  [&](const Operation& operation) { return operation.id == id; });
  DT_CHECK(found != std::end(kOperations), "a route without an operation");
  return *found;
}

// ---- schemas; a null is read as an absent field ----

Json Type(const char* type) { return {{"type", Json::array({type, "null"})}}; }
Json ArrayOf(Json items) { return {{"type", Json::array({"array", "null"})}, {"items", std::move(items)}}; }
Json TextOr(Json other) { return {{"anyOf", Json::array({Json{{"type", "string"}}, std::move(other)})}}; }

void Add(Json& properties, std::initializer_list<const char*> names, const Json& schema) {
  for (const char* name : names) properties[name] = schema;
}

// The rules of these names, or of all but these.
void AddRanges(Json& properties, std::initializer_list<std::string_view> names, bool all_but) {
  const auto wanted = [&](std::string_view name) {
    return (std::find(names.begin(), names.end(), name) != names.end()) != all_but;
  };
  const auto add = [&](const auto& rule, const char* type) {
    if (!wanted(rule.name)) return;
    Json schema = Type(type);
    schema["minimum"] = rule.min;
    schema["maximum"] = rule.max;
    properties[std::string(rule.name)] = std::move(schema);
  };
  for (const IntRule& rule : kIntRules) add(rule, "integer");
  for (const FloatRule& rule : kFloatRules)
    if (rule.name != "logit_bias") add(rule, "number");
}

Json Object(Json properties, std::initializer_list<const char*> required) {
  Json schema = {{"type", "object"}, {"properties", std::move(properties)}};
  if (required.size() > 0) schema["required"] = Json::array();
  for (const char* name : required) schema["required"].push_back(name);
  return schema;
}

Json Messages() {
  return {{"type", "array"},
          {"minItems", 1},
          {"maxItems", kMaxMessages},
          {"items", Object({{"role", {{"type", "string"}}}, {"content", Json::object()}}, {"role"})}};
}

// What completions and chats share.
Json Generation() {
  Json properties = Json::object();
  properties["model"] = Type("string");
  AddRanges(properties, {"best_of", "logprobs", "top_logprobs", "dimensions", "embd_normalize"}, /*all_but=*/true);
  Add(properties,
      {"stream", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
       "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids", "return_progress", "cache_prompt",
       "store"},
      Type("boolean"));
  Add(properties,
      {"user", "safety_identifier", "prompt_cache_key", "request_id", "session_id", "service_tier", "cache_salt",
       "guided_regex", "guided_grammar", "grammar"},
      Type("string"));
  Add(properties, {"stream_options", "logit_bias", "metadata", "response_format", "structured_outputs"},
      Type("object"));
  Add(properties, {"stop_token_ids", "allowed_token_ids"}, ArrayOf({{"type", "integer"}, {"minimum", 0}}));
  properties["guided_choice"] = ArrayOf({{"type", "string"}});
  Add(properties, {"guided_json", "json_schema"}, Json::object());
  for (const char* name : {"stop", "bad_words"}) properties[name] = TextOr(ArrayOf({{"type", "string"}}));
  return properties;
}

Json Completion() {
  Json properties = Generation();
  AddRanges(properties, {"best_of", "logprobs"}, /*all_but=*/false);
  properties["echo"] = Type("boolean");
  properties["prompt"] = TextOr({{"type", "array"}, {"minItems", 1}});
  return Object(std::move(properties), {"prompt"});
}

Json Chat() {
  Json properties = Generation();
  AddRanges(properties, {"top_logprobs"}, /*all_but=*/false);
  Add(properties,
      {"logprobs", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "include_reasoning",
       "enable_thinking"},
      Type("boolean"));
  properties["reasoning_effort"] = Type("string");
  properties["chat_template_kwargs"] = Type("object");
  properties["tools"] = ArrayOf({{"type", "object"}});
  properties["tool_choice"] = Json::object();
  properties["messages"] = Messages();
  return Object(std::move(properties), {"messages"});
}

Json AnthropicMessages(bool counts) {
  Json properties = {{"model", Type("string")},         {"messages", Messages()},
                     {"system", Json::object()},        {"tools", ArrayOf({{"type", "object"}})},
                     {"tool_choice", Type("object")},   {"thinking", Type("object")},
                     {"output_config", Type("object")}, {"stop_sequences", TextOr(ArrayOf({{"type", "string"}}))},
                     {"stream", Type("boolean")}};
  AddRanges(properties, {"max_tokens", "temperature", "top_p", "top_k"}, /*all_but=*/false);
  return counts ? Object(std::move(properties), {"messages"})
                : Object(std::move(properties), {"messages", "max_tokens"});
}

// llama-server's own: of /completion, or of /infill.
Json Llama(bool fills_in) {
  Json properties = Generation();
  for (const char* taken : {"n", "prompt_logprobs"}) properties.erase(taken);
  Add(properties, {"return_tokens", "timings_per_token"}, Type("boolean"));
  Json slot = Type("integer");
  slot.update({{"minimum", -1}, {"maximum", kInt32Max}});
  Add(properties, {"id_slot", "n_keep"}, slot);
  slot.update({{"minimum", 0}, {"maximum", kMaxLogprobs}});
  properties["n_probs"] = slot;
  properties["logit_bias"] = Json::object();
  properties["prompt"] = fills_in ? Type("string") : TextOr({{"type", "array"}, {"minItems", 1}});
  if (!fills_in) return Object(std::move(properties), {"prompt"});
  Add(properties, {"input_prefix", "input_suffix"}, Type("string"));
  properties["input_extra"] = ArrayOf({{"type", "object"}});
  return Object(std::move(properties), {});
}

// Of /v1/embeddings, or of llama-server's own.
Json Embedding(bool llama) {
  Json properties = {
      {"model", Type("string")}, {"add_special_tokens", Type("boolean")}, {"cache_salt", Type("string")}};
  AddRanges(properties, {"truncate_prompt_tokens", "priority"}, /*all_but=*/false);
  for (const char* input : {"input", "content"})
    if (llama || input == std::string_view("input")) properties[input] = TextOr({{"type", "array"}, {"minItems", 1}});
  if (llama) {
    properties["embd_normalize"] = {{"enum", Json::array({-1, 2, nullptr})}};
    return Object(std::move(properties), {});
  }
  properties["user"] = Type("string");
  properties["encoding_format"] = {{"enum", Json::array({"float", "base64", nullptr})}};
  AddRanges(properties, {"dimensions"}, /*all_but=*/false);
  return Object(std::move(properties), {"input"});
}

Json Schemas() {
  Json tokenize = {{"model", Type("string")}, {"prompt", Type("string")}, {"content", Type("string")}};
  tokenize["messages"] = ArrayOf({{"type", "object"}});
  Add(tokenize,
      {"add_special", "add_special_tokens", "parse_special", "with_pieces", "return_token_strs",
       "add_generation_prompt"},
      Type("boolean"));
  Json conversation = {{"model", Type("string")}, {"add_generation_prompt", Type("boolean")}};
  conversation["tools"] = ArrayOf({{"type", "object"}});
  conversation["messages"] = Messages();
  Json responses = {{"model", Type("string")},        {"input", TextOr({{"type", "array"}})},
                    {"instructions", Type("string")}, {"text", Type("object")},
                    {"reasoning", Type("object")},    {"tools", ArrayOf({{"type", "object"}})},
                    {"tool_choice", Json::object()},  {"stream", Type("boolean")}};
  responses["max_output_tokens"] = {{"type", Json::array({"integer", "null"})}, {"minimum", 1}};
  AddRanges(responses, {"temperature", "top_p"}, /*all_but=*/false);
  const Json text = {{"type", "string"}};
  const Json error = {{"message", text}, {"type", text}, {"param", Type("string")}, {"code", Type("string")}};
  return {{"Completion", Completion()},
          {"Chat", Chat()},
          {"Responses", Object(std::move(responses), {"input"})},
          {"Messages", AnthropicMessages(/*counts=*/false)},
          {"CountTokens", AnthropicMessages(/*counts=*/true)},
          {"Llama", Llama(/*fills_in=*/false)},
          {"Infill", Llama(/*fills_in=*/true)},
          {"Embedding", Embedding(/*llama=*/false)},
          {"LlamaEmbedding", Embedding(/*llama=*/true)},
          {"ApplyTemplate", Object(std::move(conversation), {"messages"})},
          {"Tokenize", Object(std::move(tokenize), {})},
          {"Detokenize", Object({{"model", Type("string")}, {"tokens", {{"type", "array"}}}}, {"tokens"})},
          {"Error", Object({{"error", Object(error, {"message", "type", "param", "code"})}}, {"error"})}};
}

// ---- operations ----

Json Answers(const Operation& operation, const Route& route) {
  Json content = {{operation.answer, Json::object()}};
  if (operation.streams) content["text/event-stream"] = Json::object();
  const Json error = {{"application/json", {{"schema", {{"$ref", "#/components/schemas/Error"}}}}}};
  const auto failure = [&](const char* what) { return Json{{"description", what}, {"content", error}}; };
  Json answers = {{"200", {{"description", "The answer"}, {"content", std::move(content)}}}};
  if (route.scope != Scope::kOpen) answers["401"] = failure("No key, or a wrong one");
  if (route.method == "POST") answers["400"] = failure("A field is wrong; param names it");
  if (route.takes_rest()) answers["404"] = failure("There is no such model");
  answers["503"] = failure("Loading, draining or full; Retry-After says when to come again");
  return answers;
}

Json OperationJson(const Route& route) {
  const Operation& operation = OperationOf(route.id);
  std::string id = absl::StrCat(absl::AsciiStrToLower(std::string(route.method)), std::string(route.path));
  std::replace_if(
      id.begin(), id.end(), [](char c) { return !absl::ascii_isalnum(c); }, '_');
  Json json = {{"operationId", id}, {"summary", operation.summary}, {"responses", Answers(operation, route)}};
  if (*operation.body != 0)
    json["requestBody"] = {
        {"required", true},
        {"content",
         {{"application/json", {{"schema", {{"$ref", absl::StrCat("#/components/schemas/", operation.body)}}}}}}}};
  if (route.scope == Scope::kOpen) json["security"] = Json::array();
  if (route.takes_rest())
    json["parameters"] =
        Json::array({{{"name", "model"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}}});
  return json;
}

}  // namespace

std::set<std::string> FieldsOf(RouteId route) {
  std::set<std::string> fields;
  const std::string body = OperationOf(route).body;
  if (body.empty()) return fields;
  const Json schemas = Schemas();
  for (const auto& [name, schema] : schemas[body]["properties"].items()) fields.insert(name);
  return fields;
}

std::string OpenApiText(const std::string& version) {
  Json paths = Json::object();
  for (const Route& route : Routes()) {
    std::string path(route.path);
    if (route.takes_rest()) path += "{model}";
    paths[path][absl::AsciiStrToLower(std::string(route.method))] = OperationJson(route);
  }
  const Json keys = {{"bearer", {{"type", "http"}, {"scheme", "bearer"}}},
                     {"header", {{"type", "apiKey"}, {"in", "header"}, {"name", "X-Api-Key"}}}};
  return Dump({{"openapi", "3.1.0"},
               {"info", {{"title", "Dovetail"}, {"version", version}}},
               {"security", Json::array({{{"bearer", Json::array()}}, {{"header", Json::array()}}, Json::object()})},
               {"paths", std::move(paths)},
               {"components", {{"schemas", Schemas()}, {"securitySchemes", keys}}}});
}

}  // namespace dovetail::server
