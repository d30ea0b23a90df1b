#include "server/openai/logprobs_json.h"

#include <algorithm>
#include <cmath>

#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"

namespace dovetail::server {
namespace {

double Finite(float logprob) {
  return std::isfinite(logprob) ? std::max(static_cast<double>(logprob), -9999.0) : -9999.0;
}

std::string Bytes(const ServedModel& model, TokenId id) {
  return model.tokenizer == nullptr ? std::string() : std::string(model.tokenizer->TokenText(id));
}

}  // namespace

// A token that is not whole characters shows U+FFFD here; `bytes` has the truth.
std::string LogprobsJson::TokenString(TokenId id) const {
  if (tokens_as_ids_ || model_.tokenizer == nullptr) return absl::StrCat("token_id:", id);
  std::string pending = Bytes(model_, id), text;
  model::DrainUtf8(pending, /*finish=*/true, text);
  return text;
}

Json LogprobsJson::Completion(std::span<const ShownLogprob> shown) const {
  Json tokens = Json::array(), logprobs = Json::array(), top = Json::array(), offsets = Json::array();
  for (const ShownLogprob& one : shown) {
    const auto& chosen = one.position.chosen;
    offsets.push_back(one.text_offset);
    if (chosen.token < 0) {
      tokens.push_back(TokenString(-1 - chosen.token));
      logprobs.push_back(nullptr);
      top.push_back(nullptr);
      continue;
    }
    tokens.push_back(TokenString(chosen.token));
    logprobs.push_back(Finite(chosen.logprob));
    Json alternatives = Json::object();
    for (const auto& other : one.position.top) alternatives[TokenString(other.token)] = Finite(other.logprob);
    alternatives[TokenString(chosen.token)] = Finite(chosen.logprob);
    top.push_back(std::move(alternatives));
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(logprobs)},
          {"top_logprobs", std::move(top)},
          {"text_offset", std::move(offsets)}};
}

Json LogprobsJson::ChatEntry(const proto::TokenLogprob& token) const {
  Json bytes = Json::array();
  for (const char c : Bytes(model_, token.token)) bytes.push_back(static_cast<uint8_t>(c));
  return {{"token", TokenString(token.token)}, {"logprob", Finite(token.logprob)}, {"bytes", std::move(bytes)}};
}

Json LogprobsJson::Chat(std::span<const ShownLogprob> shown) const {
  Json content = Json::array();
  for (const ShownLogprob& one : shown) {
    Json entry = ChatEntry(one.position.chosen);
    Json top = Json::array();
    for (const auto& other : one.position.top) top.push_back(ChatEntry(other));
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json LogprobsJson::Llama(std::span<const ShownLogprob> shown) const {
  const auto entry = [&](const proto::TokenLogprob& token) {
    Json json = {{"id", token.token}};
    json.update(ChatEntry(token));
    return json;
  };
  Json positions = Json::array();
  for (const ShownLogprob& one : shown) {
    positions.push_back(entry(one.position.chosen));
    Json& top = positions.back()["top_logprobs"] = Json::array();
    for (const auto& other : one.position.top) top.push_back(entry(other));
  }
  return positions;
}

Json LogprobsJson::Prompt(std::span<const proto::PositionLogprobs> positions, int alternatives) const {
  Json list = Json::array();
  list.push_back(nullptr);
  for (const auto& position : positions) {
    Json entry = Json::object();
    const auto add = [&](const proto::TokenLogprob& token) {
      entry[std::to_string(token.token)] = {
          {"logprob", Finite(token.logprob)}, {"rank", token.rank}, {"decoded_token", TokenString(token.token)}};
    };
    const size_t count = std::min<size_t>(position.top.size(), alternatives);
    for (size_t i = 0; i < count; ++i) add(position.top[i]);
    add(position.chosen);
    list.push_back(std::move(entry));
  }
  return list;
}

}  // namespace dovetail::server
