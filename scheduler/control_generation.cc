#include "scheduler/control_generation.h"

#include <utility>

#include "control/cache_messages.h"
#include "control/generation_messages.h"

namespace dovetail::scheduler {

namespace pb = control::v1;

uint64_t ControlGeneration::AddServer(SendFn send) {
  const uint64_t id = next_server_++;
  servers_[id].send = std::move(send);
  return id;
}

void ControlGeneration::RemoveServer(uint64_t server) {
  const auto it = servers_.find(server);
  if (it == servers_.end()) return;
  const auto requests = std::move(it->second.requests);
  servers_.erase(it);
  for (const auto& [theirs, ours] : requests) {
    origins_.erase(ours);
    handle_(RequestCancelled{ours});
  }
}

void ControlGeneration::Refuse(Server& server, RequestId theirs, const absl::Status& status) {
  GenerationUpdate update;
  update.request = theirs;
  update.choice_finished = update.request_finished = true;
  update.reason = FinishReason::kError;
  update.error = std::string(status.message());
  update.error_code = status.code();
  control::ToProto(update, *server.pending.add_updates());
}

void ControlGeneration::SetOutage(const absl::Status& outage) {
  outage_ = outage;
  if (outage.ok()) return;
  origins_.clear();
  for (auto& [id, server] : servers_)
    for (const auto& [theirs, ours] : std::exchange(server.requests, {})) {
      Refuse(server, theirs, outage);
      handle_(RequestCancelled{ours});
    }
}

void ControlGeneration::Submit(Server& server, uint64_t id, RequestId theirs, const pb::GenerationRequest& message) {
  if (server.requests.contains(theirs))
    return Refuse(server, theirs, absl::AlreadyExistsError(absl::StrCat("request ", theirs.value(), " runs already")));
  if (!outage_.ok()) return Refuse(server, theirs, outage_);
  if (static_cast<int>(origins_.size()) >= max_requests_)
    return Refuse(server, theirs,
                  ResourceExhausted("the queue is full: ", origins_.size(), " requests are being served or waiting"));
  auto request = control::FromProto(message);
  if (!request.ok()) return Refuse(server, theirs, request.status());
  const RequestId ours(next_request_++);
  request->id = ours;
  // Servers number their calls by themselves.
  if (request->call != 0) request->call = id << 48 | (request->call & ((uint64_t{1} << 48) - 1));
  server.requests[theirs] = ours;
  origins_[ours] = {id, theirs};
  handle_(RequestArrived{std::make_shared<const GenerationRequest>(*std::move(request))});
}

void ControlGeneration::OnCommands(uint64_t id, const pb::GenerationCommands& commands) {
  for (const pb::GenerationCommand& command : commands.commands()) {
    const auto server = servers_.find(id);
    if (server == servers_.end()) return;
    if (command.has_watch_cache()) {
      server->second.watches_cache = true;
      requests::CacheEvents all = cache_snapshot_ ? cache_snapshot_() : requests::CacheEvents{.reset = true};
      if (all.events.size() > kMaxSnapshotBlocks) all.events.resize(kMaxSnapshotBlocks);
      SendCache(server->second, all);
      continue;
    }
    const RequestId theirs(command.request());
    if (command.has_submit()) {
      Submit(server->second, id, theirs, command.submit());
      continue;
    }
    const auto found = server->second.requests.find(theirs);
    if (found == server->second.requests.end()) continue;  // ended meanwhile
    const RequestId ours = found->second;
    if (command.has_cancel()) handle_(RequestCancelled{ours});
    if (command.has_stop_choice() && command.stop_choice().choice() < static_cast<uint32_t>(kMaxChoices))
      handle_(ChoiceStopped{ours, static_cast<int>(command.stop_choice().choice())});
    if (command.has_pause()) handle_(RequestPaused{ours});
    if (command.has_resume()) handle_(RequestResumed{ours});
  }
}

void ControlGeneration::OnUpdate(GenerationUpdate update) {
  const auto origin = origins_.find(update.request);
  if (origin == origins_.end()) return;  // its server is gone
  Server& server = servers_.at(origin->second.server);
  update.request = origin->second.request;
  if (update.request_finished) {
    server.requests.erase(update.request);
    origins_.erase(origin);
  }
  control::ToProto(update, *server.pending.add_updates());
}

// At once and in messages of bounded size; what gathers for the turn's end has nothing of the cache.
void ControlGeneration::SendCache(Server& server, const requests::CacheEvents& events) {
  size_t first = 0;
  do {
    pb::GenerationEvents message;
    control::ToProto(events, first, *message.add_cache());
    server.send(std::move(message));
    first += control::kCacheEventsPerMessage;
  } while (first < events.events.size());
}

void ControlGeneration::OnCacheEvents(const requests::CacheEvents& events) {
  for (auto& [id, server] : servers_)
    if (server.watches_cache) SendCache(server, events);
}

void ControlGeneration::OnStep(const proto::StepResult& result, int sequences, int new_tokens) {
  for (auto& [id, server] : servers_) {
    pb::StepSample& sample = *server.pending.add_steps();
    sample.set_new_tokens(static_cast<uint32_t>(new_tokens));
    sample.set_sequences(sequences);
    sample.set_total_us(result.timings.total_us);
    sample.set_dense_us(result.timings.dense_us);
    sample.set_attention_wait_us(result.timings.attention_wait_us);
    sample.set_sample_us(result.timings.sample_us);
    sample.set_attention_us(result.timings.attention_us);
    sample.set_prompt_us(result.timings.prompt_us);
    sample.set_overlapped_us(result.timings.overlapped_us);
  }
}

void ControlGeneration::Flush(const pb::Stats* stats) {
  for (auto& [id, server] : servers_) {
    if (stats != nullptr) *server.pending.mutable_stats() = *stats;
    if (server.pending.updates_size() == 0 && server.pending.steps_size() == 0 && !server.pending.has_stats()) continue;
    server.send(std::exchange(server.pending, {}));
  }
}

}  // namespace dovetail::scheduler
