#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "server/http/request_head.h"

namespace dovetail::server {

// Collects the body of one request, of known length or chunked, up to a limit. Chunk sizes are plain hexadecimal
// digits, lines end in CRLF, trailers are refused. A value of one thread.
class BodyDecoder {
 public:
  BodyDecoder() = default;
  // `head` says how the body is framed. 413 at once for a length beyond the limit.
  BodyDecoder(const RequestHead& head, size_t max_bytes);

  // Takes what belongs to the body from the front of `bytes` and returns how much that was.
  size_t Consume(std::string_view bytes);

  bool done() const { return state_ == State::kDone; }
  const HttpProblem& problem() const { return problem_; }
  uint64_t received() const { return received_; }  // bytes on the wire, framing included
  std::string& body() { return body_; }

 private:
  enum class State { kLength, kSize, kExtension, kSizeLf, kData, kDataCr, kDataLf, kLastCr, kLastLf, kDone };
  void Fail(int status, std::string message);
  void TakeFramingByte(char c);
  void EndOfSizeLine();

  State state_ = State::kDone;
  size_t max_bytes_ = 0;
  uint64_t left_ = 0;       // bytes of the body or chunk still to come
  int digits_ = 0;          // of the chunk size
  int line_bytes_ = 0;
  uint64_t received_ = 0;
  std::string body_;
  HttpProblem problem_;
};

}  // namespace dovetail::server
