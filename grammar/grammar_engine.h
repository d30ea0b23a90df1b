#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/cancel_token.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "base/status.h"

// What a text may be, as masks over one model's tokens. xgrammar does the work (0.2.8: pushdown automata with masks
// computed beforehand, Dong et al. 2024); nothing outside this folder sees it.

namespace dovetail::grammar {

inline constexpr size_t kMaxSourceBytes = size_t{64} << 10;
inline constexpr size_t kMaxCompiledBytes = size_t{64} << 20;  // of one grammar
inline constexpr size_t kMaxCacheBytes = size_t{512} << 20;    // of all that are kept

// Of a thread's own time. What a server compiled in kMaxCompileMs a worker compiles, too, though its machine be slower.
inline constexpr int64_t kMaxCompileMs = 2000;
inline constexpr int64_t kMaxWorkerCompileMs = 20'000;
inline constexpr int64_t kMaxCompileWallMs = 10'000;  // of a server's clock, for a client that waits
inline constexpr int64_t kMaxMaskMs = 50;             // of one token's mask
inline constexpr int64_t kMaxMeanMaskUs = 2000;       // of a token's, in the mean over a text

// How a text is constrained: one string, so that it travels as one field. Its first byte is the kind.
// kStructuralTag: xgrammar's own composition of such grammars, literal texts and tokens, as JSON.
enum class Kind : char { kJsonSchema = 'j', kRegex = 'r', kEbnf = 'e', kStructuralTag = 't' };
inline std::string SourceOf(Kind kind, std::string_view text) {
  std::string source(1, static_cast<char>(kind));
  source += text;
  return source;
}

class Compiled;  // a grammar over the model's tokens; immutable

// Compiles grammars for one vocabulary and keeps what it compiled, the least recently used dropped.
// Threads: thread-safe.
class GrammarEngine {
 public:
  // What each token adds to a text, by id; empty for those that add nothing (special tokens). Called once, by the first
  // Compile, whose error is its own.
  using Tokens = std::function<absl::StatusOr<std::vector<std::string>>()>;

  GrammarEngine(Tokens tokens, int vocab_size);  // vocab_size: rows of the output layer
  ~GrammarEngine();

  // For a request: blocks for about kMaxCompileMs of the thread's time and `max_wall_ms` (0: no limit) at most, and
  // longer for the first, which reads the vocabulary. Never on a thread that others wait for.
  // Errors: kInvalidArgument: the source is no grammar, or a part of it would not be enforced; the message says which.
  // kResourceExhausted: it is longer than kMaxSourceBytes, or takes more than kMaxCompiledBytes or kMaxCompileMs, or
  // the masks of a few texts under it take more than is allowed. kUnavailable: other work of this machine left it so
  // little time that max_wall_ms came first. kCancelled: `cancel`, if there is one, says so.
  absl::StatusOr<std::shared_ptr<const Compiled>> Compile(const std::string& source,
                                                          const CancelToken* cancel = nullptr,
                                                          int64_t max_wall_ms = kMaxCompileWallMs);

  // For a worker, of what a server compiled: kMaxWorkerCompileMs, and no text is tried.
  absl::StatusOr<std::shared_ptr<const Compiled>> CompileAgain(const std::string& source, const CancelToken& cancel);

  // What was compiled and is kept. Null: it is not. Does not block.
  std::shared_ptr<const Compiled> Find(const std::string& source);

  int vocab_size() const { return vocab_size_; }

 private:
  struct Compiler;
  struct Kept;
  absl::StatusOr<Compiler*> Ready();
  // max_wall_ms 0: no limit.
  absl::StatusOr<std::shared_ptr<const Compiled>> Make(const std::string& source, int64_t max_ms, int64_t max_wall_ms,
                                                       const CancelToken* cancel);
  absl::Status Try(const std::shared_ptr<const Compiled>& grammar) const;

  const Tokens tokens_;
  const int vocab_size_;
  const std::unique_ptr<Kept> kept_;
  Mutex mutex_;  // of the vocabulary being read
  std::unique_ptr<Compiler> compiler_ ABSL_GUARDED_BY(mutex_);
};

// The state of one text under a grammar.
// Threads: thread-compatible.
class Matcher {
 public:
  // `ends`: the tokens that may follow a whole text, and nothing else; at least one.
  Matcher(std::shared_ptr<const Compiled> grammar, std::span<const TokenId> ends);
  ~Matcher();
  Matcher(Matcher&&) noexcept;
  Matcher& operator=(Matcher&&) noexcept;

  // False: the grammar does not let the token follow, and the state is as before; or it takes more than kMaxMaskMs.
  bool Accept(TokenId token);
  // Bit i % 32 of word i / 32: token i may follow. Words: (vocab_size + 31) / 32. kResourceExhausted: it takes more
  // than kMaxMaskMs, or the text's masks and tokens so far more than kMaxMeanMaskUs in the mean; the matcher is of no
  // use then.
  absl::Status FillMask(std::span<uint32_t> mask);
  bool ended() const;  // an end token was accepted
  void Reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dovetail::grammar
