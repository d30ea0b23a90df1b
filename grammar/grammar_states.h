#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "base/status.h"
#include "grammar/background_compiler.h"
#include "grammar/grammar_engine.h"

namespace dovetail::grammar {

// The states of the sequences whose texts follow a grammar: each a function of its grammar and its output tokens, kept
// from one step to the next. At most kMaxSequences, the least recently used dropped and made again from the tokens.
// Threads: thread-compatible.
class GrammarStates {
 public:
  static constexpr size_t kMaxSequences = 4096;

  // Null: this model has no tokenizer. The engine outlives this object.
  explicit GrammarStates(GrammarEngine* engine)
      : engine_(engine), compiler_(engine != nullptr ? std::make_unique<BackgroundCompiler>(*engine) : nullptr) {}

  // True: Mask has what it needs, or knows why it never will. False: the grammar is being compiled on another thread;
  // ask again. Does not block.
  bool Prepare(SequenceId sequence, const std::string& source, std::span<const TokenId> ends);

  // The tokens that may follow `output`. Valid until the next call. kFailedPrecondition: there is no tokenizer, the
  // grammar is not prepared, does not let `output` be, or it has ended. Errors of CompileAgain and FillMask.
  absl::StatusOr<std::span<const uint32_t>> Mask(SequenceId sequence, const std::string& source,
                                                 std::span<const TokenId> ends, std::span<const TokenId> output);

 private:
  struct State {
    absl::Status failed;  // not kOk: there is no matcher
    std::unique_ptr<Matcher> matcher;
    std::vector<TokenId> accepted;
    std::list<SequenceId>::iterator used;
  };
  State* Find(SequenceId sequence, const std::string& source, std::span<const TokenId> ends);
  absl::Status Begin(State& state, absl::StatusOr<std::shared_ptr<const Compiled>> compiled,
                     std::span<const TokenId> ends) const;

  GrammarEngine* const engine_;
  const std::unique_ptr<BackgroundCompiler> compiler_;  // null: no engine
  absl::flat_hash_map<SequenceId, State> states_;
  std::list<SequenceId> lru_;  // front: used last
  std::vector<uint32_t> mask_;
};

}  // namespace dovetail::grammar
