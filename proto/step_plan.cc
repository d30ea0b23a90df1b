#include "proto/step_plan.h"

#include <algorithm>

#include "base/exact_sums.h"
#include "proto/codec.h"
#include "proto/fields.h"

namespace dovetail::proto {
namespace {

constexpr size_t kMaxHistory = size_t{kMaxSequenceBlocks} * kSegmentTokens;
constexpr size_t kMaxLogits = size_t{1} << 30;

template <typename T, typename Message>
concept Is = std::is_same_v<std::remove_const_t<T>, Message>;

void FieldsOf(auto& archive, Is<SamplingParams> auto& p) {
  archive.Number("temperature", p.temperature);
  archive.Number("top_k", p.top_k);
  archive.Number("top_p", p.top_p);
  archive.Number("min_p", p.min_p);
  archive.Number("repetition_penalty", p.repetition_penalty);
  archive.Number("presence_penalty", p.presence_penalty);
  archive.Number("frequency_penalty", p.frequency_penalty);
  archive.Number("seed", p.seed);
  archive.Number("logprobs", p.logprobs);
  archive.Bool("follows_grammar", p.follows_grammar);
  if constexpr (std::remove_reference_t<decltype(archive)>::kDecoding) {
    archive.Require(std::isfinite(p.temperature) && p.temperature >= 0, "temperature", "is negative or not finite");
    archive.Require(p.top_p >= 0 && p.top_p <= 1, "top_p", "is outside 0..1");
    archive.Require(p.min_p >= 0 && p.min_p <= 1, "min_p", "is outside 0..1");
    archive.Require(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0, "repetition_penalty",
                    "is not a positive number");
    archive.Require(std::isfinite(p.presence_penalty) && std::isfinite(p.frequency_penalty), "penalty",
                    "is not finite");
    archive.Require(p.logprobs >= -1 && p.logprobs <= kMaxTopLogprobs, "logprobs", "is outside the limit");
  }
}

void FieldsOf(auto& archive, Is<SamplingLists> auto& l) {
  archive.Each("logit_bias", l.logit_bias, kMaxLogitBias, [](auto& a, auto& bias) {
    a.Number("logit_bias.token", bias.first);
    a.Number("logit_bias.value", bias.second);
    if constexpr (std::remove_reference_t<decltype(a)>::kDecoding) {
      a.Require(bias.first >= 0, "logit_bias.token", "is negative");
      a.Require(!std::isnan(bias.second), "logit_bias.value", "is not a number");
    }
  });
  archive.Array("allowed_token_ids", l.allowed_token_ids, kMaxTokenList);
  archive.Array("banned_token_ids", l.banned_token_ids, kMaxTokenList);
  archive.Array("banned_early", l.banned_early, kMaxTokenList);
  archive.Text("grammar", l.grammar.source, kMaxGrammar);
  archive.Array("grammar_ends", l.grammar.ends, kMaxGrammarEnds);
}

void GivenField(Encoder& encoder, const SharedLists& given) {
  encoder.Bool("lists_given", given.lists != nullptr);
  if (given.lists != nullptr) FieldsOf(encoder, *given.lists);
}

void GivenField(Decoder& decoder, SharedLists& given) {
  bool is_given = false;
  decoder.Bool("lists_given", is_given);
  if (!is_given) return;
  auto lists = std::make_shared<SamplingLists>();
  FieldsOf(decoder, *lists);
  given.lists = std::move(lists);
}

void FieldsOf(auto& a, Is<StepEntry> auto& e) {
  a.Id("sequence", e.sequence);
  PositionField(a, "ctx_len", e.ctx_len);
  a.Array("tokens", e.tokens, kMaxStepTokens);
  a.Number("rope_length", e.rope_length);
  a.Bool("sample", e.sample);
  a.Number("prompt_logprobs", e.prompt_logprobs);
  a.Number("logits_rows", e.logits_rows);
  a.Number("pool_first", e.pool_first);
  a.Number("pool_rows", e.pool_rows);
  a.Number("next_prompt_token", e.next_prompt_token);
  if (e.sample) FieldsOf(a, e.sampling);
  a.Bool("has_lists", e.has_lists);
  if (e.has_lists) {
    GivenField(a, e.given);
    a.Bool("ban_early", e.ban_early);
  }
  a.Number("prompt_tokens", e.prompt_tokens);
  a.Bool("history_given", e.history_given);
  a.Array("history", e.history, kMaxHistory);
  a.Number("exchange", e.exchange);
  a.Number("linear_exchange", e.linear_exchange);
  ShardsField(a, e.placement);
  a.Array("block_hashes", e.block_hashes, kMaxSequenceBlocks);
  if constexpr (std::remove_reference_t<decltype(a)>::kDecoding) {
    a.Require(!e.tokens.empty(), "tokens", "is empty");
    a.Require(!e.sample || !e.sampling.follows_grammar || e.has_lists, "follows_grammar", "without lists");
    a.Require(e.rope_length >= 0, "rope_length", "is negative");
    a.Require(e.prompt_tokens >= 0, "prompt_tokens", "is negative");
    a.Require(e.exchange <= kLastPrefixExchange, "exchange", "is unknown");
    a.Require(e.linear_exchange <= kLastLinearExchange, "linear_exchange", "is unknown");
    a.Require(e.prompt_logprobs >= -1 && e.prompt_logprobs <= kMaxTopLogprobs, "prompt_logprobs",
              "is outside the limit");
    a.Require(e.logits_rows >= 0 && static_cast<size_t>(e.logits_rows) <= e.tokens.size(), "logits_rows",
              "is more than the entry's tokens");
    a.Require(e.pool_first >= 0 && e.pool_rows >= 0 &&
                  int64_t{e.pool_first} + e.pool_rows <= static_cast<int64_t>(e.tokens.size()),
              "pool_rows", "are not among the entry's tokens");
  }
}

// Each begins after the one before it, the first at the group's base and the others on a segment.
bool Tile(const std::vector<RankAddress>& ranks, const PrefillPart& part) {
  if (ranks[0].begin != part.base || ranks.back().begin >= part.end) return false;
  for (size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].begin <= ranks[r - 1].begin || ranks[r].begin % kSegmentTokens != 0) return false;
  return true;
}

void FieldsOf(auto& archive, Is<StepPlan> auto& plan) {
  archive.Id("step", plan.step);
  archive.Id("micro_batch", plan.micro_batch);
  archive.Each("entries", plan.entries, kMaxStepEntries, [](auto& a, auto& entry) { FieldsOf(a, entry); });
  PartField(archive, plan.part);
  if (plan.part.in_group()) {
    archive.Each("ranks", plan.ranks, kMaxPrefillRanks, [](auto& a, auto& rank) {
      a.Id("rank.worker", rank.worker);
      a.Id("rank.step", rank.step);
      a.Id("rank.micro_batch", rank.micro_batch);
      PositionField(a, "rank.begin", rank.begin);
    });
    archive.Bool("gives_back", plan.gives_back);
  }
  if constexpr (std::remove_reference_t<decltype(archive)>::kDecoding) {
    size_t tokens = 0;
    for (const StepEntry& entry : plan.entries) tokens += entry.tokens.size();
    archive.Require(tokens >= 1 && tokens <= kMaxStepTokens, "entries", "hold no token or more than a step may");
    if (!plan.part.in_group()) {
      for (const StepEntry& entry : plan.entries)
        archive.Require(!IsBetweenRanks(entry.exchange) && !IsBetweenRanks(entry.linear_exchange), "exchange",
                        "is one between ranks, and the step is not a part of a group");
      return;
    }
    archive.Require(plan.entries.size() == 1, "entries", "of a part of a group are not one");
    const Position begin = plan.entries.empty() ? 0 : plan.entries[0].ctx_len;
    RequireTokensOfPart(archive, plan.part, plan.step, begin, begin + static_cast<Position>(tokens));
    if (plan.entries.empty()) return;
    archive.Require(!plan.gives_back || plan.entries[0].exchange == PrefixExchange::kGatherDirect, "gives_back",
                    "goes with gather-direct only");
    const bool direct = IsBetweenRanks(plan.entries[0].exchange) || IsBetweenRanks(plan.entries[0].linear_exchange);
    archive.Require(plan.ranks.size() == (direct ? static_cast<size_t>(plan.part.ranks) : 0), "ranks",
                    "are not those of the group, or there is no exchange between them");
    if (plan.ranks.empty()) return;
    const RankAddress& own = plan.ranks[std::min<size_t>(plan.part.rank, plan.ranks.size() - 1)];
    archive.Require(own.step == plan.step && own.micro_batch == plan.micro_batch, "ranks", "have another step here");
    archive.Require(own.begin == begin && Tile(plan.ranks, plan.part), "ranks", "do not tile the group's tokens");
  }
}

void FieldsOf(auto& archive, Is<PositionLogprobs> auto& p) {
  const auto one = [](auto& a, auto& logprob) {
    a.Number("logprob.token", logprob.token);
    a.Number("logprob.logprob", logprob.logprob);
    a.Number("logprob.rank", logprob.rank);
  };
  one(archive, p.chosen);
  archive.Each("top", p.top, kMaxTopLogprobs, one);
}

template <typename Archive, typename Enum>
void StatusField(Archive& a, Enum& status) {
  a.Number("status", status);
  if constexpr (Archive::kDecoding) a.Require(status <= StepStatus::kGrammarPending, "status", "is unknown");
}

void FieldsOf(auto& archive, Is<EntryResult> auto& r) {
  archive.Id("sequence", r.sequence);
  StatusField(archive, r.status);
  PositionField(archive, "position", r.position);
  archive.Number("token", r.token);
  archive.Bool("has_logprobs", r.has_logprobs);
  if (r.has_logprobs) FieldsOf(archive, r.logprobs);
  archive.Each("prompt_logprobs", r.prompt_logprobs, kMaxStepTokens,
               [](auto& a, auto& logprobs) { FieldsOf(a, logprobs); });
  archive.Array("logits", r.logits, kMaxLogits);
  archive.Array("pooled", r.pooled, ExactSums::kWords * kMaxHiddenSize);
}

void FieldsOf(auto& archive, Is<StepResult> auto& r) {
  archive.Id("step", r.step);
  archive.Id("micro_batch", r.micro_batch);
  StatusField(archive, r.status);
  archive.Text("error", r.error, 4096);
  archive.Id("failed_worker", r.failed_worker);
  archive.Each("entries", r.entries, kMaxStepEntries, [](auto& a, auto& entry) { FieldsOf(a, entry); });
  archive.Number("total_us", r.timings.total_us);
  archive.Number("dense_us", r.timings.dense_us);
  archive.Number("attention_wait_us", r.timings.attention_wait_us);
  archive.Number("sample_us", r.timings.sample_us);
  archive.Number("attention_us", r.timings.attention_us);
  archive.Number("prompt_us", r.timings.prompt_us);
  archive.Number("overlapped_us", r.timings.overlapped_us);
  archive.Number("linear_us", r.timings.linear_us);
  archive.Number("asked_bytes", r.prefix.asked_bytes);
  archive.Number("gathered_bytes", r.prefix.gathered_bytes);
  archive.Number("state_bytes", r.prefix.state_bytes);
  archive.Number("chain_bytes", r.prefix.chain_bytes);
  archive.Number("direct_bytes", r.prefix.direct_bytes);
  archive.Number("ring_bytes", r.prefix.ring_bytes);
  archive.Number("switch_bytes", r.prefix.switch_bytes);
  archive.Number("pass_q_bytes", r.prefix.pass_q_bytes);
  archive.Number("work.tokens", r.work.tokens);
  archive.Number("work.step_tokens", r.work.step_tokens);
  archive.Number("work.here_flops", r.work.here_flops);
  archive.Number("work.asked_flops", r.work.asked_flops);
  archive.Number("work.scratch_blocks", r.work.scratch_blocks);
  archive.Bool("work.gives_rows", r.work.gives_rows);
  archive.Bool("work.passes_on_rows", r.work.passes_on_rows);
  archive.Bool("work.switches_heads", r.work.switches_heads);
  archive.Bool("work.gives_states", r.work.gives_states);
  archive.Each("transfers", r.transfers, kMaxPrefillRanks, [](auto& a, auto& transfer) {
    a.Id("transfer.to", transfer.to);
    a.Number("transfer.bytes", transfer.bytes);
    a.Number("transfer.busy_us", transfer.busy_us);
  });
  archive.Array("damaged", r.damaged, kMaxStepEntries);
  archive.Array("pending", r.pending, kMaxStepEntries);
}

template <typename Message>
absl::StatusOr<Message> DecodeMessage(std::span<const std::byte> bytes, const char* name) {
  Decoder decoder(bytes);
  Message message;
  FieldsOf(decoder, message);
  if (absl::Status status = decoder.Finish(); !status.ok()) return Annotate(status, name);
  return message;
}

}  // namespace

void Encode(const StepPlan& plan, std::vector<std::byte>& out) {
  Encoder encoder(out);
  FieldsOf(encoder, plan);
}

absl::StatusOr<StepPlan> DecodeStepPlan(std::span<const std::byte> bytes) {
  return DecodeMessage<StepPlan>(bytes, "StepPlan");
}

void Encode(const StepResult& result, std::vector<std::byte>& out) {
  Encoder encoder(out);
  FieldsOf(encoder, result);
}

absl::StatusOr<StepResult> DecodeStepResult(std::span<const std::byte> bytes) {
  return DecodeMessage<StepResult>(bytes, "StepResult");
}

}  // namespace dovetail::proto
