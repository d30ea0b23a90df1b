#include "server/http/body_decoder.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dovetail::server {
namespace {
constexpr size_t kMaxSizeLine = 256;
constexpr int kMaxSizeDigits = 8;
}  // namespace

BodyDecoder::BodyDecoder(const RequestHead& head, const BodyLimits& limits, Use use)
    : use_(use),
      max_bytes_(limits.max_bytes),
      length_limit_(limits.max_bytes),
      trailer_limits_(limits.trailers),
      body_(limits.budget) {
  if (head.chunked) {
    state_ = State::kSize;
  } else if (head.content_length.value_or(0) > 0) {
    state_ = State::kLength;
    left_ = *head.content_length;
    length_limit_ = std::min<uint64_t>(left_, max_bytes_);
    if (left_ > max_bytes_)
      Fail(413, absl::StrCat("The body has ", left_, " bytes; at most ", max_bytes_, " are allowed."));
    else if (use_ == Use::kKeep && limits.budget != nullptr && !limits.budget->HasRoom(left_))
      FailForRoom();
  }
}

void BodyDecoder::Fail(int status, std::string message) {
  if (problem_.status == 0) problem_ = {status, std::move(message)};
}

void BodyDecoder::FailForRoom() {
  Fail(503, "The bodies of other requests fill the memory that there is for them; try again shortly.");
}

size_t BodyDecoder::Consume(std::string_view bytes) {
  size_t used = 0;
  while (used < bytes.size() && !done() && problem_.status == 0) {
    if (state_ != State::kLength && state_ != State::kData) {
      TakeFramingByte(bytes[used++]);
      continue;
    }
    const size_t take = std::min<uint64_t>(left_, bytes.size() - used);
    TakePayload(bytes.substr(used, take));
    used += take;
    left_ -= take;
    if (left_ == 0) state_ = state_ == State::kLength ? State::kDone : State::kDataCr;
  }
  return used;
}

void BodyDecoder::TakePayload(std::string_view bytes) {
  payload_ += bytes.size();
  if (use_ == Use::kKeep && !body_.Append(bytes, length_limit_)) FailForRoom();
}

void BodyDecoder::EndOfSizeLine() {
  if (digits_ == 0) return Fail(400, "A chunk has no size.");
  if (payload_ + left_ > max_bytes_) return Fail(413, absl::StrCat("The body has more than ", max_bytes_, " bytes."));
  state_ = left_ == 0 ? State::kTrailerName : State::kData;
  digits_ = 0;
  line_bytes_ = 0;
}

// A line that is no field would be the next request to a reader that knows no trailers.
void BodyDecoder::TakeTrailerByte(char c) {
  const unsigned char byte = c;
  if (state_ == State::kTrailerName && line_bytes_ == 0 && c == '\r') {
    state_ = State::kLastLf;
    return;
  }
  if (++trailer_bytes_ > trailer_limits_.total_bytes)
    return Fail(431, absl::StrCat("The trailers are longer than ", trailer_limits_.total_bytes, " bytes."));
  if (++line_bytes_ > trailer_limits_.line_bytes)
    return Fail(431, absl::StrCat("A trailer line is longer than ", trailer_limits_.line_bytes, " bytes."));
  if (state_ == State::kTrailerName) {
    if (c == ':' && line_bytes_ > 1)
      state_ = State::kTrailer;
    else if (!IsTokenChar(byte))
      Fail(400, "A trailer line is not a field.");
    return;
  }
  if (c == '\r') {
    if (++trailers_ > trailer_limits_.headers)
      return Fail(431, absl::StrCat("More than ", trailer_limits_.headers, " trailers."));
    line_bytes_ = 0;
    state_ = State::kTrailerLf;
  } else if ((byte < 0x20 && c != '\t') || byte == 0x7f) {
    Fail(400, "A trailer has a control character.");
  }
}

void BodyDecoder::TakeFramingByte(char c) {
  const auto expect = [&](char wanted, State next) {
    if (c != wanted) return Fail(400, "A chunk does not end where its size says, or a line ends without CRLF.");
    state_ = next;
  };
  switch (state_) {
    case State::kSize: {
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit >= 0) {
        if (++digits_ > kMaxSizeDigits) return Fail(400, "A chunk size has too many digits.");
        left_ = left_ * 16 + digit;
      } else if (c == ';' && digits_ > 0) {
        state_ = State::kExtension;
      } else if (c == '\r') {
        state_ = State::kSizeLf;
      } else {
        Fail(400, "A chunk size is not a plain hexadecimal number.");
      }
      return;
    }
    case State::kExtension:
      if (c == '\r')
        state_ = State::kSizeLf;
      else if (static_cast<unsigned char>(c) < 0x20 || ++line_bytes_ > kMaxSizeLine)
        Fail(400, "A chunk extension is too long or has control characters.");
      return;
    case State::kSizeLf:
      if (c != '\n') return Fail(400, "A carriage return stands inside a chunk size line.");
      return EndOfSizeLine();
    case State::kDataCr: return expect('\r', State::kDataLf);
    case State::kDataLf: return expect('\n', State::kSize);
    case State::kTrailerName:
    case State::kTrailer: return TakeTrailerByte(c);
    case State::kTrailerLf: return expect('\n', State::kTrailerName);
    case State::kLastLf: return expect('\n', State::kDone);
    default: return;
  }
}

}  // namespace dovetail::server
