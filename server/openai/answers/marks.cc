#include "server/openai/answers/marks.h"

#include <algorithm>
#include <optional>

#include "model/tokenizer/tokenizer.h"
#include "server/openai/answers/grammar_parts.h"

namespace dovetail::server {
namespace {

std::optional<TokenId> SpecialToken(const ServedModel& model, std::string_view mark) {
  if (model.tokenizer == nullptr || mark.empty()) return std::nullopt;
  const auto id = model.tokenizer->TokenToId(mark);
  return id && model.tokenizer->IsSpecial(*id) ? id : std::nullopt;
}

}  // namespace

MarkSpeller MarksOf(const ServedModel& model) {
  return [&model](std::string_view mark) {
    const auto id = SpecialToken(model, mark);
    return id ? Json{{"type", "token"}, {"token", *id}} : parts::Text(mark);
  };
}

std::vector<TokenId> MarkTokens(const ServedModel& model, const CallFormat* calls, const ThoughtFormat* thoughts) {
  std::vector<std::string_view> marks;
  const auto add = [&](const std::vector<std::string_view>& more) {
    marks.insert(marks.end(), more.begin(), more.end());
  };
  if (calls != nullptr) add(calls->marks);
  if (thoughts != nullptr)
    add(thoughts->open.empty() ? OpenAiFormat().marks : std::vector<std::string_view>{thoughts->open, thoughts->close});
  std::vector<TokenId> ids;
  for (const std::string_view mark : marks)
    if (const auto id = SpecialToken(model, mark)) ids.push_back(*id);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace dovetail::server
