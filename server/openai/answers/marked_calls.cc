#include "server/openai/answers/marked_calls.h"

#include <algorithm>
#include <utility>

#include "server/openai/answers/white_space.h"

namespace dovetail::server {

using Kind = AnswerPiece::Kind;

MarkedCalls::MarkedCalls(std::unique_ptr<CallSyntax> syntax)
    : syntax_(std::move(syntax)),
      markers_(syntax_->markers()),
      state_(syntax_->begins_bare() ? State::kBare : State::kContent) {}

void MarkedCalls::Push(std::string_view text, AnswerPieces& out) {
  held_ += text;
  Run(/*last=*/false, out);
}

void MarkedCalls::Finish(AnswerPieces& out) { Run(/*last=*/true, out); }

void MarkedCalls::Run(bool last, AnswerPieces& out) {
  for (bool again = true; again;) {
    switch (state_) {
      case State::kContent: again = Content(last, out); break;
      case State::kArguments: again = Arguments(last, out); break;
      case State::kTail: again = Tail(last); break;
      default: again = Head(last, out);
    }
  }
}

// White space before a marker belongs to the call; white space behind the last call is dropped.
bool MarkedCalls::Content(bool last, AnswerPieces& out) {
  size_t at = std::string::npos;
  for (size_t i = 0; i < markers_.size(); ++i) {
    const size_t found = held_.find(markers_[i]);
    if (found >= at) continue;
    at = found;
    marker_ = i;
  }
  if (at != std::string::npos) {
    const size_t kept = BeforeWhiteSpace(std::string_view(held_).substr(0, at));
    out.Content(std::string_view(held_).substr(0, kept));
    Drop(kept);
    marker_end_ = at - kept + markers_[marker_].size();
    state_ = State::kMarked;
    return true;
  }
  size_t decided = held_.size();
  if (!last) {
    size_t partial = 0;
    for (const std::string& marker : markers_) partial = std::max(partial, PartialMarker(held_, marker));
    decided = BeforeWhiteSpace(std::string_view(held_).substr(0, held_.size() - partial));
  } else if (called_ && LengthTrimmed(held_) == 0) {
    held_.clear();
    return false;
  }
  out.Content(std::string_view(held_).substr(0, decided));
  Drop(decided);
  return false;
}

bool MarkedCalls::Head(bool last, AnswerPieces& out) {
  const CallSyntax::Place place = state_ == State::kBare     ? CallSyntax::Place::kBare
                                  : state_ == State::kMarked ? CallSyntax::Place::kMarked
                                                             : CallSyntax::Place::kNext;
  const size_t skipped = place == CallSyntax::Place::kMarked ? marker_end_ : 0;
  const std::string_view text = std::string_view(held_).substr(skipped);
  Cursor cursor(text.substr(0, kMaxUndecided), last || text.size() > kMaxUndecided);
  CallHead head;
  syntax_->Head(cursor, place, marker_, head);
  if (cursor.ok()) {
    Begin(head, skipped + cursor.at(), out);
    return true;
  }
  if (cursor.found() == Found::kMore) return false;
  out.Content(std::string_view(held_).substr(0, skipped));
  Drop(skipped);
  state_ = State::kContent;
  return true;
}

void MarkedCalls::Begin(const CallHead& head, size_t read, AnswerPieces& out) {
  Drop(read);
  called_ = true;
  out.Add(Kind::kCallBegins, head.name, head.id);
  if (!head.arguments) {
    arguments_ = syntax_->Arguments(head);
    state_ = State::kArguments;
    return;
  }
  out.Add(Kind::kArguments, *head.arguments);
  out.Add(Kind::kCallEnds, "");
  state_ = State::kTail;
}

bool MarkedCalls::Arguments(bool last, AnswerPieces& out) {
  std::string json;
  Drop(arguments_->Read(held_, last, json));
  out.Add(Kind::kArguments, json);
  if (!arguments_->done() && !last) return false;
  out.Add(Kind::kCallEnds, "");
  arguments_.reset();
  state_ = State::kTail;
  return true;
}

// A tail that the end of the answer cuts off says nothing.
bool MarkedCalls::Tail(bool last) {
  Cursor cursor(std::string_view(held_).substr(0, kMaxUndecided), held_.size() > kMaxUndecided);
  const bool another = syntax_->Tail(cursor);
  if (cursor.found() == Found::kMore) {
    if (!last) return false;
    held_.clear();
  }
  Drop(cursor.ok() ? cursor.at() : std::min(cursor.committed(), held_.size()));
  state_ = cursor.ok() && another ? State::kNext : State::kContent;
  return true;
}

}  // namespace dovetail::server
