#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/openai/answers/argument_reader.h"
#include "server/openai/answers/cursor.h"

namespace dovetail::server {

// Threads: thread-compatible; a value.
struct CallHead {
  std::string name, id;
  std::optional<std::string> arguments;  // all of them, where they stand before the name or are left out
};

// How one family of models writes calls: the part of a parser that is the format's own. marked_calls.h drives it. Each
// function reads what it can and may be called again with more text: it keeps nothing of an earlier call to itself.
// Threads: thread-compatible.
class CallSyntax {
 public:
  enum class Place { kBare, kMarked, kNext };

  virtual ~CallSyntax() = default;
  // Calls follow one of these.
  virtual std::vector<std::string> markers() const = 0;
  // Whether an answer may begin with a call without a marker; Head then takes known functions only.
  virtual bool begins_bare() const { return false; }
  // What stands before the arguments; `marker`: which one, at kMarked. At kNext: behind a call that promised another.
  virtual void Head(Cursor& cursor, Place place, size_t marker, CallHead& head) = 0;
  virtual std::unique_ptr<ArgumentReader> Arguments(const CallHead&) { return MakeJsonArguments(); }
  // What stands behind them; true: another call follows. What it commits (cursor.h) is taken even if the rest is not
  // there.
  virtual bool Tail(Cursor& cursor) = 0;
};

}  // namespace dovetail::server
