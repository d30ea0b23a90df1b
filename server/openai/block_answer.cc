#include "server/openai/block_answer.h"

#include <utility>

namespace dovetail::server {

std::string BlockAnswer::Event(std::string_view type, const Json& data) {
  std::string frame = "event: ";
  frame += type;
  frame += "\ndata: ";
  frame += Dump(data);
  frame += "\n\n";
  return frame;
}

void BlockAnswer::Close(std::string& frames) {
  if (open_ && spec_.stream) frames += OnBlockEnds(blocks_.back());
  open_ = false;
}

void BlockAnswer::Open(AnswerBlock::Kind kind, const AnswerPiece& piece, std::string& frames) {
  Close(frames);
  AnswerBlock block{
      .kind = kind, .index = static_cast<int>(blocks_.size()), .call_id = "", .name = "", .text = "", .cut_off = false};
  if (kind == AnswerBlock::Kind::kCall) {
    const int call = calls_++;
    block.call_id = piece.id.empty() ? CallId(spec_.answer, /*choice=*/0, call) : piece.id;
    block.name = piece.text;
  }
  blocks_.push_back(std::move(block));
  open_ = true;
  if (spec_.stream) frames += OnBlockBegins(blocks_.back());
}

void BlockAnswer::Grow(AnswerBlock::Kind kind, const AnswerPiece& piece, std::string& frames) {
  if (!open_ || blocks_.back().kind != kind) Open(kind, piece, frames);
  blocks_.back().text += piece.text;
  if (spec_.stream) frames += OnText(blocks_.back(), piece.text);
}

std::string BlockAnswer::Add(const Choice::Delta& delta) {
  std::string frames;
  if (delta.counted == 0 && !delta.finished) return frames;
  if (!std::exchange(begun_, true) && spec_.stream) frames += OnBegin();
  if (!delta.text.empty()) Grow(AnswerBlock::Kind::kText, {AnswerPiece::Kind::kContent, delta.text, ""}, frames);
  for (const AnswerPiece& piece : delta.pieces.all()) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent: Grow(AnswerBlock::Kind::kText, piece, frames); break;
      case AnswerPiece::Kind::kReasoning: Grow(AnswerBlock::Kind::kThought, piece, frames); break;
      case AnswerPiece::Kind::kCallBegins: Open(AnswerBlock::Kind::kCall, piece, frames); break;
      case AnswerPiece::Kind::kArguments: Grow(AnswerBlock::Kind::kCall, piece, frames); break;
      case AnswerPiece::Kind::kCallEnds: Close(frames); break;
    }
  }
  return frames;
}

std::string BlockAnswer::Finish(const AnswerEnd& end) {
  end_ = end;
  if (open_) blocks_.back().cut_off = cut_off();
  std::string frames;
  Close(frames);
  if (spec_.stream) frames += OnEnd();
  return frames;
}

std::string BlockAnswer::Fail(const absl::Status& why) { return spec_.stream ? OnFailure(why) : ""; }

}  // namespace dovetail::server
