#include <algorithm>
#include <utility>

#include "base/check.h"
#include "scheduler/core/block_hasher.h"
#include "scheduler/core/scheduler_impl.h"

// Arrival and ends of requests and of their choices.

namespace dovetail::scheduler {

namespace {

proto::SharedLists ListsOf(const GenerationRequest& params) {
  auto lists = std::make_shared<proto::SamplingLists>();
  lists->logit_bias = params.sampling.logit_bias;
  lists->allowed_token_ids = params.sampling.allowed_token_ids;
  lists->banned_token_ids = params.sampling.banned_token_ids;
  if (params.min_tokens > 0) lists->banned_early = params.stop_token_ids;
  if (params.sampling.follows_grammar) lists->grammar = params.sampling.grammar;
  return {lists->empty() ? nullptr : std::move(lists)};
}

}  // namespace

void SchedulerCore::Impl::On(const RequestArrived& event) {
  if (event.request == nullptr || Find(event.request->id) != nullptr) {
    turn_.CountLate();
    return;
  }
  const GenerationRequest& params = *event.request;
  if (absl::Status status = CheckRequest(params, options_); !status.ok()) return Refuse(params, status);
  const auto call = calls_.find(params.call);
  const bool begun = call != calls_.end() && call->second.begun;
  if (waiting_ >= options_.max_queued_requests && !begun && !MakeRoomInQueue(params.tenant)) {
    return Refuse(params, QueueFull(params.tenant));
  }
  auto& request = requests_[params.id];
  request = std::make_unique<RequestState>();
  request->request = event.request;
  request->ordinal = next_ordinal_++;
  request->arrived = turn_.now();
  request->tenant = &queues_.Enter(params.tenant);
  if (params.call != 0) {
    request->call = &calls_[params.call];
    ++request->call->requests;
  }
  request->chain_seed = ChainSeed(options_.model_digest, params.tenant, params.cache_salt);
  request->open_choices = params.choices;
  request->lists = ListsOf(params);
  for (int i = 0; i < params.choices; ++i) {
    request->choices.push_back(std::make_unique<Sequence>());
    request->choices.back()->request = request.get();
    request->choices.back()->choice = i;
  }
  // With one prompt token there is nothing to prefill together.
  const bool together = params.prompt.size() > 1 || params.max_tokens == 0;
  request->unforked = together ? params.choices - 1 : 0;
  for (auto& sequence : request->choices) {
    if (sequence->choice == 0 || !together) Wait(*sequence);
  }
}

// kAborted for a tenant that has its part of the queue: others may still come. kResourceExhausted: nobody may.
absl::Status SchedulerCore::Impl::QueueFull(const std::string& tenant) const {
  if (queues_.HasItsPart(tenant)) {
    return absl::AbortedError(
        absl::StrCat("the queue holds ", options_.max_queued_requests,
                     " requests (--max-num-queued-reqs), and this tenant has its part of it; try again later"));
  }
  return ResourceExhausted("the queue holds ", options_.max_queued_requests,
                           " requests (--max-num-queued-reqs); try again later");
}

// A full queue is shared, too: whoever fills most of it loses the last one for a tenant that has fewer there.
bool SchedulerCore::Impl::MakeRoomInQueue(const std::string& tenant) {
  Sequence* last = queues_.LastOfLongest(tenant);
  if (last == nullptr) return false;
  EndRequest(*last->request, FinishReason::kError, PushedOut());
  return true;
}

absl::Status SchedulerCore::Impl::PushedOut() const {
  return absl::AbortedError(
      absl::StrCat("the queue holds ", options_.max_queued_requests,
                   " requests (--max-num-queued-reqs), and a tenant with fewer needed a place; try again later"));
}

void SchedulerCore::Impl::Refuse(const GenerationRequest& request, const absl::Status& status) {
  const int choices = std::clamp(request.choices, 1, kMaxChoices);
  for (int i = 0; i < choices; ++i) {
    turn_.Emit({.request = request.id,
                .choice = i,
                .choice_finished = true,
                .reason = FinishReason::kError,
                .error = std::string(status.message()),
                .error_code = status.code(),
                .request_finished = i + 1 == choices,
                .prompt_tokens = static_cast<int>(request.prompt.size())});
  }
}

void SchedulerCore::Impl::On(const RequestCancelled& event) {
  RequestState* request = Find(event.request);
  if (request == nullptr || request->open_choices == 0) {
    turn_.CountLate();
    return;
  }
  EndRequest(*request, FinishReason::kCancelled, absl::OkStatus());
}

void SchedulerCore::Impl::On(const ChoiceStopped& event) {
  RequestState* request = Find(event.request);
  const bool known = request != nullptr && event.choice >= 0 && event.choice < request->request->choices;
  if (!known || request->choices[event.choice]->phase == Phase::kEnded) {
    turn_.CountLate();
    return;
  }
  EndChoice(*request->choices[event.choice], FinishReason::kStop);
}

void SchedulerCore::Impl::On(const RequestPaused& event) {
  RequestState* request = Find(event.request);
  if (request == nullptr || request->open_choices == 0 || request->paused) {
    turn_.CountLate();
    return;
  }
  request->paused = true;
  ++paused_;
  for (auto& sequence : request->choices) {
    if (sequence->phase == Phase::kWaiting) queues_.Remove(*sequence);
  }
}

void SchedulerCore::Impl::On(const RequestResumed& event) {
  RequestState* request = Find(event.request);
  if (request == nullptr || !request->paused) {
    turn_.CountLate();
    return;
  }
  request->paused = false;
  --paused_;
  for (auto& sequence : request->choices) {
    if (sequence->phase == Phase::kWaiting) queues_.Push(*sequence);
  }
}

RequestState* SchedulerCore::Impl::Find(RequestId id) {
  const auto at = requests_.find(id);
  return at == requests_.end() ? nullptr : at->second.get();
}

GenerationUpdate SchedulerCore::Impl::UpdateFor(const Sequence& sequence) const {
  return {.request = sequence.params().id,
          .choice = sequence.choice,
          .first_index = static_cast<int>(sequence.output.size()),
          .prompt_tokens = static_cast<int>(sequence.prompt_size()),
          .cached_tokens = sequence.request->cached_tokens,
          .queued_us =
              absl::ToInt64Microseconds(std::min(sequence.request->admitted, turn_.now()) - sequence.request->arrived)};
}

void SchedulerCore::Impl::EndChoice(Sequence& sequence, FinishReason reason, const absl::Status& status) {
  GenerationUpdate update = UpdateFor(sequence);
  update.reason = reason;
  update.error = std::string(status.message());
  update.error_code = status.code();
  EndChoice(sequence, std::move(update));
}

void SchedulerCore::Impl::EndChoice(Sequence& sequence, GenerationUpdate&& update) {
  DT_CHECK(sequence.phase != Phase::kEnded, "a choice ended twice");
  RequestState& request = *sequence.request;
  switch (sequence.phase) {
    case Phase::kUnforked:
      --request.unforked;
      slots_.DropPromiseOfOne(request);
      break;
    case Phase::kWaiting:
      --waiting_;
      queues_.Remove(sequence);
      stranded_.Remove(sequence);
      break;
    case Phase::kProbing:
      probes_.End(sequence);
      slots_.GiveBack(sequence);
      break;
    default:
      if (sequence.in_flight == 0) Release(sequence);
      groups_.Withdraw(sequence);
  }
  if (sequence.phase != Phase::kUnforked) slots_.DropPromises(request);
  sequence.phase = Phase::kEnded;
  FinishForks(request);

  update.choice_finished = true;
  update.attention_workers = sequence.attention_workers;
  update.compute_workers = sequence.compute_workers;
  update.request_finished = --request.open_choices == 0;
  turn_.Emit(std::move(update));
  if (request.open_choices == 0) {
    if (request.paused) --paused_;
    request.paused = false;
    finished_.push_back(request.request->id);
  } else if (request.unforked > 0) {
    LetNextChoiceLead(request);
  }
}

void SchedulerCore::Impl::LetNextChoiceLead(RequestState& request) {
  Sequence* next = nullptr;
  for (auto& sequence : request.choices) {
    if (sequence->phase != Phase::kUnforked && sequence->phase != Phase::kEnded) return;  // somebody leads
    if (sequence->phase == Phase::kUnforked && next == nullptr) next = sequence.get();
  }
  if (next == nullptr) return;
  --request.unforked;
  Wait(*next);
}

void SchedulerCore::Impl::EndRequest(RequestState& request, FinishReason reason, const absl::Status& status) {
  // The unforked first, so that none of them takes the lead for an instant.
  for (const bool unforked : {true, false}) {
    for (auto& sequence : request.choices) {
      if (sequence->phase == Phase::kEnded || (sequence->phase == Phase::kUnforked) != unforked) continue;
      EndChoice(*sequence, reason, status);
    }
  }
}

void SchedulerCore::Impl::ForgetFinished() {
  std::erase_if(finished_, [this](RequestId id) {
    const auto at = requests_.find(id);
    DT_CHECK(at != requests_.end(), "a request was forgotten twice");
    RequestState& request = *at->second;
    for (const auto& sequence : request.choices) {
      if (sequence->in_flight > 0) return false;
    }
    queues_.Leave(*request.tenant);
    if (request.call != nullptr && --request.call->requests == 0) calls_.erase(request.request->call);
    requests_.erase(at);
    return true;
  });
}

}  // namespace dovetail::scheduler
