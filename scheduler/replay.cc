#include "scheduler/replay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dovetail::scheduler {
namespace {

std::string Listed(const std::vector<WorkerId>& workers) {
  return absl::StrJoin(workers, ", ", [](std::string* out, WorkerId worker) { absl::StrAppend(out, worker.value()); });
}

void AddOnce(std::vector<WorkerId>& to, const absl::InlinedVector<WorkerId, 2>& workers) {
  for (const WorkerId worker : workers)
    if (std::find(to.begin(), to.end(), worker) == to.end()) to.push_back(worker);
}

// The first worker that is not among `used`, or the first of all.
WorkerId Another(const std::vector<WorkerId>& workers, const std::vector<WorkerId>& used) {
  for (const WorkerId worker : workers)
    if (std::find(used.begin(), used.end(), worker) == used.end()) return worker;
  return workers.front();
}

}  // namespace

int64_t Replay::TokensOf(const GenerationRequest& request) {
  return static_cast<int64_t>(request.prompt.size()) + int64_t{request.choices} * request.max_tokens;
}

void Replay::Arrived(const std::shared_ptr<const GenerationRequest>& request) {
  if (one_in_ == 0 || Is(request->id) || request->max_tokens <= 0 || ++seen_ % static_cast<uint64_t>(one_in_) != 0)
    return;
  if (tracked_.size() + due_.size() >= kMostTracked || tokens_ + TokensOf(*request) > kMostTokens) return;
  Tracked tracked{request, {}};
  tracked.run.outputs.resize(request->choices);
  tracked.run.open_choices = request->choices;
  if (tracked_.emplace(request->id, std::move(tracked)).second) tokens_ += TokensOf(*request);
}

void Replay::Add(const GenerationUpdate& update, Run& run) {
  if (update.choice < 0 || update.choice >= static_cast<int>(run.outputs.size())) return;
  std::vector<TokenId>& output = run.outputs[update.choice];
  output.insert(output.end(), update.tokens.begin(), update.tokens.end());
  if (!update.choice_finished) return;
  AddOnce(run.attention, update.attention_workers);
  AddOnce(run.compute, update.compute_workers);
  --run.open_choices;
  run.cancelled = run.cancelled || update.reason == FinishReason::kCancelled;
  run.complete = run.complete && (update.reason == FinishReason::kStop || update.reason == FinishReason::kLength);
}

void Replay::Take(const GenerationUpdate& update) {
  if (one_in_ == 0) return;
  if (!Is(update.request)) return TakeOriginal(update);
  if (running_ != update.request) return;
  Add(update, case_->trials.back().run);
  if (update.request_finished) EndTrial();
}

void Replay::TakeOriginal(const GenerationUpdate& update) {
  const auto at = tracked_.find(update.request);
  if (at == tracked_.end()) return;
  Add(update, at->second.run);
  if (!update.request_finished) return;
  const bool any = std::any_of(at->second.run.outputs.begin(), at->second.run.outputs.end(),
                               [](const std::vector<TokenId>& output) { return !output.empty(); });
  if (at->second.run.complete && any) {
    due_.push_back(std::move(at->second));
  } else {
    tokens_ -= TokensOf(*at->second.request);
  }
  tracked_.erase(at);
}

std::optional<RequestId> Replay::running() const { return running_; }

std::shared_ptr<const GenerationRequest> Replay::Next(const ReplayWorkers& workers) {
  if (running_ || workers.attention.empty() || workers.compute.empty()) return nullptr;
  if (!case_ && due_.empty()) return nullptr;
  if (!case_) Begin(workers);
  const Pins pins = case_->todo.front();
  case_->todo.pop_front();
  return Submit(pins);
}

void Replay::Begin(const ReplayWorkers& workers) {
  workers_ = workers;
  if (workers_.attention.size() > kMostWorkers) workers_.attention.resize(kMostWorkers);
  if (workers_.compute.size() > kMostWorkers) workers_.compute.resize(kMostWorkers);
  case_.emplace();
  case_->original = std::move(due_.front());
  due_.pop_front();
  const Run& run = case_->original.run;
  case_->todo.push_back({Another(workers_.attention, run.attention), Another(workers_.compute, run.compute)});
}

// The request again, for its tokens alone: as long as the longest of its choices became.
std::shared_ptr<const GenerationRequest> Replay::Submit(const Pins& pins) {
  const Tracked& original = case_->original;
  auto request = std::make_shared<GenerationRequest>(*original.request);
  request->id = RequestId(next_id_++);
  request->tenant = "replay";
  request->priority = 0;
  request->call = 0;
  request->sampling.logprobs = -1;
  request->prompt_logprobs = -1;
  request->logits_last = 0;
  request->logits_of_output = false;
  request->use_prefix_cache = false;  // everything is computed again
  size_t longest = 1;
  for (const std::vector<TokenId>& output : original.run.outputs) longest = std::max(longest, output.size());
  request->max_tokens = static_cast<int>(longest);
  request->only_attention_worker = pins.attention;
  request->only_compute_worker = pins.compute;
  Trial trial{pins, {}};
  trial.run.outputs.resize(request->choices);
  trial.run.open_choices = request->choices;
  case_->trials.push_back(std::move(trial));
  running_ = request->id;
  return request;
}

// A choice that its client ended at a stop string is a beginning of what the model would say.
bool Replay::Same(const Run& original, const Run& replay) {
  for (size_t choice = 0; choice < original.outputs.size(); ++choice) {
    const std::vector<TokenId>& was = original.outputs[choice];
    const std::vector<TokenId>& is = replay.outputs[choice];
    if (is.size() < was.size() || !std::equal(was.begin(), was.end(), is.begin())) return false;
  }
  return true;
}

// Where a pinned worker is not connected, or may take nothing, the scheduler runs the request elsewhere.
bool Replay::RanWhereAsked(const Trial& trial) {
  return std::vector<WorkerId>{trial.pins.attention} == trial.run.attention &&
         std::vector<WorkerId>{trial.pins.compute} == trial.run.compute;
}

void Replay::EndTrial() {
  running_.reset();
  const Trial& trial = case_->trials.back();
  if (trial.run.cancelled && case_->retries++ < kMostRetries) {  // it gave way to a client's request
    case_->todo.push_front(trial.pins);
    return case_->trials.pop_back();
  }
  if (!trial.run.complete || !RanWhereAsked(trial)) {
    ++stats_.unclear;
    return Close();
  }
  if (case_->todo.empty()) EndStage();
}

void Replay::EndStage() {
  Case& now = *case_;
  switch (now.stage) {
    case Stage::kCheck:
      now.check = std::move(now.trials.back().run);
      if (Same(now.original.run, now.check)) {
        ++stats_.same;
        return Close();
      }
      ++stats_.different;
      now.stage = Stage::kAttentionWorkers;
      for (const WorkerId worker : workers_.attention) now.todo.push_back({worker, workers_.compute.front()});
      break;
    case Stage::kAttentionWorkers:
      if (ReportOdd("attention worker")) return Close();
      now.stage = Stage::kComputeWorkers;
      for (const WorkerId worker : workers_.compute) now.todo.push_back({workers_.attention.front(), worker});
      break;
    case Stage::kComputeWorkers:
      if (!ReportOdd("compute worker")) ReportUnnamed();
      return Close();
  }
  now.trials.clear();
}

std::string Replay::Difference() const {
  const Run& was = case_->original.run;
  for (size_t choice = 0; choice < was.outputs.size(); ++choice) {
    const std::vector<TokenId>& a = was.outputs[choice];
    const std::vector<TokenId>& b = case_->check.outputs[choice];
    for (size_t i = 0; i < a.size(); ++i)
      if (i >= b.size() || a[i] != b[i])
        return absl::StrCat("request ", case_->original.request->id.value(), ", choice ", choice, ": output token ", i,
                            " was ", a[i], " and is ", i < b.size() ? absl::StrCat(b[i]) : "missing",
                            " when the request is computed again (it ran on attention workers ", Listed(was.attention),
                            " and compute workers ", Listed(was.compute), ")");
  }
  return "";
}

// Names the workers whose tokens differ from what most of this stage's workers give.
bool Replay::ReportOdd(const char* kind) {
  const std::vector<Trial>& trials = case_->trials;
  size_t most = 0, leader = 0;
  for (size_t i = 0; i < trials.size(); ++i) {
    const size_t agree = std::count_if(trials.begin(), trials.end(),
                                       [&](const Trial& other) { return other.run.outputs == trials[i].run.outputs; });
    if (agree > most) most = agree, leader = i;
  }
  if (most == trials.size()) return false;
  const bool attention = case_->stage == Stage::kAttentionWorkers;
  std::vector<WorkerId> odd, others;
  for (const Trial& trial : trials) {
    const WorkerId worker = attention ? trial.pins.attention : trial.pins.compute;
    (trial.run.outputs == trials[leader].run.outputs ? others : odd).push_back(worker);
  }
  const bool tie = odd.size() >= others.size();
  findings_.push_back(absl::StrCat("replay: ", Difference(), "; ", kind, " ", Listed(odd), " gives other tokens than ",
                                   Listed(others), tie ? ": one of them is wrong" : ": look at it"));
  return true;
}

void Replay::ReportUnnamed() {
  const bool as_before = Same(case_->original.run, case_->trials.front().run);
  findings_.push_back(
      absl::StrCat("replay: ", Difference(), "; all workers agree by themselves, and ",
                   as_before ? "give the first tokens: a near tie that rounding decides, or a fault of the first replay"
                             : "not on the first tokens: a fault of one of the workers that it ran on, at that time"));
}

void Replay::Close() {
  tokens_ -= TokensOf(*case_->original.request);
  case_.reset();
}

std::vector<std::string> Replay::TakeFindings() { return std::exchange(findings_, {}); }

}  // namespace dovetail::scheduler
