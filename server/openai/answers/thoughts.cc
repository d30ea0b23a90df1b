#include "server/openai/answers/thoughts.h"

#include <algorithm>
#include <utility>

#include "server/openai/answers/cursor.h"
#include "server/openai/answers/white_space.h"

namespace dovetail::server {
namespace {

constexpr ThoughtFormat kFormats[] = {{"think", "<think>", "</think>"},
                                      {"mistral", "[THINK]", "[/THINK]"},
                                      {"seed_oss", "<seed:think>", "</seed:think>"},
                                      {"openai", "", ""}};

// As other servers call them.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"deepseek_r1", "think"}, {"deepseek_v3", "think"}, {"qwen3", "think"},
    {"minimax_m2", "think"},  {"glm45", "think"},       {"openai_gptoss", "openai"}};

}  // namespace

const ThoughtFormat* FindThoughtFormat(std::string_view name) {
  for (const auto& [alias, format] : kAliases)
    if (name == alias) name = format;
  for (const ThoughtFormat& format : kFormats)
    if (format.name == name) return &format;
  return nullptr;
}

std::vector<std::string> ThoughtFormatNames() {
  std::vector<std::string> names;
  for (const ThoughtFormat& format : kFormats) names.emplace_back(format.name);
  return names;
}

const ThoughtFormat* ThoughtFormatOf(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (has("<|channel|>") && has("analysis")) return FindThoughtFormat("openai");
  for (const ThoughtFormat& format : kFormats)
    if (!format.open.empty() && has(format.open)) return &format;
  return nullptr;
}

ThoughtParser::ThoughtParser(const ThoughtFormat& format, bool begun, std::unique_ptr<AnswerParser> answer)
    : format_(format), answer_(std::move(answer)), state_(begun ? State::kOpened : State::kBegin) {}

void ThoughtParser::Push(std::string_view text, AnswerPieces& out) {
  held_ += text;
  Run(/*last=*/false, out);
}

void ThoughtParser::Finish(AnswerPieces& out) {
  Run(/*last=*/true, out);
  if (answer_ != nullptr) answer_->Finish(out);
}

void ThoughtParser::Run(bool last, AnswerPieces& out) {
  for (bool again = true; again;) {
    switch (state_) {
      case State::kBegin: again = Begin(last); break;
      case State::kOpened: again = SkipSpaces(State::kThought); break;
      case State::kThought: again = Thought(last, out); break;
      case State::kClosed: again = SkipSpaces(State::kAnswer); break;
      case State::kAnswer: Answer(out); again = false;
    }
  }
}

bool ThoughtParser::Begin(bool last) {
  Cursor cursor(std::string_view(held_).substr(0, kMaxUndecided), last || held_.size() > kMaxUndecided);
  cursor.Spaces();
  cursor.Literal(format_.open);
  if (cursor.found() == Found::kMore) return false;
  if (cursor.ok()) held_.erase(0, cursor.at());
  state_ = cursor.ok() ? State::kOpened : State::kAnswer;
  return true;
}

bool ThoughtParser::SkipSpaces(State next) {
  const size_t begin = std::find_if_not(held_.begin(), held_.end(), IsSpace) - held_.begin();
  held_.erase(0, begin);
  if (held_.empty()) return false;
  state_ = next;
  return true;
}

bool ThoughtParser::Thought(bool last, AnswerPieces& out) {
  const size_t end = held_.find(format_.close);
  if (end != std::string::npos) {
    out.Reasoning(std::string_view(held_).substr(0, BeforeWhiteSpace(std::string_view(held_).substr(0, end))));
    held_.erase(0, end + format_.close.size());
    state_ = State::kClosed;
    return true;
  }
  size_t decided = held_.size();
  if (!last) decided -= PartialMarker(held_, format_.close);
  decided = BeforeWhiteSpace(std::string_view(held_).substr(0, decided));
  out.Reasoning(std::string_view(held_).substr(0, decided));
  held_.erase(0, last ? held_.size() : decided);
  return false;
}

void ThoughtParser::Answer(AnswerPieces& out) {
  if (answer_ != nullptr)
    answer_->Push(held_, out);
  else
    out.Content(held_);
  held_.clear();
}

}  // namespace dovetail::server
