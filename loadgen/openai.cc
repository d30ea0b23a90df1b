#include "loadgen/openai.h"

#include <algorithm>

namespace dovetail::loadgen {
namespace {

using nlohmann::json;

constexpr size_t kMaxErrorBytes = 4096;
constexpr size_t kShownErrorBytes = 300;

// Text that a chunk adds, whatever field it is in.
std::string_view TextOf(const json& choice, Backend backend) {
  const auto text = [](const json& object, const char* name) -> std::string_view {
    const auto found = object.find(name);
    if (found == object.end() || !found->is_string()) return {};
    return found->get_ref<const std::string&>();
  };
  if (backend == Backend::kOpenai) return text(choice, "text");
  const auto delta = choice.find("delta");
  if (delta == choice.end() || !delta->is_object()) return {};
  for (const char* name : {"content", "reasoning_content", "reasoning"})
    if (const auto found = text(*delta, name); !found.empty()) return found;
  return {};
}

std::optional<int64_t> Tokens(const json& usage, const char* name) {
  const auto found = usage.find(name);
  if (found == usage.end() || !found->is_number_integer()) return std::nullopt;
  const int64_t tokens = found->get<int64_t>();
  return tokens >= 0 ? std::optional<int64_t>(tokens) : std::nullopt;
}

std::string OneLine(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  if (text.size() > kShownErrorBytes) text = absl::StrCat(text.substr(0, kShownErrorBytes), "...");
  return text;
}

}  // namespace

std::string ErrorText(const std::string& body) {
  const json parsed = json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return OneLine(body);
  const auto error = parsed.find("error");
  const json& holder = error != parsed.end() && error->is_object() ? *error : parsed;
  for (const char* name : {"message", "detail", "error"})
    if (const auto found = holder.find(name); found != holder.end() && found->is_string())
      return OneLine(found->get<std::string>());
  return OneLine(body);
}

http_client::HttpRequest MakeRequest(const ApiOptions& options, const PlannedRequest& planned) {
  json body = {{"model", options.model}, {"stream", true}, {"stream_options", {{"include_usage", true}}}};
  if (options.backend == Backend::kOpenai) {
    body["prompt"] = planned.prompt;
    body["max_tokens"] = planned.output_len;
    body["repetition_penalty"] = 1.0;
    if (options.logprobs.has_value()) body["logprobs"] = *options.logprobs;
  } else {
    body["messages"] = json::array({{{"role", "user"}, {"content", planned.prompt}}});
    body["max_completion_tokens"] = planned.output_len;
    if (options.logprobs.has_value()) {
      body["logprobs"] = true;
      body["top_logprobs"] = *options.logprobs;
    }
  }
  if (options.ignore_eos) body["ignore_eos"] = true;
  body.update(options.extra_body);
  http_client::HttpRequest request;
  request.target = options.endpoint;
  request.headers = options.headers;
  request.headers.emplace_back("Content-Type", "application/json");
  if (!planned.id.empty()) request.headers.emplace_back("x-request-id", planned.id);
  request.body = body.dump(-1, ' ', false, json::error_handler_t::replace);
  return request;
}

AnswerReader::AnswerReader(Backend backend, const PlannedRequest& planned, LocalTokenCounter* tokenizer)
    : backend_(backend), asked_tokens_(planned.output_len), tokenizer_(tokenizer) {
  record_.input_len = planned.input_len;
}

void AnswerReader::Begin(double planned_s, double now_s) {
  record_.planned_s = planned_s;
  record_.start_s = latest_s_ = now_s;
}

void AnswerReader::OnStatus(int status, const std::string& reason) {
  status_ = status;
  reason_ = reason;
}

absl::Status AnswerReader::OnBody(std::string_view bytes, double now_s) {
  if (status_ != 200) {
    error_body_.append(bytes.substr(0, kMaxErrorBytes - std::min(kMaxErrorBytes, error_body_.size())));
    return absl::OkStatus();
  }
  return events_.Add(bytes, [&](std::string_view data) { OnEvent(data, now_s); });
}

void AnswerReader::OnEvent(std::string_view data, double now_s) {
  if (done_ || !stream_error_.empty()) return;
  if (data == "[DONE]") {
    done_ = true;
    return;
  }
  const json chunk = json::parse(data, nullptr, /*allow_exceptions=*/false);
  if (!chunk.is_object()) {
    stream_error_ = absl::StrCat("a chunk of the stream is not JSON: ", OneLine(std::string(data)));
    return;
  }
  if (chunk.contains("error") && !chunk["error"].is_null()) {
    stream_error_ = absl::StrCat("the server ended the stream with an error: ", ErrorText(std::string(data)));
    return;
  }
  const auto choices = chunk.find("choices");
  if (choices != chunk.end() && choices->is_array() && !choices->empty()) OnChoices(*choices, now_s);
  const auto usage = chunk.find("usage");
  if (usage != chunk.end() && usage->is_object()) OnUsage(*usage);
  if (backend_ == Backend::kOpenaiChat) latest_s_ = now_s;
}

void AnswerReader::OnChoices(const json& choices, double now_s) {
  if (chunks_++ == 0)
    record_.ttft_s = now_s - record_.start_s;
  else
    record_.itl_s.push_back(now_s - latest_s_);
  latest_s_ = now_s;
  const json& first = choices[0];
  if (!first.is_object()) return;
  const std::string_view text = TextOf(first, backend_);
  if (!text.empty()) ++chunks_with_text_;
  record_.text.append(text);
  const auto reason = first.find("finish_reason");
  if (reason != first.end() && reason->is_string()) finished_ = true;
}

void AnswerReader::OnUsage(const json& usage) {
  if (const auto tokens = Tokens(usage, "completion_tokens"); tokens.has_value()) usage_output_ = tokens;
  if (const auto tokens = Tokens(usage, "prompt_tokens"); tokens.has_value()) usage_input_ = tokens;
}

// The tokens of the answer: what usage says, else what a tokenizer counts, else one for each chunk.
void AnswerReader::CountTokens() {
  if (usage_input_.has_value()) record_.input_len = *usage_input_;
  if (usage_output_.value_or(0) > 0) {
    record_.output_len = *usage_output_;
    return DoubtUsage();
  }
  if (usage_output_.has_value() && chunks_with_text_ > 0)
    record_.usage_doubt = absl::StrCat("completion_tokens is 0, but ", chunks_with_text_, " chunks have text");
  const auto counted = tokenizer_ != nullptr ? tokenizer_->CountAnswer(record_.text)
                                             : absl::StatusOr<int64_t>(absl::NotFoundError("no tokenizer"));
  record_.counted_by = counted.ok() ? RequestRecord::CountedBy::kTokenizer : RequestRecord::CountedBy::kChunks;
  record_.output_len = std::max<int64_t>(1, counted.ok() ? *counted : chunks_with_text_);
}

// A chunk with text holds at least one token, and an answer at most those that were asked for.
void AnswerReader::DoubtUsage() {
  if (record_.output_len > asked_tokens_)
    record_.usage_doubt = absl::StrCat("completion_tokens is ", record_.output_len, ", but ", asked_tokens_,
                                       " were the most that was asked for");
  else if (record_.output_len < chunks_with_text_)
    record_.usage_doubt =
        absl::StrCat("completion_tokens is ", record_.output_len, ", but ", chunks_with_text_, " chunks have text");
}

std::string AnswerReader::FailureOf(const absl::Status& status) const {
  if (status_ != 0 && status_ != 200) {
    const std::string text = ErrorText(error_body_);
    return absl::StrCat("HTTP ", status_, reason_.empty() ? "" : " ", reason_, text.empty() ? "" : ": ", text);
  }
  const std::string got = absl::StrCat(" after ", chunks_, chunks_ == 1 ? " chunk" : " chunks");
  if (!stream_error_.empty()) return absl::StrCat(stream_error_, got);
  if (!status.ok()) return absl::StrCat(OneLine(std::string(status.message())), status_ == 200 ? got : "");
  if (chunks_ == 0) return "the answer has no chunk with choices, so it has no TTFT";
  if (!done_ && !finished_) return absl::StrCat("the stream ended without [DONE] and without a finish_reason", got);
  return "";
}

void AnswerReader::OnEnd(const absl::Status& status) {
  record_.latency_s = latest_s_ - record_.start_s;
  // What is wrong after [DONE] takes nothing from the answer.
  record_.error = done_ && stream_error_.empty() && chunks_ > 0 ? "" : FailureOf(status);
  record_.success = record_.error.empty();
  if (chunks_ > 0) CountTokens();
}

}  // namespace dovetail::loadgen
