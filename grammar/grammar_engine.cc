#include "grammar/grammar_engine.h"

#include <xgrammar/xgrammar.h>

#include <time.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <list>
#include <stdexcept>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"

namespace {

// What xgrammar says it ignores, while this thread compiles.
thread_local std::string ignored;

constexpr int kWarning = 2;  // XGRAMMAR_LOG_LEVEL_WARNING

// When compiling ends on this thread, whatever is done by then.
struct Limit {
  int64_t ends_ns = 0;       // of the thread's own time; 0: nothing is compiled
  int64_t wall_ends_ns = 0;  // 0: no limit
  const dovetail::CancelToken* cancel = nullptr;
  uint32_t ticks = 0;
};
thread_local Limit limit;

constexpr uint32_t kTicksPerLook = 256;

int64_t TimeNs(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}
int64_t ThreadTimeNs() { return TimeNs(CLOCK_THREAD_CPUTIME_ID); }

struct TookTooLong : std::exception {};
struct MachineTooBusy : std::exception {};
struct Stopped : std::exception {};

class Limited {
 public:
  explicit Limited(int64_t max_ms, const dovetail::CancelToken* cancel = nullptr, int64_t max_wall_ms = 0) {
    begun_ = ThreadTimeNs();
    const int64_t wall_ends = max_wall_ms == 0 ? 0 : TimeNs(CLOCK_MONOTONIC) + max_wall_ms * 1'000'000;
    limit = {.ends_ns = begun_ + max_ms * 1'000'000, .wall_ends_ns = wall_ends, .cancel = cancel};
  }
  ~Limited() { limit = {}; }
  int64_t spent_ns() const { return ThreadTimeNs() - begun_; }
  Limited(const Limited&) = delete;
  Limited& operator=(const Limited&) = delete;

 private:
  int64_t begun_;
};

}  // namespace

// Called by xgrammar's loops (xgrammar_tick.h).
void DovetailXgrammarTick() {
  if (limit.ends_ns == 0 || ++limit.ticks % kTicksPerLook != 0) return;
  if (limit.cancel != nullptr && limit.cancel->cancelled()) throw Stopped();
  if (ThreadTimeNs() >= limit.ends_ns) throw TookTooLong();
  if (limit.wall_ends_ns != 0 && TimeNs(CLOCK_MONOTONIC) >= limit.wall_ends_ns) throw MachineTooBusy();
}

namespace xgrammar {

// xgrammar's own hooks for its log (support/logging.h, XGRAMMAR_LOG_CUSTOMIZE).
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  if (level >= kWarning && ignored.empty()) ignored = message;
}

}  // namespace xgrammar

namespace dovetail::grammar {

class Compiled {
 public:
  explicit Compiled(xgrammar::CompiledGrammar grammar)
      : grammar_(std::move(grammar)), bytes_(grammar_.MemorySizeBytes()) {}
  const xgrammar::CompiledGrammar& grammar() const { return grammar_; }
  size_t bytes() const { return bytes_; }

 private:
  const xgrammar::CompiledGrammar grammar_;
  const size_t bytes_;
};

struct GrammarEngine::Compiler {
  explicit Compiler(const xgrammar::TokenizerInfo& tokens)
      : xgrammar(tokens, /*max_threads=*/1, /*cache_enabled=*/false) {}
  xgrammar::GrammarCompiler xgrammar;  // thread-safe without its cache
};

// What was compiled without a fault.
struct GrammarEngine::Kept {
  std::shared_ptr<const Compiled> Find(const std::string& source) {
    MutexLock lock(mutex);
    const auto found = all.find(source);
    if (found == all.end()) return nullptr;
    used.splice(used.begin(), used, found->second.used);
    return found->second.grammar;
  }
  void Add(const std::string& source, const std::shared_ptr<const Compiled>& grammar) {
    MutexLock lock(mutex);
    if (all.contains(source)) return;
    used.push_front(source);
    all[source] = {grammar, used.begin()};
    bytes += grammar->bytes();
    while (bytes > kMaxCacheBytes) {
      const auto last = all.find(used.back());
      bytes -= last->second.grammar->bytes();
      all.erase(last);
      used.pop_back();
    }
  }

  struct One {
    std::shared_ptr<const Compiled> grammar;
    std::list<std::string>::iterator used;
  };
  Mutex mutex;
  absl::flat_hash_map<std::string, One> all ABSL_GUARDED_BY(mutex);
  std::list<std::string> used ABSL_GUARDED_BY(mutex);  // front: last
  size_t bytes ABSL_GUARDED_BY(mutex) = 0;
};

GrammarEngine::GrammarEngine(Tokens tokens, int vocab_size)
    : tokens_(std::move(tokens)), vocab_size_(vocab_size), kept_(std::make_unique<Kept>()) {}
GrammarEngine::~GrammarEngine() = default;

absl::StatusOr<GrammarEngine::Compiler*> GrammarEngine::Ready() {
  MutexLock lock(mutex_);
  if (compiler_ != nullptr) return compiler_.get();
  DT_ASSIGN_OR_RETURN(std::vector<std::string> tokens, tokens_());
  tokens.resize(vocab_size_);
  // Whatever ends a text is said by matchers: no token is an end here.
  compiler_ = std::make_unique<Compiler>(
      xgrammar::TokenizerInfo(tokens, xgrammar::VocabType::RAW, vocab_size_, std::vector<int32_t>{}));
  return compiler_.get();
}

std::shared_ptr<const Compiled> GrammarEngine::Find(const std::string& source) { return kept_->Find(source); }

namespace {

constexpr int kMaxWhitespace = 24;  // in a row, between the parts of a JSON text

xgrammar::CompiledGrammar CompileSource(xgrammar::GrammarCompiler& compiler, const std::string& source) {
  const std::string text = source.substr(1);
  switch (static_cast<Kind>(source[0])) {
    case Kind::kJsonSchema:
      return compiler.CompileJSONSchema(text, /*any_whitespace=*/true, std::nullopt, std::nullopt,
                                        /*strict_mode=*/false, kMaxWhitespace);
    case Kind::kRegex: return compiler.CompileRegex(text);
    case Kind::kEbnf: return compiler.CompileGrammar(text);
    case Kind::kStructuralTag: return compiler.CompileStructuralTag(text);
  }
  throw std::runtime_error("the kind of the grammar is not known");
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Compiled>> GrammarEngine::Compile(const std::string& source,
                                                                       const CancelToken* cancel, int64_t max_wall_ms) {
  if (auto known = Find(source)) return known;
  DT_ASSIGN_OR_RETURN(auto made, Make(source, kMaxCompileMs, max_wall_ms, cancel));
  DT_RETURN_IF_ERROR(Try(made));
  kept_->Add(source, made);
  return made;
}

absl::StatusOr<std::shared_ptr<const Compiled>> GrammarEngine::CompileAgain(const std::string& source,
                                                                            const CancelToken& cancel) {
  if (auto known = Find(source)) return known;
  DT_ASSIGN_OR_RETURN(auto made, Make(source, kMaxWorkerCompileMs, /*max_wall_ms=*/0, &cancel));
  kept_->Add(source, made);
  return made;
}

absl::StatusOr<std::shared_ptr<const Compiled>> GrammarEngine::Make(const std::string& source, int64_t max_ms,
                                                                    int64_t max_wall_ms, const CancelToken* cancel) {
  if (source.empty()) return InvalidArgument("the grammar is empty");
  if (source.size() > kMaxSourceBytes)
    return ResourceExhausted("the grammar has ", source.size(), " bytes; at most ", kMaxSourceBytes, " are allowed");
  DT_ASSIGN_OR_RETURN(Compiler* const compiler, Ready());
  try {
    ignored.clear();
    const Limited limited(max_ms, cancel, max_wall_ms);
    auto made = std::make_shared<const Compiled>(CompileSource(compiler->xgrammar, source));
    if (!ignored.empty()) return InvalidArgument("a part of it would not be enforced: ", ignored);
    if (made->bytes() > kMaxCompiledBytes)
      return ResourceExhausted("compiled, it has ", made->bytes(), " bytes; at most ", kMaxCompiledBytes,
                               " are allowed");
    return made;
  } catch (const TookTooLong&) {
    return ResourceExhausted("it takes more than ", max_ms, " ms to compile; make it simpler");
  } catch (const MachineTooBusy&) {
    return absl::UnavailableError(
        absl::StrCat("this machine is busy: compiling it was not done after ", max_wall_ms, " ms; try again"));
  } catch (const Stopped&) {
    return absl::CancelledError("it is not wanted any more");
  } catch (const std::exception& error) {
    return InvalidArgument(error.what());
  }
}

namespace {

constexpr int kTriedTexts = 4;
constexpr int kTriedTokens = 24;

// One of the tokens that the mask leaves, by `choice`; -1: none.
TokenId Pick(std::span<const uint32_t> mask, uint64_t choice) {
  uint64_t all = 0;
  for (const uint32_t word : mask) all += static_cast<uint64_t>(std::popcount(word));
  if (all == 0) return -1;
  uint64_t nth = choice % all;
  for (size_t i = 0; i < mask.size() * 32; ++i)
    if ((mask[i / 32] >> (i % 32) & 1) != 0 && nth-- == 0) return static_cast<TokenId>(i);
  return -1;
}

}  // namespace

// What is cheap to compile may be dear to follow: better known before a worker follows it.
absl::Status GrammarEngine::Try(const std::shared_ptr<const Compiled>& grammar) const {
  std::vector<uint32_t> mask((static_cast<size_t>(vocab_size_) + 31) / 32);
  uint64_t random = 1;
  for (int text = 0; text < kTriedTexts; ++text) {
    Matcher matcher(grammar, std::vector<TokenId>{0});
    for (int n = 0; n < kTriedTokens && !matcher.ended(); ++n) {
      DT_RETURN_IF_ERROR(matcher.FillMask(mask));
      random = random * 6364136223846793005u + 1442695040888963407u;
      const TokenId token = Pick(mask, random >> 33);
      if (token < 0 || !matcher.Accept(token)) break;
    }
  }
  return absl::OkStatus();
}

struct Matcher::Impl {
  Impl(std::shared_ptr<const Compiled> from, std::vector<int> ends)
      : grammar(std::move(from)), matcher(grammar->grammar(), std::move(ends)) {}
  std::shared_ptr<const Compiled> grammar;
  xgrammar::GrammarMatcher matcher;
  int64_t spent_ns = 0, tokens = 0;
};

Matcher::Matcher(std::shared_ptr<const Compiled> grammar, std::span<const TokenId> ends)
    : impl_(std::make_unique<Impl>(std::move(grammar), std::vector<int>(ends.begin(), ends.end()))) {}
Matcher::~Matcher() = default;
Matcher::Matcher(Matcher&&) noexcept = default;
Matcher& Matcher::operator=(Matcher&&) noexcept = default;

bool Matcher::ended() const { return impl_->matcher.IsTerminated(); }

void Matcher::Reset() {
  impl_->matcher.Reset();
  impl_->spent_ns = impl_->tokens = 0;
}

bool Matcher::Accept(TokenId token) {
  ++impl_->tokens;
  const Limited limited(kMaxMaskMs);
  try {
    const bool accepted = impl_->matcher.AcceptToken(token);
    impl_->spent_ns += limited.spent_ns();
    return accepted;
  } catch (const TookTooLong&) {
    return false;
  }
}

absl::Status Matcher::FillMask(std::span<uint32_t> mask) {
  constexpr int64_t kFreeTokens = 16;
  int64_t words = static_cast<int64_t>(mask.size());
  DLTensor tensor{};
  tensor.data = mask.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 1;
  tensor.dtype = xgrammar::GetBitmaskDLType();
  tensor.shape = &words;
  std::fill(mask.begin(), mask.end(), ~uint32_t{0});
  const Limited limited(kMaxMaskMs);
  try {
    impl_->matcher.FillNextTokenBitmask(&tensor);
  } catch (const TookTooLong&) {
    return ResourceExhausted("a token's mask takes more than ", kMaxMaskMs, " ms; make it simpler");
  }
  impl_->spent_ns += limited.spent_ns();
  if (impl_->spent_ns > (impl_->tokens + kFreeTokens) * kMaxMeanMaskUs * 1000)
    return ResourceExhausted("its tokens' masks take more than ", kMaxMeanMaskUs, " us in the mean; make it simpler");
  return absl::OkStatus();
}

}  // namespace dovetail::grammar
