#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "base/status.h"
#include "proto/block_hash.h"
#include "proto/placement.h"
#include "proto/prefill_exchange.h"
#include "proto/prefill_part.h"
#include "proto/sampling_params.h"

// A step is one micro-batch of sequences, each with q_len >= 1 new tokens: decode is q_len = 1, a prefill chunk
// hundreds. StepPlan goes from the scheduler to a compute worker, StepResult comes back. Encode and Decode are exact
// inverses, and Decode validates everything before use.
// Errors: kInvalidArgument names the field.
// Threads: plain values and pure functions.

namespace dovetail::proto {

inline constexpr int kMaxStepEntries = 4096;
// New tokens of all entries together: whole blocks, and rows that one launch on a GPU takes (65,535 at most).
inline constexpr int kMaxStepTokens = 65'472;
inline constexpr int kMaxTopLogprobs = 64;
inline constexpr size_t kMaxHiddenSize = size_t{1} << 20;

struct StepEntry {
  SequenceId sequence;
  Position ctx_len = 0;  // tokens whose K and V count; the new ones are positions ctx_len, ctx_len + 1, ...
  absl::InlinedVector<TokenId, 4> tokens;  // the q_len new ones; without an allocation when decoding
  int32_t rope_length = 0;       // the length that length-dependent rope kinds assume for this sequence (model/rope.h)
  bool sample = false;           // the last new token is the last one known: choose the next
  int32_t prompt_logprobs = -1;  // >= 0: report log probabilities of each new token's successor, this many alternatives
  int32_t logits_rows = 0;       // return the logits of this many last new tokens
  // Return the sum of the final hidden states of the new tokens [pool_first, pool_first + pool_rows); 0 rows: none.
  int32_t pool_first = 0;
  int32_t pool_rows = 0;
  TokenId next_prompt_token = -1;  // with prompt_logprobs: what follows the last new token; -1: nothing
  SamplingParams sampling;         // if sample; without its lists
  bool has_lists = false;     // with sample: the sequence's lists count. They are given once to each compute worker
  SharedLists given;          // with has_lists: those, if they are given here
  bool ban_early = false;     // with has_lists: SamplingLists::banned_early are not to be chosen at this position
  int32_t prompt_tokens = 0;  // how many tokens of `history` + `tokens` belong to the prompt
  std::vector<TokenId>
      history;  // tokens before ctx_len, given when penalties need them and the worker has not seen them
  bool history_given = false;
  // Of a prompt that the compute worker attends. Exchanges between ranks are of entries in a group.
  PrefixExchange exchange = PrefixExchange::kAsk;
  LinearExchange linear_exchange = LinearExchange::kStates;
  Placement placement;
  std::vector<BlockHash> block_hashes;  // for StepBegin: of the last blocks that end at or before ctx_len
  bool operator==(const StepEntry&) const = default;
};

struct StepPlan {
  StepId step;
  MicroBatchId micro_batch;
  std::vector<StepEntry> entries;
  PrefillPart part;                // in a group there is one entry, and its block_hashes end at part.base
  std::vector<RankAddress> ranks;  // in a group with an exchange between ranks: all of them, in order; else empty
  // The prompt goes on after the group: with gather-direct a rank also gives earlier ranks K and V of its tokens, so
  // that they have them for the next group.
  bool gives_back = false;
  bool operator==(const StepPlan&) const = default;
};

enum class StepStatus : uint8_t {
  kOk = 0,
  kOutOfMemory =
      1,  // an attention worker has no block left: nothing was committed, the scheduler frees some and repeats
  kWorkerFailed = 2,       // a worker refused or failed; `error` says why
  kBadLogits = 3,          // NaN or nothing left to choose from
  kWorkerUnreachable = 4,  // `failed_worker` is not connected (any more): nothing is wrong with the step itself
  kDamaged = 5,  // KV of `damaged` sequences is not what was written: nothing was committed, those begin again
  kForgotten =
      6,  // the compute worker does not have the lists of a sequence: nothing was done, they must be given again
  kGrammarPending = 7,  // the compute worker compiles the grammars of `pending` sequences: nothing was done
};

struct EntryResult {
  SequenceId sequence;
  StepStatus status = StepStatus::kOk;
  Position position = 0;  // of the sampled token: ctx_len + q_len
  TokenId token = -1;     // -1: none was asked for
  bool has_logprobs = false;
  PositionLogprobs logprobs;
  std::vector<PositionLogprobs> prompt_logprobs;  // of positions ctx_len + 1, ...
  std::vector<float> logits;                      // [logits_rows, vocab]
  std::vector<uint64_t> pooled;                   // with pool_rows: ExactSums (base/exact_sums.h) of [hidden] values
  bool operator==(const EntryResult&) const = default;
};

struct StepTimings {  // microseconds, measured by the compute worker's shell
  int64_t total_us = 0;
  int64_t dense_us = 0;
  int64_t attention_wait_us = 0;
  int64_t sample_us = 0;
  int64_t attention_us = 0;   // of the wait: what the slowest worker of each op was busy
  int64_t prompt_us = 0;      // attention over prompts, on the compute worker itself
  int64_t overlapped_us = 0;  // of the wait: the compute worker was at work for other steps
  int64_t linear_us = 0;      // of prompt_us: linear layers
  bool operator==(const StepTimings&) const = default;
};

// How the tokens before prompts' steps were seen, where the compute worker did not have them: bytes over all attention
// ops, both ways.
struct PrefixTraffic {
  int64_t asked_bytes = 0;     // queries to attention workers, and the partials that came back
  int64_t gathered_bytes = 0;  // K and V that came from there
  int64_t state_bytes = 0;     // linear states that went in place of tokens, both ways
  int64_t chain_bytes = 0;     // linear states that came from the rank before
  int64_t direct_bytes = 0;    // K and V that came from other ranks, from each its own
  int64_t ring_bytes = 0;      // K and V that came round a ring
  int64_t switch_bytes = 0;    // of a head switch: q, k and v that came from other ranks, and o
  int64_t pass_q_bytes = 0;    // queries that came from later ranks, and partials from those before
  bool operator==(const PrefixTraffic&) const = default;
};

// What a step did for prompts attended here, or if there are none elsewhere; rates follow from it. 0: not measured.
struct PromptWork {
  int64_t tokens = 0;           // new ones of those prompts
  int64_t step_tokens = 0;      // of all entries, if there is such a prompt
  double here_flops = 0;        // softmax attention on the compute worker (AttentionFlops)
  double asked_flops = 0;       // and on attention workers: of each op, on the one that had most to do
  uint32_t scratch_blocks = 0;  // of the compute worker's scratch: 64 tokens x a KV head x an op
  bool gives_rows = false;      // it may give other ranks K and V of softmax layers
  bool passes_on_rows = false;  // and pass on those of others in a ring
  bool switches_heads = false;  // and exchange tokens for heads
  bool gives_states = false;    // and states of linear layers
  bool operator==(const PromptWork&) const = default;
};

// Of the tensors that a compute worker has sent to another rank, and that were answered since it said so last: the one
// that took least for its size. Others have waited until the receiver had ended the piece of work at hand.
struct RankTransfer {
  WorkerId to;
  int64_t bytes = 0;
  int64_t busy_us = 0;  // until it was answered
  bool operator==(const RankTransfer&) const = default;
};

struct StepResult {
  StepId step;
  MicroBatchId micro_batch;
  StepStatus status = StepStatus::kOk;
  std::string error;
  WorkerId failed_worker;
  std::vector<EntryResult> entries;  // in the plan's order
  StepTimings timings;
  PrefixTraffic prefix;
  PromptWork work;
  std::vector<RankTransfer> transfers;  // to each other rank once
  std::vector<SequenceId> damaged;      // of kDamaged
  std::vector<SequenceId> pending;      // of kGrammarPending
  bool operator==(const StepResult&) const = default;
};

void Encode(const StepPlan& plan, std::vector<std::byte>& out);  // replaces out's contents; keeps its capacity
absl::StatusOr<StepPlan> DecodeStepPlan(std::span<const std::byte> bytes);

void Encode(const StepResult& result, std::vector<std::byte>& out);
absl::StatusOr<StepResult> DecodeStepResult(std::span<const std::byte> bytes);

}  // namespace dovetail::proto
