#include "scheduler/core/invariants.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace dovetail::scheduler {
namespace {

template <typename Key, typename Value>
using Map = absl::flat_hash_map<Key, Value>;  // nothing depends on its order but which fault is named first
template <typename Key>
using Set = absl::flat_hash_set<Key>;

template <typename... Parts>
absl::Status Broken(const Sequence& sequence, const Parts&... what) {
  return Internal("request ", sequence.params().id.value(), " choice ", sequence.choice, " in phase ",
                  static_cast<int>(sequence.phase), ": ", what...);
}

// It has blocks, or has asked for some: an incarnation of it is on attention workers.
bool IsPlaced(const Sequence& sequence) { return !sequence.placement.empty(); }

template <typename Visit>
void ForEachChoice(const RequestTable& requests, Visit&& visit) {
  requests.ForEach([&](const RequestState& request) {
    for (const auto& sequence : request.choices) visit(*sequence);
  });
}

// The first of several checks that fails.
class First {
 public:
  void Is(absl::Status status) { status_.Update(std::move(status)); }
  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

}  // namespace

absl::Status Invariants::Check() const {
  DT_RETURN_IF_ERROR(CheckRequests());
  DT_RETURN_IF_ERROR(CheckWaiting());
  DT_RETURN_IF_ERROR(CheckSlots());
  DT_RETURN_IF_ERROR(CheckCharges());
  DT_RETURN_IF_ERROR(CheckMembers());
  DT_RETURN_IF_ERROR(CheckSteps());
  return CheckUnderWay();
}

// What requests count of their choices.
absl::Status Invariants::CheckRequests() const {
  First broken;
  int paused = 0;
  parts_.requests.ForEach([&](const RequestState& request) {
    int open = 0, unforked = 0, sharing = 0;
    for (const auto& sequence : request.choices) {
      open += sequence->phase != Phase::kEnded;
      unforked += sequence->phase == Phase::kUnforked;
      sharing += sequence->shares_prefix;
    }
    const Sequence& first = *request.choices[0];
    paused += request.paused;
    if (open != request.open_choices) broken.Is(Broken(first, open, " choices are open, not ", request.open_choices));
    if (unforked != request.unforked) broken.Is(Broken(first, unforked, " are to be forked, not ", request.unforked));
    if (sharing != request.shared.users)
      broken.Is(Broken(first, sharing, " share the prompt, not ", request.shared.users));
    if (sharing == 0 && !request.shared.charges.empty()) broken.Is(Broken(first, "nothing shares what is charged"));
  });
  if (broken.ok() && paused != parts_.choices.paused())
    return Internal(paused, " requests are paused, not ", parts_.choices.paused());
  return broken.status();
}

// A choice that waits is in its tenant's queue, unless its request is paused or no worker is large enough.
absl::Status Invariants::CheckWaiting() const {
  const Set<const Sequence*> stranded(parts_.stranded.waiting().begin(), parts_.stranded.waiting().end());
  Set<const Tenant*> tenants;
  Set<const Sequence*> queued;
  size_t in_queues = 0;
  parts_.requests.ForEach([&](const RequestState& request) {
    if (!tenants.insert(request.tenant).second) return;
    for (const auto& [key, sequence] : request.tenant->waiting) queued.insert(sequence);
    in_queues += request.tenant->waiting.size();
  });
  First broken;
  int waiting = 0;
  ForEachChoice(parts_.requests, [&](const Sequence& sequence) {
    const bool waits = sequence.phase == Phase::kWaiting;
    const bool is_stranded = stranded.contains(&sequence);
    const bool in_queue = queued.erase(&sequence) > 0;
    waiting += waits;
    in_queues -= in_queue;
    if (is_stranded && !waits) broken.Is(Broken(sequence, "is stranded and does not wait"));
    if (in_queue != (waits && !sequence.request->paused && !is_stranded))
      broken.Is(Broken(sequence, in_queue ? "is in a queue" : "is in no queue"));
  });
  if (in_queues != 0) broken.Is(Internal("a queue has ", in_queues, " entries that are no choice's"));
  if (broken.ok() && waiting != parts_.choices.waiting())
    return Internal(waiting, " choices wait, not ", parts_.choices.waiting());
  return broken.status();
}

// Which sequences hold a slot, and what is promised.
absl::Status Invariants::CheckSlots() const {
  const Set<const Sequence*> active(parts_.slots.active().begin(), parts_.slots.active().end());
  if (active.size() != parts_.slots.active().size()) return Internal("a sequence holds two slots");
  First broken;
  Map<const Tenant*, int> slots;
  int promised = 0;
  parts_.requests.ForEach([&](const RequestState& request) {
    promised += request.reserved_slots;
    slots[request.tenant] += request.reserved_slots;
  });
  ForEachChoice(parts_.requests, [&](const Sequence& sequence) {
    const bool holds = active.contains(&sequence);
    slots[sequence.request->tenant] += holds;
    const bool runs = sequence.phase >= Phase::kProbing && sequence.phase <= Phase::kReady;
    const bool ends = sequence.phase == Phase::kEnded && sequence.in_flight > 0;
    if (holds != (runs || ends)) broken.Is(Broken(sequence, holds ? "holds a slot" : "holds no slot"));
    if (IsPlaced(sequence) != (holds && sequence.phase != Phase::kProbing))
      broken.Is(Broken(sequence, IsPlaced(sequence) ? "has a placement" : "has no placement"));
  });
  for (const auto& [tenant, count] : slots)
    if (tenant->slots != count) broken.Is(Internal(tenant->name, " has ", count, " slots, not ", tenant->slots));
  if (broken.ok() && static_cast<int>(active.size()) + promised != parts_.slots.used())
    return Internal(promised, " slots are promised, and ", active.size(), " held, not ", parts_.slots.used());
  return broken.status();
}

// What the budget counts is what sequences and shared prompts are charged for.
absl::Status Invariants::CheckCharges() const {
  const auto& workers = parts_.accounts.budget().workers();
  std::vector<uint64_t> used(workers.size());
  Map<const Tenant*, uint64_t> blocks;
  const auto add = [&](const Tenant* tenant, const Charges& charges) {
    for (const struct Charge& charge : charges) used[static_cast<size_t>(charge.worker)] += charge.blocks;
    blocks[tenant] += TotalBlocks(charges);
  };
  First broken;
  parts_.requests.ForEach([&](const RequestState& request) { add(request.tenant, request.shared.charges); });
  ForEachChoice(parts_.requests, [&](const Sequence& sequence) {
    add(sequence.request->tenant, sequence.charges);
    for (const struct Charge& charge : sequence.charges) {
      const WorkerId worker = workers[static_cast<size_t>(charge.worker)].id;
      const bool takes = sequence.phase == Phase::kMoving && sequence.move.to == worker;
      if (charge.blocks > 0 && !takes && !sequence.LiesOn(worker))
        broken.Is(Broken(sequence, "is charged on worker ", worker.value(), ", where it does not lie"));
    }
    if (!IsPlaced(sequence) && TotalBlocks(sequence.charges) > 0) broken.Is(Broken(sequence, "is charged for nothing"));
    if (IsPlaced(sequence) && sequence.ctx_len + sequence.flying > sequence.reserved)
      broken.Is(Broken(sequence, "has room for ", sequence.reserved, " tokens, not for ", sequence.ctx_len, " and ",
                       sequence.flying, " in flight"));
    if (IsPlaced(sequence) && sequence.shared_blocks > 0 && !sequence.shares_prefix)
      broken.Is(Broken(sequence, "is charged without the blocks that it does not share"));
  });
  for (size_t i = 0; i < workers.size(); ++i)
    if (workers[i].used != used[i])
      broken.Is(Internal("worker ", workers[i].id.value(), " has ", used[i], " blocks charged, not ", workers[i].used));
  for (const auto& [tenant, count] : blocks)
    if (tenant->kv_blocks != count)
      broken.Is(Internal(tenant->name, " is charged for ", count, " blocks, not ", tenant->kv_blocks));
  return broken.status();
}

// Ready sequences are in one micro-batch each, others in none; and incarnations are known by their ids.
absl::Status Invariants::CheckMembers() const {
  First broken;
  size_t members = 0, placed = 0;
  ForEachChoice(parts_.requests, [&](const Sequence& sequence) {
    placed += IsPlaced(sequence);
    if (IsPlaced(sequence) && parts_.incarnations.Find(sequence.id) != &sequence)
      broken.Is(Broken(sequence, "is not known by its id"));
    const bool steps = sequence.phase == Phase::kReady || sequence.phase == Phase::kMoving ||
                       (sequence.phase == Phase::kEnded && IsPlaced(sequence));
    if (steps != (sequence.micro_batch >= 0)) return broken.Is(Broken(sequence, "is in the wrong micro-batch"));
    if (!steps) return;
    ++members;
    const auto& of_its = parts_.batches[sequence.micro_batch].members;
    if (std::find(of_its.begin(), of_its.end(), &sequence) == of_its.end())
      broken.Is(Broken(sequence, "is not in its micro-batch"));
  });
  for (const MicroBatch& batch : parts_.batches) {
    const bool by_age = std::is_sorted(batch.members.begin(), batch.members.end(),
                                       [](const Sequence* a, const Sequence* b) { return a->age() < b->age(); });
    if (!by_age) broken.Is(Internal("members of a micro-batch are not in order"));
  }
  if (broken.ok() && members != parts_.batches.members())
    return Internal("micro-batches have members that do not step");
  if (broken.ok() && placed != parts_.incarnations.size()) return Internal("an id is known of no incarnation");
  return broken.status();
}

// What sequences take to be in flight is what steps contain.
absl::Status Invariants::CheckSteps() const {
  struct InSteps {
    int steps = 0;
    int tokens = 0;
  };
  First broken;
  Map<const Sequence*, InSteps> in_steps;
  for (const MicroBatch& batch : parts_.batches) {
    if (batch.in_flight && batch.entries.empty()) return Internal("a step in flight has no entries");
    if (!batch.in_flight && batch.group == StepId() && !batch.entries.empty())
      return Internal("a step that is over has entries");
    for (const PlannedEntry& entry : batch.entries) {
      ++in_steps[entry.sequence].steps;
      in_steps[entry.sequence].tokens += entry.q_len;
    }
  }
  ForEachChoice(parts_.requests, [&](const Sequence& sequence) {
    const auto at = in_steps.find(&sequence);
    const InSteps found = at == in_steps.end() ? InSteps() : at->second;
    if (at != in_steps.end()) in_steps.erase(at);
    if (found.steps != sequence.in_flight || found.tokens != sequence.flying)
      broken.Is(Broken(sequence, "is in ", found.steps, " steps with ", found.tokens, " tokens, not in ",
                       sequence.in_flight, " with ", sequence.flying));
    if (sequence.planned != 0) broken.Is(Broken(sequence, "was planned and is in no step"));
  });
  if (broken.ok() && !in_steps.empty()) return Internal("a step contains a sequence that was forgotten");
  return broken.status();
}

// Probes and moves are of sequences that wait for them, in the order of their deadlines.
absl::Status Invariants::CheckUnderWay() const {
  First broken;
  size_t probing = 0, moving = 0;
  ForEachChoice(parts_.requests, [&](const Sequence& sequence) {
    probing += sequence.phase == Phase::kProbing;
    moving += sequence.phase == Phase::kMoving;
    const bool awaits = sequence.phase == Phase::kOpening || sequence.phase == Phase::kForking;
    if (awaits && sequence.awaited.empty()) broken.Is(Broken(sequence, "waits for no answer"));
    if (sequence.phase == Phase::kMoving && sequence.in_flight > 0) broken.Is(Broken(sequence, "moves under a step"));
  });
  const auto& probes = parts_.probes.probing();
  const auto& moves = parts_.moves.moving();
  if (probes.size() != probing) broken.Is(Internal(probing, " sequences probe, not ", probes.size()));
  if (moves.size() != moving) broken.Is(Internal(moving, " sequences move, not ", moves.size()));
  Set<uint16_t> slots;
  for (const Sequence* sequence : moves)
    if (sequence->phase != Phase::kMoving || !slots.insert(sequence->move.slot).second)
      broken.Is(Broken(*sequence, "has no move of its own"));
  for (const Sequence* sequence : probes)
    if (sequence->phase != Phase::kProbing || sequence->probes_awaited.empty())
      broken.Is(Broken(*sequence, "waits for no probe"));
  const auto later = [](const Sequence* a, const Sequence* b) { return a->probe_deadline < b->probe_deadline; };
  if (!std::is_sorted(probes.begin(), probes.end(), later)) broken.Is(Internal("probes are not in order"));
  return broken.status();
}

}  // namespace dovetail::scheduler
