#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "base/exact_sums.h"
#include "base/ids.h"
#include "proto/block_hash.h"
#include "proto/placement.h"
#include "requests/generation.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/prefill_cost.h"
#include "scheduler/core/refusals.h"
#include "scheduler/core/token_log.h"

// What the scheduler knows of a request and of each of its choices. The parts of the core (scheduler.cc) have the
// rules.
// Threads: thread-compatible; plain records of the core that owns them.

namespace dovetail::scheduler {

using requests::GenerationRequest;

struct Tenant;
struct RequestState;

enum class Phase : uint8_t {
  kUnforked,  // waits for a sibling to prefill the prompt
  kWaiting,   // in its tenant's queue, or kept out of it while paused; holds nothing
  kProbing,   // attention workers were asked what they hold of its prompt; holds a slot
  kOpening,   // OpenSequence is out; holds a slot and KV, as all below
  kForking,   // ForkSequence is out
  kMoving,    // another worker takes over what one holds of it; in no step meanwhile
  kReady,     // may be in steps
  kEnded,     // the choice is over; a step in flight may still contain it
};

// What is under way while a sequence is kMoving. It keeps its placement until the end.
struct Move {
  WorkerId from, to;
  Epoch from_epoch, to_epoch;
  uint16_t slot = 0;
  StepId step;                 // kNone until the taker has opened it
  bool extends = false;        // the taker held some of it before
  proto::Placement placement;  // once it has moved
  absl::Time deadline;
  absl::Time sent;           // when the giver was asked
  Position sent_tokens = 0;  // to send so many
};

// One choice of a request: its tokens, and the incarnation that holds KV for them now. Preemption ends an incarnation,
// not a choice.
struct Sequence {
  RequestState* request = nullptr;
  int choice = 0;
  Phase phase = Phase::kUnforked;
  TokenLog output;
  absl::InlinedVector<WorkerId, 2> attention_workers, compute_workers;  // of all incarnations
  bool restarted = false;  // had been admitted before: goes to the front of its tenant's queue

  // The incarnation. Each has an id of its own, so that answers to a former one are recognised.
  SequenceId id;
  proto::Placement placement;
  absl::InlinedVector<WorkerId, 4> awaited;  // workers that have not answered OpenSequence or ForkSequence
  std::vector<uint32_t> resumable;           // starts, in blocks and falling, that all answers so far offer
  absl::InlinedVector<WorkerId, 1> refused;  // workers whose answer was no
  uint32_t hashes_sent = 0;
  Charges charges;
  Position ctx_len = 0;       // committed tokens
  Position told_ctx_len = 0;  // what attention workers heard in the last step that finished
  Position reserved = 0;      // tokens that `charges` cover
  // What compute workers keep of this incarnation's K and V, as far as the core can tell (compute_worker/core/
  // prompt_scratch.h): only predictions depend on it.
  struct Kept {
    SequenceId incarnation;
    WorkerId worker;
    HeldTokens tokens;
  };
  std::vector<Kept> kept;
  Position divided = 0;        // PromptToPlan::divided
  bool group_charged = false;  // and the tokens of a prefill group, where others have windows or states
  int64_t shared_blocks = 0;   // leading blocks that the request's `shared` covers
  int64_t named_blocks = 0;    // blocks whose hashes went out in steps that finished
  bool stepped = false;        // a step of this incarnation finished
  bool moved = false;          // since its last step: the taker may not know yet how many of its tokens count
  bool shares_prefix = false;  // is one of the users of the request's `shared`
  bool awaits_forks = false;   // siblings are being forked from it
  bool on_slow_tier = false;   // some of it, with PlacementPolicy::kTiers: as of when steps were planned last
  // All of it lies on the attention worker of a pair, with this compute worker (AttentionWorkerJoined): as of then,
  // too.
  std::optional<WorkerId> pair;
  int micro_batch = -1;
  int in_flight = 0;          // steps that contain it: two if one follows the other
  int flying = 0;             // its new tokens in those
  bool lost = false;          // an attention worker under it restarted
  int planned = 0;            // new tokens in the step being built
  bool history_seen = false;  // and the lists of its sampling, by `history_worker`
  WorkerId history_worker;

  int damages = 0, damages_in_a_row = 0;  // kMostDamages, kMostDamagesInARow

  // When all before the last token is to be computed, by kPromptSlowdown; not known yet: absl::InfiniteFuture().
  absl::Time prefill_due = absl::InfiniteFuture();

  // While a compute worker compiles its grammar: since when, how long it is left out of steps, and until when.
  absl::Time grammar_asked = absl::InfiniteFuture();
  absl::Duration grammar_pause;
  absl::Time not_before = absl::InfinitePast();

  Move move;  // while kMoving
  // While kOpening on a slower tier: it moves there before its first step (prefix_fetch.h).
  std::optional<WorkerId> fetched_to;

  Refusals refusals;  // by all workers so far

  absl::Time stranded_until = absl::InfiniteFuture();  // of SchedulerCore::Impl::stranded_, since it last ran

  // Before placement.
  bool probed = false;
  uint64_t pin_id = 0;
  absl::Time probe_deadline;
  absl::InlinedVector<int, 4> probes_awaited;  // worker indices
  std::vector<std::pair<WorkerId, Epoch>> pinned_on;
  std::vector<uint32_t> hits;  // blocks, by worker index

  std::vector<proto::BlockHash> output_hashes;  // of blocks after the prompt's full ones

  const GenerationRequest& params() const;
  Position prompt_size() const { return static_cast<Position>(params().prompt.size()); }
  Position size() const { return prompt_size() + output.size(); }
  TokenId token(Position at) const { return at < prompt_size() ? params().prompt[at] : output[at - prompt_size()]; }
  bool leads() const;  // prefills the prompt on behalf of unforked siblings
  Position prefill_end() const { return leads() ? prompt_size() - 1 : size(); }
  std::tuple<uint64_t, int> age() const;  // smaller is older
  HeldTokens KeptBy(WorkerId worker) const;
  void NoteKept(WorkerId worker, const HeldTokens& tokens);
  bool LiesOn(WorkerId worker) const;  // a shard of it does
  bool MayStep(absl::Time now) const;  // it is ready, in no step, and nothing holds it up
  bool MayMove() const;                // to another attention worker: it may be in no step meanwhile
  static void RanOn(absl::InlinedVector<WorkerId, 2>& workers, WorkerId worker) {
    if (std::find(workers.begin(), workers.end(), worker) == workers.end()) workers.push_back(worker);
  }
};

// Prompt blocks that several choices use: charged once, until the last of them releases them.
struct SharedPrefix {
  int users = 0;
  Charges charges;
};

// The requests here that one client's call made together.
struct Call {
  int requests = 0;
  bool begun = false;  // one of them has run
};

struct RequestState {
  std::shared_ptr<const GenerationRequest> request;
  Tenant* tenant = nullptr;
  Call* call = nullptr;  // null: alone
  uint64_t ordinal = 0;  // of arrival
  absl::Time arrived;
  absl::Time admitted = absl::InfiniteFuture();  // when a choice first got a slot
  bool paused = false;
  bool spills = false;   // no client's: a copy of cached blocks on its way to a slower tier (cache_spill.h)
  bool started = false;  // an update with cached_tokens may have been sent
  int cached_tokens = 0;
  int open_choices = 0;
  int unforked = 0;
  int reserved_slots = 0;  // for unforked choices
  std::vector<std::unique_ptr<Sequence>> choices;
  SharedPrefix shared;
  proto::BlockHash chain_seed{};
  std::vector<proto::BlockHash> prompt_hashes;
  proto::SharedLists lists;  // none: the sampling has none

  // What the prompt itself yields, of choice 0.
  Position prompt_logprobs_next = 1;  // the first position not yet delivered
  Position prompt_told = 0;           // with prompt_progress: how much of the prompt the client knows to be read
  bool prompt_logits_done = false;
  std::vector<float> prompt_logits;
  int prompt_logits_rows = 0;
  Position pooled_next = 0;  // with pooling: the first position whose hidden state is not in `pooled` yet
  ExactSums pooled;

  // Positions whose hidden states pooling averages: [begin, end).
  struct Pooled {
    Position begin = 0, end = 0;
  };
  Pooled pooled_range() const;
};

inline RequestState::Pooled RequestState::pooled_range() const {
  const auto prompt = static_cast<Position>(request->prompt.size());
  switch (request->pooling) {
    case requests::Pooling::kNone: return {};
    case requests::Pooling::kMean: return {0, prompt};
    case requests::Pooling::kLast: return {prompt - 1, prompt};
    case requests::Pooling::kCls: return {0, 1};
  }
  return {};
}
inline const GenerationRequest& Sequence::params() const { return *request->request; }
inline bool Sequence::leads() const {
  return request->unforked > 0 && params().max_tokens > 0 && phase != Phase::kUnforked;
}
inline bool Sequence::LiesOn(WorkerId worker) const {
  return std::any_of(placement.begin(), placement.end(), [&](const proto::Shard& s) { return s.worker == worker; });
}
inline bool Sequence::MayStep(absl::Time now) const {
  return phase == Phase::kReady && in_flight == 0 && !request->paused && !awaits_forks && not_before <= now;
}
inline bool Sequence::MayMove() const {
  return phase == Phase::kReady && in_flight == 0 && !awaits_forks && planned == 0;
}
inline HeldTokens Sequence::KeptBy(WorkerId worker) const {
  for (const Kept& part : kept)
    if (part.worker == worker && part.incarnation == id) return part.tokens;
  return {};
}
inline void Sequence::NoteKept(WorkerId worker, const HeldTokens& tokens) {
  std::erase_if(kept, [&](const Kept& part) { return part.worker == worker || part.incarnation != id; });
  if (!tokens.empty()) kept.push_back({id, worker, tokens});
}
inline std::tuple<uint64_t, int> Sequence::age() const { return {request->ordinal, choice}; }

}  // namespace dovetail::scheduler
