// The messages of gpt-oss. The prompt ends with <|start|>assistant; then come, each ended by <|end|>, <|call|> or
// <|return|>:
//   <|channel|>analysis<|message|>a thought
//   <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}     a call; "to=" may stand before
//                                                                              the channel
//   <|channel|>final<|message|>the answer
// with <|start|>assistant before every one but the first.
#include <algorithm>
#include <array>

#include "server/openai/answers/call_formats.h"
#include "server/openai/answers/cursor.h"
#include "server/openai/answers/grammar_parts.h"

namespace dovetail::server {
namespace {

using Kind = AnswerPiece::Kind;

constexpr std::string_view kMessage = "<|message|>", kChannel = "<|channel|>", kFunctions = "to=functions.";
constexpr std::array<std::string_view, 3> kEnds = {"<|end|>", "<|call|>", "<|return|>"};
constexpr std::array<std::string_view, 2> kNext = {"<|start|>", kChannel};  // a message without an end
constexpr size_t kMaxHeader = 512;

class Harmony : public AnswerParser {
 public:
  void Push(std::string_view text, AnswerPieces& out) override {
    held_ += text;
    while (state_ == State::kHeader ? Header(/*last=*/false, out) : Body(/*last=*/false, out)) {
    }
  }
  void Finish(AnswerPieces& out) override {
    while (state_ == State::kHeader ? Header(/*last=*/true, out) : Body(/*last=*/true, out)) {
    }
  }
  bool thinking() const override { return kind_ == Kind::kReasoning; }

 private:
  enum class State { kHeader, kBody };

  // Up to <|message|>. Without it, or with something else before it, the text is content.
  bool Header(bool last, AnswerPieces& out) {
    if (held_.empty()) return false;
    Cursor cursor(std::string_view(held_).substr(0, kMaxHeader), last || held_.size() > kMaxHeader);
    const std::string header = Begin(cursor);
    if (cursor.found() == Found::kMore) return false;
    state_ = State::kBody;
    kind_ = Kind::kContent;
    if (!cursor.ok()) {
      for (const std::string_view mark : kNext) {
        if (!held_.starts_with(mark)) continue;
        out.Content(mark);
        held_.erase(0, mark.size());
      }
      return true;
    }
    held_.erase(0, cursor.at());
    Open(header, out);
    return true;
  }

  static std::string Begin(Cursor& cursor) {
    cursor.Spaces();
    const bool begins = cursor.Sees(kNext[0]) || cursor.Sees(kChannel) || cursor.Sees("to=") || cursor.Sees(kMessage);
    if (!begins) cursor.Refuse();
    return cursor.Until(kMessage);
  }

  void Open(const std::string& header, AnswerPieces& out) {
    if (const size_t to = header.find(kFunctions); to != std::string::npos) {
      const std::string_view name = std::string_view(header).substr(to + kFunctions.size());
      const std::string function(name.substr(0, name.find_first_of(" <\t\n")));
      if (IsFunctionName(function)) {
        kind_ = Kind::kArguments;
        out.Add(Kind::kCallBegins, function);
        return;
      }
    }
    const size_t channel = header.find(kChannel);
    if (channel != std::string::npos &&
        std::string_view(header).substr(channel + kChannel.size()).starts_with("analysis"))
      kind_ = Kind::kReasoning;
  }

  bool Body(bool last, AnswerPieces& out) {
    size_t end = std::string::npos, length = 0;
    const auto look = [&](std::string_view mark, bool part_of_it) {
      const size_t found = held_.find(mark);
      if (found >= end) return;
      end = found;
      length = part_of_it ? mark.size() : 0;
    };
    for (const std::string_view mark : kEnds) look(mark, true);
    for (const std::string_view mark : kNext) look(mark, false);
    size_t decided = std::min(end, held_.size());
    if (end == std::string::npos && !last) {
      size_t partial = 0;
      for (const std::string_view mark : kEnds) partial = std::max(partial, PartialMarker(held_, mark));
      for (const std::string_view mark : kNext) partial = std::max(partial, PartialMarker(held_, mark));
      decided -= partial;
    }
    out.Add(kind_, std::string_view(held_).substr(0, decided));
    held_.erase(0, decided + length);
    if (end == std::string::npos && !last) return false;
    if (kind_ == Kind::kArguments) out.Add(Kind::kCallEnds, "");
    kind_ = Kind::kContent;
    state_ = State::kHeader;
    return !held_.empty();
  }

  State state_ = State::kHeader;
  Kind kind_ = Kind::kContent;
  std::string held_;
};

std::unique_ptr<AnswerParser> Parser(const std::vector<Tool>&) { return std::make_unique<Harmony>(); }

// What comes before it is a thought (ThoughtGrammar). One call ends the answer, as <|call|> does.
Json Grammar(const std::vector<Tool>& tools, bool, const MarkSpeller& mark) {
  Json::array_t calls;
  for (const Tool& tool : tools)
    calls.push_back(
        parts::Sequence({mark(kChannel), parts::Text("commentary to=functions." + tool.name + " "),
                         mark("<|constrain|>"), parts::Text("json"), mark(kMessage), parts::Arguments(tool)}));
  return parts::OneOf(std::move(calls));
}

}  // namespace

const CallFormat& OpenAiFormat() {
  static const CallFormat format{
      "openai",
      "",
      {"<|start|>", kChannel, kMessage, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"},
      Parser,
      Grammar};
  return format;
}

}  // namespace dovetail::server
