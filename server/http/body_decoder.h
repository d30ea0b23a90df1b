#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "server/http/body_budget.h"
#include "server/http/request_head.h"

namespace dovetail::server {

struct BodyLimits {
  size_t max_bytes = 0;                // of one body
  std::shared_ptr<BodyBudget> budget;  // of all together; null: not limited
  HeadLimits trailers;                 // of their lines, as of a head's
};

// Collects the body of one request, of known length or chunked, up to a limit. Chunk sizes are plain hexadecimal
// digits, lines end in CRLF. Trailers are read and ignored, which RFC 9110, section 6.5.1 allows for every field.
// Threads: thread-compatible; a value.
class BodyDecoder {
 public:
  enum class Use { kKeep, kDrop };  // kDrop: only its end is looked for

  BodyDecoder() = default;
  // `head` says how the body is framed. At once 413 for a length beyond the limit, and 503 for one that the budget has
  // no room for now.
  BodyDecoder(const RequestHead& head, const BodyLimits& limits, Use use = Use::kKeep);

  // Takes what belongs to the body from the front of `bytes` and returns how much that was.
  size_t Consume(std::string_view bytes);

  bool done() const { return state_ == State::kDone; }
  const HttpProblem& problem() const { return problem_; }
  uint64_t payload() const { return payload_; }  // bytes of the body that came, without framing
  RequestBody& body() { return body_; }

 private:
  enum class State {
    kLength,
    kSize,
    kExtension,
    kSizeLf,
    kData,
    kDataCr,
    kDataLf,
    kTrailerName,
    kTrailer,
    kTrailerLf,
    kLastLf,
    kDone
  };
  void Fail(int status, std::string message);
  void FailForRoom();
  void TakePayload(std::string_view bytes);
  void TakeFramingByte(char c);
  void EndOfSizeLine();
  void TakeTrailerByte(char c);

  State state_ = State::kDone;
  Use use_ = Use::kKeep;
  size_t max_bytes_ = 0;
  size_t length_limit_ = 0;  // of this body, as far as it is known: its length or max_bytes_
  uint64_t left_ = 0;        // bytes of the body or chunk still to come
  int digits_ = 0;           // of the chunk size
  HeadLimits trailer_limits_;
  size_t line_bytes_ = 0;  // of the chunk extension, or of the trailer's line
  size_t trailer_bytes_ = 0;
  int trailers_ = 0;
  uint64_t payload_ = 0;
  RequestBody body_;
  HttpProblem problem_;
};

}  // namespace dovetail::server
