#include "tests/server/fake_engine.h"

#include <algorithm>
#include <string_view>

#include "base/clock.h"

namespace dovetail::server::test {
namespace {

constexpr std::string_view kText = "the quick brown fox jumps over the lazy dog. ";

// Bytes are token ids of the test model (test_model.h).
TokenId DefaultNext(const requests::GenerationRequest& request, int choice, int index) {
  uint64_t offset = 0;
  if (request.sampling.temperature > 0) offset = (request.sampling.seed + choice) * 7 % kText.size();
  return static_cast<uint8_t>(kText[(offset + index) % kText.size()]);
}

// What a test can tell from the request: its first and last token, how many there are, and how they are pooled.
std::vector<float> VectorOf(const requests::GenerationRequest& request) {
  return {static_cast<float>(request.prompt.front()), static_cast<float>(request.prompt.back()),
          static_cast<float>(request.prompt.size()), static_cast<float>(request.pooling)};
}

proto::PositionLogprobs Logprobs(TokenId token, int index, int alternatives) {
  proto::PositionLogprobs position;
  position.chosen = {token, -0.25f - 0.001f * static_cast<float>(index), 1};
  for (int i = 0; i < alternatives; ++i)
    position.top.push_back({(token + i) % 256, position.chosen.logprob - static_cast<float>(i), i + 1});
  return position;
}

}  // namespace

FakeEngine::FakeEngine(FakeEngineOptions options) : options_(std::move(options)), thread_([this] { Run(); }) {}

FakeEngine::~FakeEngine() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

absl::StatusOr<RequestId> FakeEngine::Submit(requests::GenerationRequest request,
                                             std::shared_ptr<engine::GenerationSink> sink) {
  std::lock_guard lock(mutex_);
  if (!refusal_.ok()) return refusal_;
  if (static_cast<int>(live_.size()) >= options_.max_queued) return absl::ResourceExhaustedError("the queue is full");
  request.id = RequestId(next_id_++);
  log_.submitted.push_back(request);
  const RequestId id = request.id;
  Live live{std::move(request), std::move(sink), {}, {}};
  live.produced.resize(live.request.choices);
  live.finished.resize(live.request.choices);
  live_.emplace(id.value(), std::move(live));
  log_.live = static_cast<int>(live_.size());
  wake_.notify_all();
  changed_.notify_all();
  return id;
}

FakeEngine::Live* FakeEngine::Find(RequestId id) {
  const auto at = live_.find(id.value());
  return at == live_.end() ? nullptr : &at->second;
}

void FakeEngine::Cancel(RequestId id) {
  std::lock_guard lock(mutex_);
  Live* live = Find(id);
  if (live == nullptr) return;
  live->cancelled = true;
  ++log_.cancelled;
  wake_.notify_all();
  changed_.notify_all();
}

void FakeEngine::StopChoice(RequestId id, int choice) {
  std::lock_guard lock(mutex_);
  Live* live = Find(id);
  if (live == nullptr) return;
  live->finished[choice] = true;
  ++log_.stopped_choices;
  wake_.notify_all();
  changed_.notify_all();
}

void FakeEngine::Pause(RequestId id) {
  std::lock_guard lock(mutex_);
  if (Live* live = Find(id)) live->paused = true;
  ++log_.paused;
  changed_.notify_all();
}

void FakeEngine::Resume(RequestId id) {
  std::lock_guard lock(mutex_);
  if (Live* live = Find(id)) live->paused = false;
  ++log_.resumed;
  wake_.notify_all();
  changed_.notify_all();
}

engine::EngineStats FakeEngine::stats() {
  std::lock_guard lock(mutex_);
  engine::EngineStats stats;
  stats.scheduler = stats_;
  stats.scheduler.running_sequences = static_cast<int>(live_.size());
  stats.kv_blocks_total = 100;
  stats.kv_blocks_in_use = live_.size();
  stats.last_progress = SystemClock().Now() - (stalled_ ? absl::Hours(1) : absl::ZeroDuration());
  if (stalled_) stats.scheduler.running_sequences = 1;
  stats.healthy = healthy_;
  return stats;
}

std::vector<engine::StepSample> FakeEngine::TakeStepSamples() {
  std::lock_guard lock(mutex_);
  return std::exchange(samples_, {});
}

void FakeEngine::Step(int steps) {
  std::lock_guard lock(mutex_);
  steps_allowed_ += steps;
  wake_.notify_all();
}

void FakeEngine::SetLongestSequence(Position tokens) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.longest_sequence = tokens;
}

void FakeEngine::SetHealthy(bool healthy) {
  std::lock_guard lock(mutex_);
  healthy_ = healthy;
}

void FakeEngine::SetStalled() {
  std::lock_guard lock(mutex_);
  stalled_ = true;
}

void FakeEngine::SetRefusal(absl::Status refusal) {
  std::lock_guard lock(mutex_);
  refusal_ = std::move(refusal);
}

FakeEngine::Log FakeEngine::log() {
  std::lock_guard lock(mutex_);
  return log_;
}

bool FakeEngine::WaitFor(const std::function<bool(const Log&)>& condition) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(30), [&] { return condition(log_); });
}

bool FakeEngine::HasWork() const {
  bool cancelled = false, runnable = false;
  for (const auto& [id, live] : live_) {
    const bool stopped = std::all_of(live.finished.begin(), live.finished.end(), [](bool f) { return f; });
    cancelled |= live.cancelled || stopped;
    runnable |= !live.paused;
  }
  return cancelled || (runnable && (!options_.manual || steps_allowed_ > 0));
}

void FakeEngine::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || HasWork(); });
    if (stopping_) return;
    if (options_.step_interval > absl::ZeroDuration() &&
        wake_.wait_for(lock, absl::ToChronoMilliseconds(options_.step_interval), [this] { return stopping_; }))
      return;
    std::vector<Delivery> deliveries;
    StepAll(deliveries);
    if (options_.manual && steps_allowed_ > 0) --steps_allowed_;
    lock.unlock();
    for (Delivery& delivery : deliveries) delivery.sink->OnUpdate(std::move(delivery.update));
    deliveries.clear();
    lock.lock();
    log_.live = static_cast<int>(live_.size());
    changed_.notify_all();
  }
}

void FakeEngine::StepAll(std::vector<Delivery>& out) {
  engine::StepSample sample{.new_tokens = 0,
                            .sequences = 0,
                            .total_us = 1000,
                            .dense_us = 550,
                            .attention_wait_us = 300,
                            .sample_us = 100,
                            .attention_us = 150,
                            .overlapped_us = 120};
  const bool may_step = !options_.manual || steps_allowed_ > 0;
  for (auto at = live_.begin(); at != live_.end();) {
    Live& live = at->second;
    bool all_finished = true;
    for (int choice = 0; choice < live.request.choices; ++choice) {
      if (live.finished[choice]) continue;
      if (live.cancelled || (may_step && !live.paused)) {
        requests::GenerationUpdate update = NextOf(live, choice);
        sample.new_tokens += static_cast<int>(update.tokens.size());
        live.finished[choice] = update.choice_finished;
        out.push_back({live.sink, std::move(update)});
      }
      all_finished = all_finished && live.finished[choice];
    }
    if (!all_finished) {
      ++at;
      continue;
    }
    requests::GenerationUpdate end;
    end.request = live.request.id;
    end.prompt_tokens = static_cast<int>(live.request.prompt.size());
    end.request_finished = true;
    out.push_back({live.sink, std::move(end)});
    at = live_.erase(at);
  }
  log_.tokens += sample.new_tokens;
  stats_.generation_tokens += sample.new_tokens;
  ++stats_.steps;
  if (samples_.size() < 4096) samples_.push_back(sample);
}

requests::GenerationUpdate FakeEngine::NextOf(Live& live, int choice) {
  const requests::GenerationRequest& request = live.request;
  requests::GenerationUpdate update;
  update.request = request.id;
  update.choice = choice;
  update.prompt_tokens = static_cast<int>(request.prompt.size());
  update.cached_tokens = update.prompt_tokens / 2;
  update.queued_us = 250'000;
  if (live.cancelled) {
    update.choice_finished = true;
    update.reason = requests::FinishReason::kCancelled;
    return update;
  }
  if (request.pooling != requests::Pooling::kNone) {
    update.choice_finished = true;
    update.reason = requests::FinishReason::kLength;
    update.pooled = VectorOf(request);
    return update;
  }
  const int index = live.produced[choice]++;
  if (options_.fail_after >= 0 && index >= options_.fail_after) {
    update.choice_finished = true;
    update.reason = requests::FinishReason::kError;
    update.error = "worker 3 at /var/lib/secret.sock died, 0x7fffdeadbeef";
    update.error_code = absl::StatusCode::kInternal;
    return update;
  }
  if (choice == 0 && !live.began && request.prompt_logprobs >= 0)
    for (size_t i = 1; i < request.prompt.size(); ++i)
      update.prompt_logprobs.push_back(Logprobs(request.prompt[i], 0, request.prompt_logprobs));
  // Two parts of a prompt, the first of which is cached.
  if (choice == 0 && !live.began && request.prompt_progress && !std::exchange(live.half_read, true)) {
    --live.produced[choice];
    update.prompt_done = update.prompt_tokens - 1;
    return update;
  }
  if (choice == 0 && !live.began && request.prompt_progress) update.prompt_done = update.prompt_tokens;
  live.began = true;

  TokenId token = options_.next ? options_.next(request, choice, index) : DefaultNext(request, choice, index);
  if (options_.eos_after >= 0 && index >= options_.eos_after && index >= request.min_tokens &&
      !request.stop_token_ids.empty())
    token = request.stop_token_ids.front();
  if (!request.sampling.allowed_token_ids.empty())
    token = request.sampling.allowed_token_ids[index % request.sampling.allowed_token_ids.size()];
  update.tokens = {token};
  update.first_index = index;
  if (request.sampling.logprobs >= 0) update.logprobs.push_back(Logprobs(token, index, request.sampling.logprobs));
  const auto& stops = request.stop_token_ids;
  if (index >= request.min_tokens && std::find(stops.begin(), stops.end(), token) != stops.end()) {
    update.choice_finished = true;
    update.reason = requests::FinishReason::kStop;
    update.stop_token = token;
  } else if (index + 1 >= request.max_tokens) {
    update.choice_finished = true;
    update.reason = requests::FinishReason::kLength;
  }
  return update;
}

}  // namespace dovetail::server::test
