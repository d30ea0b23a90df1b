#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/scheduler_impl.h"

// A sequence's time on attention workers: opened or forked, ready, released. Preemption ends it and lets another begin.

namespace dovetail::scheduler {

void SchedulerCore::Impl::On(const AttentionWorkerJoined& event) {
  const bool restarted = budget_.IndexOf(event.worker).has_value();
  if (!restarted) ForgetLostWorkers();
  budget_.Join(event.worker, event.epoch, event.kv_blocks, event.rate);
  if (restarted) {
    moves_.ForgetTo(event.worker, event.epoch);
    RestartSequencesOn(event.worker, event.epoch);
  }
  rebalance_ = true;
  EndStranding();
}

void SchedulerCore::Impl::Wait(Sequence& sequence) {
  sequence.phase = Phase::kWaiting;
  ++waiting_;
  if (!sequence.request->paused) queues_.Push(sequence);
}

void SchedulerCore::Impl::Open(Sequence& sequence, proto::Placement placement) {
  const Position size = sequence.size();
  sequence.phase = Phase::kOpening;
  sequence.id = SequenceId(next_sequence_++);
  incarnations_[sequence.id] = &sequence;
  sequence.placement = std::move(placement);
  sequence.awaited.clear();
  sequence.resumable.clear();
  sequence.refused.clear();
  sequence.ctx_len = sequence.told_ctx_len = 0;
  sequence.shared_blocks = sequence.named_blocks = 0;
  sequence.stepped = sequence.awaits_forks = sequence.history_seen = sequence.group_charged = false;
  sequence.reserved = BlocksOf(size) * kSegmentTokens;
  accounts_.Charge(sequence, accounts_.CostOf(sequence, sequence.reserved));
  if (sequence.choice == 0 && !sequence.request->prompt_logits_done) {
    sequence.request->prompt_logits.clear();
    sequence.request->prompt_logits_rows = 0;
  }

  sequence.hashes_sent = names_.Usable(sequence);
  std::vector<proto::BlockHash> hashes;
  names_.Append(sequence, 0, sequence.hashes_sent, hashes);
  for (const proto::Shard& shard : sequence.placement) {
    auto& awaited = sequence.awaited;
    if (std::find(awaited.begin(), awaited.end(), shard.worker) != awaited.end()) continue;
    awaited.push_back(shard.worker);
    Sequence::RanOn(sequence.attention_workers, shard.worker);
    OpenSequence open{.worker = shard.worker,
                      .epoch = shard.epoch,
                      .message = {.sequence = sequence.id, .shards = {}, .hashes = hashes}};
    for (const proto::Shard& other : sequence.placement) {
      if (other.worker == shard.worker) open.message.shards.push_back(other);
    }
    turn_.Act(std::move(open));
  }
}

void SchedulerCore::Impl::On(const SequenceOpened& event) {
  const auto at = incarnations_.find(event.opened.sequence);
  Sequence* sequence = at == incarnations_.end() ? nullptr : at->second;
  const bool expected =
      sequence != nullptr && budget_.IsCurrent(event.worker, event.epoch) &&
      (sequence->phase == Phase::kOpening || sequence->phase == Phase::kForking || sequence->phase == Phase::kMoving);
  auto* awaited = expected ? std::find(sequence->awaited.begin(), sequence->awaited.end(), event.worker) : nullptr;
  if (!expected || awaited == sequence->awaited.end()) {
    turn_.CountLate();
    return;
  }
  const bool first = sequence->resumable.empty();
  sequence->awaited.erase(awaited);
  if (event.opened.resumable.empty()) sequence->refused.push_back(event.worker);
  proto::Placement& opened_in = sequence->phase == Phase::kMoving ? sequence->move.placement : sequence->placement;
  proto::SetGeneration(opened_in, event.worker, event.opened.generation);
  std::vector<uint32_t> offered = event.opened.resumable;
  offered.push_back(0);
  if (first) {
    sequence->resumable = std::move(offered);
  } else {
    std::erase_if(sequence->resumable,
                  [&](uint32_t start) { return std::find(offered.begin(), offered.end(), start) == offered.end(); });
  }
  if (!sequence->awaited.empty()) return;
  const bool refused = !sequence->refused.empty();
  if (sequence->phase == Phase::kMoving)
    return refused ? GoElsewhere(*sequence, sequence->refused) : moves_.Send(*sequence);
  if (sequence->phase == Phase::kOpening) return refused ? RefusedToOpen(*sequence) : StartOpened(*sequence);

  const uint32_t wanted = static_cast<uint32_t>(sequence->ctx_len / kSegmentTokens);
  const auto& starts = sequence->resumable;
  if (!refused && std::find(starts.begin(), starts.end(), wanted) != starts.end()) {
    MakeReady(*sequence);
  } else {
    Preempt(*sequence);  // the fork failed somewhere: on its own, then
  }
  FinishForks(*sequence->request);
}

// An attention worker does not know the sequence, so no step may name it.
void SchedulerCore::Impl::RefusedToOpen(Sequence& sequence) {
  for (const WorkerId worker : sequence.refused) {
    Refusal* const refusal = sequence.refusals.By(worker, budget_);
    if (refusal == nullptr || ++refusal->opens < kMostRefusedOpens) continue;
    return EndRequest(*sequence.request, FinishReason::kError,
                      absl::UnavailableError(absl::StrCat("attention worker ", worker.value(),
                                                          " refused to open this request's sequence ",
                                                          kMostRefusedOpens, " times; its log may say why")));
  }
  GoElsewhere(sequence, sequence.refused);
}

void SchedulerCore::Impl::StartOpened(Sequence& sequence) {
  sequence.refusals.WasOpened();
  uint32_t start = 0;
  for (uint32_t offered : sequence.resumable) {
    if (offered <= sequence.hashes_sent) start = std::max(start, offered);
  }
  sequence.ctx_len = sequence.told_ctx_len = Position{start} * kSegmentTokens;
  sequence.named_blocks = start;
  if (names_.MayLookUp(sequence)) {
    stats_.prefix_queries += sequence.size();
    stats_.prefix_hits += sequence.ctx_len;
  }
  if (!sequence.request->started) {
    sequence.request->started = true;
    stats_.prompt_tokens += sequence.prompt_size();
    sequence.request->cached_tokens = static_cast<int>(sequence.ctx_len);
  }
  MakeReady(sequence);
}

void SchedulerCore::Impl::MakeReady(Sequence& sequence) {
  sequence.phase = Phase::kReady;
  batches_.Enlist(sequence);
}

// `parent` holds the prompt but its last token: what all choices have in common.
void SchedulerCore::Impl::Fork(Sequence& parent) {
  RequestState& request = *parent.request;
  const Position common = parent.prompt_size() - 1;
  parent.shared_blocks = common / kSegmentTokens;
  accounts_.Share(parent);

  slots_.DropPromises(request);
  request.unforked = 0;
  for (auto& child : request.choices) {
    if (child->phase != Phase::kUnforked) continue;
    if (ForkOne(parent, *child)) {
      parent.awaits_forks = true;
    } else {
      child->restarted = true;
      Wait(*child);
    }
  }
}

bool SchedulerCore::Impl::ForkOne(Sequence& parent, Sequence& child) {
  if (!slots_.Has(1)) return false;
  const Position common = parent.prompt_size() - 1;
  const Position reserved = BlocksOf(parent.prompt_size()) * kSegmentTokens;
  const Charges cost = accounts_.CostOf(parent, reserved);
  if (budget_.Lacking(cost, {}).has_value()) return false;

  child.phase = Phase::kForking;
  child.restarted = true;
  child.id = SequenceId(next_sequence_++);
  incarnations_[child.id] = &child;
  child.placement = parent.placement;
  child.refused.clear();
  for (proto::Shard& shard : child.placement) shard.generation = KvGeneration(0);
  child.ctx_len = common;
  child.told_ctx_len = parent.told_ctx_len;
  child.named_blocks = parent.named_blocks;
  child.shared_blocks = parent.shared_blocks;
  child.reserved = reserved;
  child.stepped = true;
  slots_.Take(child, turn_.now());
  accounts_.Charge(child, cost);
  accounts_.TakeShare(child);
  for (const proto::Shard& shard : child.placement) {
    if (std::find(child.awaited.begin(), child.awaited.end(), shard.worker) != child.awaited.end()) continue;
    child.awaited.push_back(shard.worker);
    Sequence::RanOn(child.attention_workers, shard.worker);
    turn_.Act(ForkSequence{.worker = shard.worker,
                           .epoch = shard.epoch,
                           .message = {.parent = parent.id,
                                       .child = child.id,
                                       .ctx_len = common,
                                       .generation = proto::GenerationAt(parent.placement, shard.worker)}});
  }
  return true;
}

void SchedulerCore::Impl::FinishForks(RequestState& request) {
  for (const auto& sequence : request.choices) {
    if (sequence->phase == Phase::kForking) return;
  }
  for (auto& sequence : request.choices) sequence->awaits_forks = false;
}

void SchedulerCore::Impl::Release(Sequence& sequence) {
  DT_CHECK(sequence.in_flight == 0, "a sequence was released under a step");
  ++releases_;
  if (sequence.phase == Phase::kMoving) moves_.Abandon(sequence);
  proto::ReleaseSequence message{
      .sequence = sequence.id, .ctx_len = sequence.stepped ? sequence.ctx_len : 0, .hashes = {}};
  if (sequence.stepped)
    names_.Append(sequence, sequence.named_blocks, sequence.ctx_len / kSegmentTokens, message.hashes);
  for (size_t i = 0; i < sequence.placement.size(); ++i) {
    const proto::Shard& shard = sequence.placement[i];
    const auto told = std::find_if(sequence.placement.begin(), sequence.placement.begin() + i,
                                   [&](const proto::Shard& other) { return other.worker == shard.worker; });
    if (told != sequence.placement.begin() + i || !budget_.IsCurrent(shard.worker, shard.epoch)) continue;
    message.generation = shard.generation;
    turn_.Act(ReleaseSequence{.worker = shard.worker, .epoch = shard.epoch, .message = message});
  }
  accounts_.Return(sequence);
  sequence.awaits_forks = false;
  batches_.Leave(sequence);
  sequence.placement.clear();
  sequence.awaited.clear();
  sequence.lost = false;
  incarnations_.erase(sequence.id);
  slots_.GiveBack(sequence);
}

void SchedulerCore::Impl::Preempt(Sequence& sequence) {
  Release(sequence);
  ++stats_.preemptions;
  sequence.restarted = true;
  Wait(sequence);
  FinishForks(*sequence.request);
}

}  // namespace dovetail::scheduler
