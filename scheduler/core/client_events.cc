#include "scheduler/core/client_events.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "scheduler/core/request_checks.h"

namespace dovetail::scheduler {

void ClientEvents::On(const RequestArrived& event) {
  if (event.request == nullptr || requests_.Find(event.request->id) != nullptr) return turn_.CountLate();
  const GenerationRequest& params = *event.request;
  if (absl::Status status = CheckRequest(params, options_); !status.ok()) return Refuse(params, status);
  const bool full = choices_.waiting() >= options_.max_queued_requests;
  if (full && !requests_.HasBegun(params.call) && !MakeRoomInQueue(params.tenant))
    return Refuse(params, QueueFull(params.tenant));
  RequestState& request = requests_.Add(event.request, turn_.now());
  // The first choice prefills the prompt for those that are to be forked from it.
  for (auto& sequence : request.choices)
    if (sequence->choice == 0 || request.unforked == 0) choices_.Wait(*sequence);
}

void ClientEvents::On(const RequestCancelled& event) {
  RequestState* const request = requests_.Find(event.request);
  if (request == nullptr || request->open_choices == 0) return turn_.CountLate();
  choices_.EndAll(*request, FinishReason::kCancelled, absl::OkStatus());
}

void ClientEvents::On(const ChoiceStopped& event) {
  RequestState* const request = requests_.Find(event.request);
  const bool known = request != nullptr && event.choice >= 0 && event.choice < request->request->choices;
  if (!known || request->choices[event.choice]->phase == Phase::kEnded) return turn_.CountLate();
  choices_.End(*request->choices[event.choice], FinishReason::kStop);
}

void ClientEvents::On(const RequestPaused& event) {
  RequestState* const request = requests_.Find(event.request);
  if (request == nullptr || !choices_.Pause(*request)) turn_.CountLate();
}

void ClientEvents::On(const RequestResumed& event) {
  RequestState* const request = requests_.Find(event.request);
  if (request == nullptr || !choices_.Resume(*request)) turn_.CountLate();
}

// kAborted for a tenant that has its part of the queue: others may still come. kResourceExhausted: none may.
absl::Status ClientEvents::QueueFull(const std::string& tenant) const {
  if (queues_.HasItsPart(tenant)) {
    return absl::AbortedError(
        absl::StrCat("the queue holds ", options_.max_queued_requests,
                     " requests (--max-num-queued-reqs), and this tenant has its part of it; try again later"));
  }
  return ResourceExhausted("the queue holds ", options_.max_queued_requests,
                           " requests (--max-num-queued-reqs); try again later");
}

// A full queue is shared, too: the tenant that fills most of it loses the last one for a tenant that has fewer there.
bool ClientEvents::MakeRoomInQueue(const std::string& tenant) {
  Sequence* const last = queues_.LastOfLongest(tenant);
  if (last == nullptr) return false;
  choices_.EndAll(
      *last->request, FinishReason::kError,
      absl::AbortedError(absl::StrCat("the queue holds ", options_.max_queued_requests,
                                      " requests (--max-num-queued-reqs), and a tenant with fewer needed a place; "
                                      "try again later")));
  return true;
}

void ClientEvents::Refuse(const GenerationRequest& request, const absl::Status& status) {
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

}  // namespace dovetail::scheduler
