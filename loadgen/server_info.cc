#include "loadgen/server_info.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_join.h"

namespace dovetail::loadgen {
namespace {

using nlohmann::json;

constexpr size_t kWordsAsked = 200;

absl::Status NotUsable(const http_client::HttpRequest& request, const http_client::HttpClient::Answer& answer) {
  return absl::UnavailableError(absl::StrCat(request.target, ": HTTP ", answer.status, ": ", ErrorText(answer.body)));
}

}  // namespace

absl::StatusOr<ServedModel> AskForModel(http_client::HttpClient& client, const Headers& headers,
                                        const std::string& wanted) {
  http_client::HttpRequest request;
  request.method = "GET";
  request.target = "/v1/models";
  request.headers = headers;
  DT_ASSIGN_OR_RETURN(const http_client::HttpClient::Answer answer, client.Fetch(request));
  if (answer.status != 200)
    return FailedPrecondition(request.target, ": HTTP ", answer.status, ": ", ErrorText(answer.body));
  const json parsed = json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
  const auto data = parsed.is_object() ? parsed.find("data") : parsed.end();
  if (!parsed.is_object() || data == parsed.end() || !data->is_array() || data->empty())
    return FailedPrecondition("/v1/models: lists no model");
  std::vector<std::string> names;
  for (const json& model : *data) {
    if (!model.is_object() || !model.contains("id") || !model["id"].is_string()) continue;
    names.push_back(model["id"].get<std::string>());
    if (!wanted.empty() && names.back() != wanted) continue;
    const auto length = model.find("max_model_len");
    const bool said = length != model.end() && length->is_number_integer();
    return ServedModel{names.back(), said ? std::max<int64_t>(0, length->get<int64_t>()) : 0};
  }
  return NotFound("'", wanted, "' is not served; /v1/models lists ", absl::StrJoin(names, ", "),
                  "; --served-model-name gives the name in requests");
}

absl::StatusOr<int64_t> ServerTokenCounter::Count(std::string_view text) {
  http_client::HttpRequest request;
  request.target = "/tokenize";
  request.headers = headers_;
  request.headers.emplace_back("Content-Type", "application/json");
  request.body = json{{"model", model_}, {"prompt", text}, {"add_special_tokens", true}}.dump(
      -1, ' ', false, json::error_handler_t::replace);
  DT_ASSIGN_OR_RETURN(const http_client::HttpClient::Answer answer, client_.Fetch(request));
  if (answer.status != 200) return NotUsable(request, answer);
  const json parsed = json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_object() && parsed.contains("count") && parsed["count"].is_number_integer())
    return parsed["count"].get<int64_t>();
  if (parsed.is_object() && parsed.contains("tokens") && parsed["tokens"].is_array())
    return static_cast<int64_t>(parsed["tokens"].size());
  return absl::UnavailableError("/tokenize: the answer has neither count nor tokens");
}

absl::StatusOr<double> TokensPerWordByUsage(http_client::HttpClient& client, const ApiOptions& api) {
  const auto& words = CommonWords();
  const auto some = [&](size_t count) {
    return absl::StrJoin(words.begin(), words.begin() + static_cast<ptrdiff_t>(count), " ");
  };
  const auto tokens_of = [&](const std::string& text) -> absl::StatusOr<int64_t> {
    http_client::HttpRequest request = MakeRequest(api, {.prompt = text, .output_len = 1});
    json body = json::parse(request.body);
    body["stream"] = false;
    body.erase("stream_options");
    request.body = body.dump();
    DT_ASSIGN_OR_RETURN(const http_client::HttpClient::Answer answer, client.Fetch(request));
    if (answer.status != 200) return NotUsable(request, answer);
    const json parsed = json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    const json::json_pointer place("/usage/prompt_tokens");
    if (!parsed.is_object() || !parsed.contains(place) || !parsed[place].is_number_integer())
      return absl::UnavailableError(absl::StrCat(request.target, ": the answer has no usage.prompt_tokens"));
    return parsed[place].get<int64_t>();
  };
  DT_ASSIGN_OR_RETURN(const int64_t few, tokens_of(some(kWordsAsked / 2)));
  DT_ASSIGN_OR_RETURN(const int64_t more, tokens_of(some(kWordsAsked)));
  if (more <= few)
    return absl::UnavailableError(absl::StrCat("usage.prompt_tokens is ", few, " for ", kWordsAsked / 2, " words and ",
                                               more, " for ", kWordsAsked));
  return static_cast<double>(more - few) / (kWordsAsked / 2);
}

}  // namespace dovetail::loadgen
