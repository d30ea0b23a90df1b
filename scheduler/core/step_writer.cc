#include "scheduler/core/step_writer.h"

#include <algorithm>

#include "proto/drawn_token.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/tenant_queues.h"

namespace dovetail::scheduler {
namespace {

// Log probabilities and logits of the prompt, as far as they are still owed for the tokens [ctx_len, end).
void AskForPromptOutputs(const Sequence& sequence, Position end, proto::StepEntry& entry) {
  const RequestState& request = *sequence.request;
  const GenerationRequest& params = sequence.params();
  const Position ctx_len = entry.ctx_len;
  if (sequence.choice != 0 || ctx_len >= sequence.prompt_size()) return;
  const Position next = request.prompt_logprobs_next;
  if (params.prompt_logprobs >= 0 && next < sequence.prompt_size() && next <= end &&
      ctx_len + 1 < sequence.prompt_size()) {
    entry.prompt_logprobs = params.prompt_logprobs;
    entry.next_prompt_token = end < sequence.prompt_size() ? sequence.token(end) : -1;
  }
  if (params.logits_last > 0 && !request.prompt_logits_done) {
    const Position first = std::max(ctx_len, sequence.prompt_size() - params.logits_last);
    entry.logits_rows = static_cast<int32_t>(std::max<Position>(0, end - first));
  }
}

// The hidden states of the tokens [ctx_len, end) that pooling averages and does not have.
void AskForPooled(const Sequence& sequence, Position end, proto::StepEntry& entry, PlannedEntry& planned) {
  const RequestState::Pooled range = sequence.request->pooled_range();
  const Position from = std::max({entry.ctx_len, range.begin, sequence.request->pooled_next});
  const Position to = std::min(end, range.end);
  if (sequence.choice != 0 || from >= to) return;
  entry.pool_first = static_cast<int32_t>(from - entry.ctx_len);
  entry.pool_rows = static_cast<int32_t>(to - from);
  planned.pool_from = from;
  planned.pool_to = to;
}

// What it draws stays on the worker, and is all that the next step needs.
bool MayBeFollowed(const proto::StepEntry& entry) {
  return entry.sample && entry.logits_rows == 0 && entry.prompt_logprobs < 0 && entry.sampling.logprobs <= 0 &&
         !entry.sampling.needs_history();
}

}  // namespace

void StepWriter::Begin(WorkerId compute_worker) {
  compute_worker_ = compute_worker;
  given_left_ = kMaxBytesGiven;
}

size_t StepWriter::BytesToGive(const Sequence& sequence) const {
  if (sequence.history_seen && sequence.history_worker == compute_worker_) return 0;
  const proto::SharedLists& lists = sequence.request->lists;
  const bool history = sequence.params().sampling.needs_history();
  return (lists.lists != nullptr ? lists.lists->bytes() : 0) +
         (history ? static_cast<size_t>(sequence.size()) * sizeof(TokenId) : 0);
}

bool StepWriter::MayGive(const Sequence& sequence) {
  const size_t bytes = BytesToGive(sequence);
  if (bytes > given_left_ && given_left_ < kMaxBytesGiven) return false;  // in a step to come
  given_left_ -= std::min(bytes, given_left_);
  return true;
}

void StepWriter::Write(Sequence& sequence, const Chunk& chunk, proto::StepEntry& entry, PlannedEntry& planned) {
  const Position ctx_len = chunk.ctx_len;
  const Position end = ctx_len + sequence.planned;
  entry.sequence = sequence.id;
  entry.ctx_len = ctx_len;
  entry.tokens.reserve(sequence.planned);
  for (Position at = ctx_len; at < end; ++at)
    entry.tokens.push_back(chunk.ahead ? proto::kDrawnBefore : sequence.token(at));
  entry.rope_length = static_cast<int32_t>(sequence.prompt_size());
  entry.sample = chunk.ahead || (end == sequence.size() && sequence.params().max_tokens > 0);
  entry.exchange = chunk.exchange;
  entry.placement = sequence.placement;
  // The step in flight names blocks up to its own beginning.
  const int64_t named = chunk.ahead ? sequence.ctx_len / kSegmentTokens : sequence.named_blocks;
  names_.Append(sequence, named, chunk.named_until / kSegmentTokens, entry.block_hashes);
  AskForPromptOutputs(sequence, end, entry);
  if (entry.sample) WriteSampling(sequence, chunk.ahead, entry);
  const Position given_from = entry.history_given ? 0 : ctx_len;
  entry.prompt_tokens = static_cast<int32_t>(std::max<Position>(0, std::min(sequence.prompt_size(), end) - given_from));

  planned = {.sequence = &sequence,
             .id = sequence.id,
             .ctx_len = ctx_len,
             .q_len = sequence.planned,
             .logits_rows = entry.logits_rows,
             .sample = entry.sample,
             .may_follow = MayBeFollowed(entry)};
  AskForPooled(sequence, end, entry, planned);
  Sequence::RanOn(sequence.compute_workers, compute_worker_);
  sequence.request->tenant->served += static_cast<uint64_t>(sequence.planned);
  ++sequence.in_flight;
  sequence.flying += sequence.planned;
  sequence.planned = 0;
}

void StepWriter::WriteSampling(Sequence& sequence, bool ahead, proto::StepEntry& entry) const {
  const GenerationRequest& params = sequence.params();
  entry.sampling = proto::WithoutLists(params.sampling);
  entry.sampling.seed += static_cast<uint64_t>(sequence.choice);
  entry.has_lists = sequence.request->lists.lists != nullptr;
  entry.ban_early = entry.has_lists && sequence.output.size() + (ahead ? sequence.in_flight : 0) < params.min_tokens;
  if (params.logits_of_output) entry.logits_rows = std::max(entry.logits_rows, 1);
  if (BytesToGive(sequence) == 0) return;
  if (entry.has_lists) entry.given = sequence.request->lists;
  sequence.history_seen = true;
  sequence.history_worker = compute_worker_;
  if (!params.sampling.needs_history()) return;
  entry.history_given = true;
  entry.history.reserve(entry.ctx_len);
  for (Position at = 0; at < entry.ctx_len; ++at) entry.history.push_back(sequence.token(at));
}

}  // namespace dovetail::scheduler
