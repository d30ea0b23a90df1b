#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "server/openai/answer.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

using server::AnswerPiece;
using server::AnswerPieces;

std::vector<AnswerPiece> Read(const server::AnswerSpec& spec, std::string_view text, size_t piece) {
  const auto parser = server::MakeAnswerParser(spec);
  AnswerPieces pieces;
  for (size_t i = 0; i < text.size(); i += piece) parser->Push(text.substr(i, piece), pieces);
  parser->Finish(pieces);
  return pieces.all();
}

}  // namespace

// The first byte chooses the formats, the rest is an answer: taken apart whole and byte by byte it gives the same, each
// call ends before the next begins, and arguments stand within calls.
void FuzzAnswer(const uint8_t* data, size_t size) {
  static const std::vector<std::string> calls = server::CallFormatNames(), thoughts = server::ThoughtFormatNames();
  if (size == 0) return;
  server::AnswerSpec spec;
  spec.calls = server::FindCallFormat(calls[data[0] % calls.size()]);
  if (data[0] >= 128) spec.thoughts = server::FindThoughtFormat(thoughts[data[0] / 16 % thoughts.size()]);
  spec.thought_begun = data[0] % 2 == 0;
  spec.tools = {{"f", server::Json{{"properties", {{"a", {{"type", "string"}}}}}}}, {"g", server::Json::object()}};
  std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) >= 0x80; }, '?');  // whole characters
  const auto whole = Read(spec, text, text.size() + 1), bytes = Read(spec, text, 1);
  DT_CHECK(whole.size() == bytes.size());
  bool open = false;
  for (size_t i = 0; i < whole.size(); ++i) {
    DT_CHECK(whole[i].kind == bytes[i].kind && whole[i].text == bytes[i].text && whole[i].id == bytes[i].id, text);
    const bool begins = whole[i].kind == AnswerPiece::Kind::kCallBegins;
    DT_CHECK(open == (whole[i].kind == AnswerPiece::Kind::kArguments || whole[i].kind == AnswerPiece::Kind::kCallEnds));
    if (begins) open = true;
    if (whole[i].kind == AnswerPiece::Kind::kCallEnds) open = false;
  }
  DT_CHECK(!open);
}

}  // namespace dovetail::fuzz
