#include "scheduler/core/request_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "scheduler/core/block_hasher.h"

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

RequestState& RequestTable::Add(const std::shared_ptr<const GenerationRequest>& params, absl::Time now) {
  auto& request = requests_[params->id];
  DT_CHECK(request == nullptr, "a request was added twice");
  request = std::make_unique<RequestState>();
  request->request = params;
  request->ordinal = next_ordinal_++;
  request->arrived = now;
  request->tenant = &queues_.Enter(params->tenant);
  if (params->call != 0) {
    request->call = &calls_[params->call];
    ++request->call->requests;
  }
  request->chain_seed = ChainSeed(options_.model_digest, params->tenant, params->cache_salt);
  request->open_choices = params->choices;
  request->lists = ListsOf(*params);
  for (int i = 0; i < params->choices; ++i) {
    request->choices.push_back(std::make_unique<Sequence>());
    request->choices.back()->request = request.get();
    request->choices.back()->choice = i;
  }
  // With one prompt token there is nothing to prefill together.
  const bool together = params->prompt.size() > 1 || params->max_tokens == 0;
  request->unforked = together ? params->choices - 1 : 0;
  return *request;
}

RequestState* RequestTable::Find(RequestId id) {
  const auto at = requests_.find(id);
  return at == requests_.end() ? nullptr : at->second.get();
}

bool RequestTable::HasBegun(uint64_t call) const {
  const auto at = calls_.find(call);
  return at != calls_.end() && at->second.begun;
}

void RequestTable::ForgetFinished() {
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
