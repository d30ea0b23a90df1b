#pragma once
#include <cstddef>
#include <vector>

#include "base/ids.h"

namespace dovetail::scheduler {

// The output tokens of one choice: the truth that streams, restarts and sampling history are made of. A token enters
// once, in order, before it may be shown; nothing leaves until the request is forgotten.
// Threads: thread-compatible.
class TokenLog {
 public:
  enum class Outcome { kLogged, kAlreadyLogged, kGap };

  // Records `token` as output number `index`. kAlreadyLogged and kGap change nothing.
  Outcome Record(Position index, TokenId token) {
    if (index < size()) return Outcome::kAlreadyLogged;
    if (index > size()) return Outcome::kGap;
    tokens_.push_back(token);
    return Outcome::kLogged;
  }

  Position size() const { return static_cast<Position>(tokens_.size()); }
  TokenId operator[](Position index) const { return tokens_[static_cast<size_t>(index)]; }
  const std::vector<TokenId>& tokens() const { return tokens_; }

 private:
  std::vector<TokenId> tokens_;
};

}  // namespace dovetail::scheduler
