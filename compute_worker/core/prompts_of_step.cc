// What a step attends here: its prompts, and the linear layers of prompts.
#include <algorithm>
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/head_switch.h"
#include "proto/pass_q.h"
#include "proto/prefix_traffic.h"

namespace dovetail::compute {

using proto::StepEntry;

proto::EntryExchange ComputeWorkerCore::ExchangeOf(const MicroBatch& batch, int index) const {
  proto::EntryExchange exchange;
  for (const PromptEntry& prompt : batch.prompts) {
    if (prompt.entry != index) continue;
    exchange.attend_end = prompt.begin;
    exchange.gather_begin = prompt.gather_begin;
    exchange.gather_end = prompt.gather_end;
  }
  for (const StateEntry& state : batch.states) {
    if (state.entry != index) continue;
    const bool has = state.held || state.chained || (state.switched && batch.plan.part.rank > 0);
    const bool asks = !has && batch.plan.entries[index].ctx_len > 0;
    exchange.states = asks ? proto::StateExchange::kFetch : proto::StateExchange::kLeave;
  }
  return exchange;
}

PromptEntry ComputeWorkerCore::BeginPrompt(const StepEntry& entry) {
  const int q_len = static_cast<int>(entry.tokens.size());
  const bool more = !entry.sample;
  PromptEntry prompt;
  const Position missing = scratch_.FirstMissing(entry.sequence, entry.ctx_len, entry.ctx_len);
  const bool gathers = entry.exchange == proto::PrefixExchange::kGather && missing < entry.ctx_len;
  if (gathers) {
    prompt.part = scratch_.BeginGathering(
        entry.sequence, {.from = entry.ctx_len, .ctx_len = entry.ctx_len, .q_len = q_len, .more = more});
    if (prompt.part != nullptr) prompt.gather_begin = missing;
  }
  if (prompt.part == nullptr) prompt.part = scratch_.Begin(entry.sequence, entry.ctx_len, q_len, more);
  return prompt;
}

// Its worker attends to all of it, or to nothing.
PromptEntry ComputeWorkerCore::BeginLinkedPrompt(const StepEntry& entry) {
  PromptEntry prompt;
  if (scratch_.FirstMissing(entry.sequence, entry.ctx_len, entry.ctx_len) == entry.ctx_len) {
    const PromptScratch::Part* const part =
        scratch_.Begin(entry.sequence, entry.ctx_len, static_cast<int>(entry.tokens.size()), !entry.sample);
    if (part != nullptr && part->begin == 0) prompt.part = part;
  }
  if (prompt.part == nullptr) scratch_.Drop(entry.sequence);
  return prompt;
}

bool ComputeWorkerCore::IsWholeOnOne(const StepEntry& entry, bool AttentionWorkerAddress::*how) const {
  const proto::Shard& first = entry.placement[0];
  const auto worker = std::find_if(workers_.begin(), workers_.end(), [&](const AttentionWorkerAddress& known) {
    return known.worker == first.worker && known.epoch == first.epoch;
  });
  return worker != workers_.end() && (*worker).*how &&
         std::all_of(entry.placement.begin(), entry.placement.end(), [&](const proto::Shard& shard) {
           return shard.worker == first.worker && shard.epoch == first.epoch;
         });
}

// What is missing of the tokens before the group is gathered from the attention workers, if there is room; else asked
// about, and gathered no further back than the group's first segment. Without room for that either, all is asked.
PromptEntry ComputeWorkerCore::BeginPromptFromRanks(const proto::StepPlan& plan) {
  const StepEntry& entry = plan.entries[0];
  const Position base = plan.part.base, segment = base / kSegmentTokens * kSegmentTokens;
  GatherStep step{
      .from = base, .ctx_len = entry.ctx_len, .q_len = static_cast<int>(entry.tokens.size()), .more = !entry.sample};
  if (GivesBack(plan)) step.room_to = plan.part.end;
  PromptEntry prompt;
  Position missing = scratch_.FirstMissing(entry.sequence, base, entry.ctx_len);
  prompt.part = scratch_.BeginGathering(entry.sequence, step);
  if (prompt.part == nullptr && segment > 0) {
    scratch_.Drop(entry.sequence);
    missing = step.begin = segment;
    prompt.part = scratch_.BeginGathering(entry.sequence, step);
  }
  if (prompt.part == nullptr) return BeginPrompt(entry);
  prompt.from_ranks = true;
  if (missing < base) {
    prompt.gather_begin = missing;
    prompt.gather_end = base;
  }
  return prompt;
}

void ComputeWorkerCore::BeginPrompts(MicroBatch& batch) {
  batch.prompts.clear();
  for (size_t e = 0; e < batch.plan.entries.size(); ++e) {
    const StepEntry& entry = batch.plan.entries[e];
    const int q_len = static_cast<int>(entry.tokens.size());
    const bool direct = IsBetweenRanks(entry.exchange);
    StopKeeping(entry.sequence);
    if (!direct && (q_len < options_.prompt_tokens || IsWholeOnOne(entry, &AttentionWorkerAddress::same_gpu))) {
      scratch_.Drop(entry.sequence);
      continue;
    }
    const bool later = batch.plan.part.rank > 0;
    // The states that linear layers leave cross through the hosts, and so does all of the step.
    const bool linked =
        !batch.plan.part.in_group() && !table_.has_linear() && IsWholeOnOne(entry, &AttentionWorkerAddress::linked);
    const bool elsewhere = Switches(batch.plan) || AsksRanks(batch.plan);  // not in the scratch
    if (elsewhere) scratch_.Drop(entry.sequence);
    PromptEntry prompt = Switches(batch.plan)         ? BeginPromptOfSwitch(batch.plan)
                         : AsksRanks(batch.plan)      ? BeginPromptOfPassQ(batch.plan)
                         : Rings(batch.plan) && later ? BeginPromptOfRing(batch.plan)
                         : direct                     ? BeginPromptFromRanks(batch.plan)
                         : linked                     ? BeginLinkedPrompt(entry)
                                                      : BeginPrompt(entry);
    if (prompt.part == nullptr && !elsewhere) continue;
    prompt.entry = static_cast<int>(e);
    if (!prompt.ring && !elsewhere) prompt.begin = prompt.part->begin;
    batch.prompts.push_back(prompt);
    counters_.prompt_tokens_here += static_cast<uint64_t>(q_len);
  }
  BeginKeeping(batch);
}

// A slot is for the worker that computes the next part, too: not in a group.
void ComputeWorkerCore::BeginStates(MicroBatch& batch) {
  batch.states.clear();
  if (!options_.linear_prompts || !table_.has_linear()) return;
  const bool in_group = batch.plan.part.in_group();
  for (size_t e = 0; e < batch.plan.entries.size(); ++e) {
    const StepEntry& entry = batch.plan.entries[e];
    const int q_len = static_cast<int>(entry.tokens.size());
    if (in_group || q_len < options_.prompt_tokens) state_slots_.Drop(entry.sequence);
    if (!in_group && q_len < options_.prompt_tokens) continue;
    const bool chained = entry.linear_exchange == proto::LinearExchange::kChain;
    StateEntry state;
    state.entry = static_cast<int>(e);
    state.chained = chained && batch.plan.part.rank > 0;
    state.passed_on = chained && batch.plan.part.rank + 1 < batch.plan.part.ranks;
    state.switched = SwitchesStates(batch.plan);
    if (!in_group) {
      state.held = state_slots_.Find(entry.sequence, entry.ctx_len) != StateSlots::kNone;
      if (state.held || !entry.sample) state.slot = state_slots_.Begin(entry.sequence);
    }
    batch.states.push_back(state);
    counters_.state_tokens_here += static_cast<uint64_t>(q_len);
  }
}

void ComputeWorkerCore::EndPrompts(MicroBatch& batch, bool went_well) {
  for (const StateEntry& state : batch.states) {
    const StepEntry& entry = batch.plan.entries[state.entry];
    state_slots_.End(entry.sequence, went_well, entry.sample,
                     entry.ctx_len + static_cast<Position>(entry.tokens.size()));
  }
  batch.states.clear();
  for (const PromptEntry& prompt : batch.prompts) {
    const StepEntry& entry = batch.plan.entries[prompt.entry];
    scratch_.End(entry.sequence, went_well, entry.ctx_len + static_cast<Position>(entry.tokens.size()));
    batch.keeping.on = batch.keeping.on && went_well;
    if (batch.keeping.on) scratch_.Extend(entry.sequence, EndOfKept(batch), batch.plan.part.end);
  }
  batch.prompts.clear();
}

// No answer is needed before the end of the step. Nor does a rank that switches heads, or that others ask, keep states
// to itself: it may wait for a later one, which waits for these.
bool ComputeWorkerCore::MayHoldKeyValues(const MicroBatch& batch) const {
  if (!options_.hand_over_at_end || (batch.prompts.empty() && batch.states.empty())) return false;
  const bool waits = Switches(batch.plan) || SwitchesStates(batch.plan) || AsksRanks(batch.plan);
  if (waits && !batch.states.empty()) return false;
  return std::all_of(batch.parts.begin(), batch.parts.end(), [](const WorkerPart& part) {
    return std::all_of(part.layouts.begin(), part.layouts.end(), [](const proto::StepLayout& layout) {
      return !layout.asks() && !(layout.with_states && layout.partial_bytes > 0);
    });
  });
}

// The answer to k and v that came without a q is not waited for, but their memory is in use until then. Where states
// cross, q came with k and v if there is any.
void ComputeWorkerCore::ExpectAnswers(MicroBatch& batch, int op) {
  const uint16_t group = table_.op_group[op].value();
  for (WorkerPart& part : batch.parts) {
    const proto::StepLayout& layout = part.layouts[group];
    if (layout.items.empty()) continue;
    if (layout.with_states && layout.partial_bytes > 0) {
      part.partial = {};
      part.awaited = true;
      ++batch.awaiting;
    } else if (layout.with_states || !layout.asks()) {
      part.unanswered.push_back(op);
    }
  }
}

bool ComputeWorkerCore::AttendsHere(const MicroBatch& batch, int op) const {
  if (table_.linear(table_.op_group[op]) != nullptr) return !batch.states.empty();
  return !batch.prompts.empty() && !Switches(batch.plan);  // whose ranks attend once others have sent theirs
}

// Earlier tokens of the prompts that are attended here, or the states before them.
bool ComputeWorkerCore::AwaitsWhatItAttends(const MicroBatch& batch, int op) const {
  if (AwaitsRank(batch, op)) return true;
  const bool ring = Rings(batch.plan) && batch.plan.part.rank > 0;  // what is gathered goes with rank 0's
  if (table_.linear(table_.op_group[op]) == nullptr)
    return !ring && Gathers(batch, op) && (batch.awaiting > 0 || AwaitsPieces(batch, op));
  return AwaitsStates(batch, op);
}

// Of the answer that is awaited: the states before the op until they are there, then what attention gave.
int64_t ComputeWorkerCore::AnswerBytes(const MicroBatch& batch, const WorkerPart& part, int op) const {
  const proto::StepLayout& layout = part.layouts[table_.op_group[op].value()];
  const bool before = layout.with_states && program_[batch.stage].kind == StageKind::kAttendPrompts;
  return before ? layout.before_bytes : layout.partial_bytes;
}

// Earlier tokens that are attended here come with the op's answers.
bool ComputeWorkerCore::Gathers(const MicroBatch& batch, int op) const {
  const uint16_t group = table_.op_group[op].value();
  return std::any_of(batch.parts.begin(), batch.parts.end(),
                     [&](const WorkerPart& part) { return part.layouts[group].gather_bytes > 0; });
}

proto::PrefixTraffic ComputeWorkerCore::PrefixTrafficOf(const MicroBatch& batch) const {
  proto::PrefixTraffic traffic;
  if (batch.prompts.empty() && batch.states.empty()) return traffic;
  for (const LayerGroup group : table_.op_group)
    for (const WorkerPart& part : batch.parts)
      traffic = Sum(traffic, proto::TrafficOf(part.layouts[group.value()], table_.softmax(group)));
  for (int op = 0; op < table_.op_count(); ++op) {
    for (const StateEntry& state : batch.states)
      if (state.chained) traffic.chain_bytes += RankStateBytes(op);
    for (int rank = 0; FromRanks(batch) && rank < batch.plan.part.rank; ++rank)
      (Rings(batch.plan) ? traffic.ring_bytes : traffic.direct_bytes) += RankRowsBytes(batch.plan, op, rank);
    for (int rank = batch.plan.part.rank + 1; batch.keeping.reserved && rank < batch.plan.part.ranks; ++rank)
      traffic.direct_bytes += RankRowsBytes(batch.plan, op, rank);
  }
  traffic.switch_bytes = SwitchBytesOf(batch);
  traffic.pass_q_bytes = PassQBytesOf(batch);
  return traffic;
}

proto::PromptWork ComputeWorkerCore::PromptWorkOf(const MicroBatch& batch) const {
  proto::PromptWork work;
  std::vector<bool> counted(batch.plan.entries.size());
  for (const PromptEntry& prompt : batch.prompts) counted[prompt.entry] = true;
  for (const StateEntry& state : batch.states) counted[state.entry] = true;
  // Prompts that attention workers attend as they do decodes.
  const bool elsewhere = batch.prompts.empty() && batch.states.empty();
  for (size_t e = 0; e < counted.size() && elsewhere; ++e)
    counted[e] = static_cast<int>(batch.plan.entries[e].tokens.size()) >= options_.prompt_tokens;
  for (size_t e = 0; e < counted.size(); ++e)
    if (counted[e]) work.tokens += static_cast<int64_t>(batch.plan.entries[e].tokens.size());
  if (work.tokens == 0) return work;
  for (const StepEntry& entry : batch.plan.entries) work.step_tokens += static_cast<int64_t>(entry.tokens.size());
  work.scratch_blocks = scratch_.capacity();
  work.gives_rows = options_.rank_rows && scratch_.capacity() > 0;
  work.passes_on_rows = work.gives_rows && options_.rank_ring;
  // The planner has those of linear layers exchanged, too, where it may choose.
  work.switches_heads = options_.rank_switch && (options_.rank_state_switch || !table_.has_linear());
  work.gives_states = options_.linear_prompts && table_.has_linear();
  for (int g = 0; g < table_.group_count(); ++g) {
    const proto::SoftmaxSpec& spec = table_.views[g];
    if (spec.linear()) continue;
    double most_asked = 0;
    for (const WorkerPart& part : batch.parts) {
      double asked = 0;
      for (const proto::ShardStep& item : part.layouts[g].items) {
        if (item.attend_end == proto::kOpenEnd && !(elsewhere && counted[item.entry])) continue;
        const Position end = std::min({item.tokens.end, item.attend_end, item.ctx_len + item.q_len});
        const int64_t pairs = proto::SeenTokens(item.ctx_len, item.q_len, spec.window, item.tokens.begin, end);
        asked += proto::AttentionFlops(pairs, item.query_heads, spec);
      }
      most_asked = std::max(most_asked, asked);
    }
    double here = 0;
    for (const PromptEntry& prompt : batch.prompts) {
      if (prompt.switches || prompt.asks_ranks) {
        here += prompt.switches ? proto::SwitchFlopsOf(spec, SwitchRankOf(batch.plan))
                                : proto::PassQFlopsOf(spec, proto::PassQCuts(batch.plan), batch.plan.part.rank);
        continue;
      }
      const StepEntry& entry = batch.plan.entries[prompt.entry];
      const auto tokens = static_cast<Position>(entry.tokens.size());
      const int64_t pairs = proto::SeenTokens(entry.ctx_len, tokens, spec.window, prompt.begin, entry.ctx_len + tokens);
      here += proto::AttentionFlops(pairs, spec.query_heads, spec);
    }
    work.here_flops += table_.ops_in_group[g] * here;
    work.asked_flops += table_.ops_in_group[g] * most_asked;
  }
  return work;
}

}  // namespace dovetail::compute
