#include "scheduler/core/choices.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"

namespace dovetail::scheduler {

// ---- waiting ----

void Choices::Wait(Sequence& sequence) {
  sequence.phase = Phase::kWaiting;
  ++waiting_;
  if (!sequence.request->paused) parts_.queues.Push(sequence);
}

void Choices::EndWait(Sequence& sequence) {
  parts_.queues.Remove(sequence);
  --waiting_;
}

void Choices::AdmitSpill(Sequence& sequence) {
  Pause(*sequence.request);
  parts_.slots.Take(sequence, turn_.now());
}

void Choices::Strand(Sequence& sequence) {
  parts_.queues.Remove(sequence);
  parts_.stranded.Add(sequence, turn_.now());
}

void Choices::EndStranding() {
  for (Sequence* sequence : parts_.stranded.TakeAll())
    if (!sequence->request->paused) parts_.queues.Push(*sequence);
}

bool Choices::Pause(RequestState& request) {
  if (request.open_choices == 0 || request.paused) return false;
  request.paused = true;
  ++paused_;
  for (auto& sequence : request.choices) {
    if (sequence->phase == Phase::kWaiting) parts_.queues.Remove(*sequence);
  }
  return true;
}

bool Choices::Resume(RequestState& request) {
  if (!request.paused) return false;
  request.paused = false;
  --paused_;
  for (auto& sequence : request.choices) {
    if (sequence->phase == Phase::kWaiting && !parts_.stranded.Holds(*sequence)) parts_.queues.Push(*sequence);
  }
  return true;
}

// ---- beginning again ----

void Choices::Preempt(Sequence& sequence) {
  if (sequence.request->spills) return End(sequence, FinishReason::kCancelled);
  parts_.incarnations.Release(sequence);
  ++preemptions_;
  sequence.restarted = true;
  Wait(sequence);
  FinishForks(*sequence.request);
}

void Choices::GoElsewhere(Sequence& sequence, absl::Span<const WorkerId> refused_by) {
  Preempt(sequence);  // before: what it gives back itself changes nothing
  const KvBudget& budget = parts_.accounts.budget();
  for (const WorkerId worker : refused_by)
    if (Refusal* refusal = sequence.refusals.By(worker, budget))
      refusal->freed = budget.workers()[*budget.IndexOf(worker)].freed;
}

void Choices::Settle(Sequence& sequence) {
  if (sequence.placement.empty() || sequence.in_flight > 0) return;
  if (sequence.phase == Phase::kEnded) {
    parts_.incarnations.Release(sequence);
  } else if (sequence.lost) {
    Preempt(sequence);
  }
}

// ---- forks ----

void Choices::Fork(Sequence& parent) {
  RequestState& request = *parent.request;
  parent.shared_blocks = (parent.prompt_size() - 1) / kSegmentTokens;
  parts_.accounts.Share(parent);
  parts_.slots.DropPromises(request);
  request.unforked = 0;
  for (auto& child : request.choices) {
    if (child->phase != Phase::kUnforked) continue;
    if (parts_.incarnations.Fork(parent, *child)) {
      parent.awaits_forks = true;
    } else {
      child->restarted = true;
      Wait(*child);
    }
  }
}

void Choices::FinishForks(RequestState& request) {
  for (const auto& sequence : request.choices) {
    if (sequence->phase == Phase::kForking) return;
  }
  for (auto& sequence : request.choices) sequence->awaits_forks = false;
}

// ---- ends ----

GenerationUpdate Choices::UpdateFor(const Sequence& sequence) const {
  const RequestState& request = *sequence.request;
  return {.request = sequence.params().id,
          .choice = sequence.choice,
          .first_index = static_cast<int>(sequence.output.size()),
          .prompt_tokens = static_cast<int>(sequence.prompt_size()),
          .cached_tokens = request.cached_tokens,
          .queued_us = absl::ToInt64Microseconds(std::min(request.admitted, turn_.now()) - request.arrived)};
}

void Choices::End(Sequence& sequence, FinishReason reason, const absl::Status& status) {
  GenerationUpdate update = UpdateFor(sequence);
  update.reason = reason;
  update.error = std::string(status.message());
  update.error_code = status.code();
  End(sequence, std::move(update));
}

void Choices::LeaveWhereItIs(Sequence& sequence) {
  RequestState& request = *sequence.request;
  switch (sequence.phase) {
    case Phase::kUnforked:
      --request.unforked;
      parts_.slots.DropPromiseOfOne(request);
      break;
    case Phase::kWaiting:
      EndWait(sequence);
      parts_.stranded.Remove(sequence);
      break;
    case Phase::kProbing:
      parts_.probes.End(sequence);
      parts_.slots.GiveBack(sequence);
      break;
    default:
      if (sequence.in_flight == 0) parts_.incarnations.Release(sequence);
      parts_.groups.Withdraw(sequence);
  }
  if (sequence.phase != Phase::kUnforked) parts_.slots.DropPromises(request);
}

void Choices::End(Sequence& sequence, GenerationUpdate&& update) {
  DT_CHECK(sequence.phase != Phase::kEnded, "a choice ended twice");
  RequestState& request = *sequence.request;
  if (!request.spills) parts_.ended.Note(sequence);
  LeaveWhereItIs(sequence);
  sequence.phase = Phase::kEnded;
  FinishForks(request);

  update.choice_finished = true;
  update.attention_workers = sequence.attention_workers;
  update.compute_workers = sequence.compute_workers;
  update.request_finished = --request.open_choices == 0;
  if (!request.spills) turn_.Emit(std::move(update));
  if (request.open_choices == 0) {
    if (request.paused) --paused_;
    request.paused = false;
    parts_.requests.Finish(request);
  } else if (request.unforked > 0) {
    LetNextLead(request);
  }
}

void Choices::LetNextLead(RequestState& request) {
  Sequence* next = nullptr;
  for (auto& sequence : request.choices) {
    if (sequence->phase != Phase::kUnforked && sequence->phase != Phase::kEnded) return;  // one leads
    if (sequence->phase == Phase::kUnforked && next == nullptr) next = sequence.get();
  }
  if (next == nullptr) return;
  --request.unforked;
  Wait(*next);
}

void Choices::EndAll(RequestState& request, FinishReason reason, const absl::Status& status) {
  // The unforked first, so that none of them takes the lead for an instant.
  for (const bool unforked : {true, false}) {
    for (auto& sequence : request.choices) {
      if (sequence->phase == Phase::kEnded || (sequence->phase == Phase::kUnforked) != unforked) continue;
      End(*sequence, reason, status);
    }
  }
}

}  // namespace dovetail::scheduler
