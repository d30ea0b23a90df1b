#include "scheduler/request_spans.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dovetail::scheduler {
namespace {

int64_t Number(WorkerId worker) { return static_cast<int64_t>(worker.value()); }

bool Contains(const std::vector<WorkerId>& workers, WorkerId worker) {
  return std::find(workers.begin(), workers.end(), worker) != workers.end();
}

std::string ErrorOf(const proto::StepResult& result) {
  switch (result.status) {
    case proto::StepStatus::kOk: return "";
    case proto::StepStatus::kOutOfMemory: return "an attention worker has no free KV block; the step is planned again";
    case proto::StepStatus::kDamaged: return "KV was not what was written; the sequence begins again";
    case proto::StepStatus::kForgotten: return "the compute worker must be given the request's lists again";
    case proto::StepStatus::kGrammarPending: return "the grammar is being compiled; the step is planned again";
    default: return result.error.empty() ? "the step failed" : result.error;
  }
}

}  // namespace

void RequestSpans::Arrived(const GenerationRequest& request, absl::Time now) {
  if (sink_ == nullptr || !request.trace.sampled) return;
  requests_[request.id] = {request.trace, now};
  by_span_[request.trace.span] = request.id;
}

void RequestSpans::Opened(const TraceContext& trace, SequenceId sequence, WorkerId attention_worker, absl::Time now) {
  if (sink_ == nullptr || !trace.sampled) return;
  TracedSequence& traced = sequences_[sequence];
  traced.trace = trace;
  if (!Contains(traced.attention_workers, attention_worker)) traced.attention_workers.push_back(attention_worker);
  const auto id = by_span_.find(trace.span);
  if (id == by_span_.end()) return;
  Request& request = requests_.at(id->second);
  if (std::exchange(request.queued, false))
    sink_->Add({.parent = trace, .name = "queue", .begin = request.arrived, .end = now, .attributes = {}});
}

std::vector<RequestSpans::Told> RequestSpans::ToTell(const RunStep& run) {
  std::vector<Told> told;
  if (sequences_.empty()) return told;
  for (const proto::StepEntry& entry : run.plan.entries) {
    const auto traced = sequences_.find(entry.sequence);
    if (traced == sequences_.end() || Contains(traced->second.told, run.compute_worker)) continue;
    traced->second.told.push_back(run.compute_worker);
    told.push_back({entry.sequence, traced->second.trace});
  }
  return told;
}

void RequestSpans::StepSent(const RunStep& run, absl::Time now) {
  if (sequences_.empty()) return;
  Step step{run.compute_worker, now, run.plan.part, {}};
  for (const proto::StepEntry& entry : run.plan.entries) {
    const auto traced = sequences_.find(entry.sequence);
    if (traced == sequences_.end()) continue;
    const auto tokens = static_cast<int64_t>(entry.tokens.size());
    step.entries.push_back({traced->second.trace, entry.ctx_len, tokens, tokens > 1 || run.plan.part.in_group()});
  }
  if (!step.entries.empty()) steps_[run.plan.step] = std::move(step);
}

void RequestSpans::Record(const Step& step, const Entry& entry, const proto::StepResult* result,
                          const std::string& error, absl::Time now) {
  if (!entry.prompt && error.empty()) {
    sink_->AddStep({.parent = entry.trace,
                    .name = "decode",
                    .begin = step.sent,
                    .end = now,
                    .tokens = entry.tokens,
                    .dense_us = result != nullptr ? result->timings.dense_us : 0,
                    .attention_us = result != nullptr ? result->timings.attention_us : 0});
    return;
  }
  Span span{.parent = entry.trace, .name = entry.prompt ? "prefill" : "decode", .begin = step.sent, .end = now};
  span.attributes = {{"dovetail.compute_worker", Number(step.compute_worker)},
                     {"dovetail.tokens", entry.tokens},
                     {"dovetail.context_tokens", int64_t{entry.ctx_len}}};
  if (step.part.in_group()) {
    span.attributes.push_back({"dovetail.rank", int64_t{step.part.rank}});
    span.attributes.push_back({"dovetail.ranks", int64_t{step.part.ranks}});
  }
  if (result != nullptr) {
    span.attributes.push_back({"dovetail.dense_us", result->timings.dense_us});
    span.attributes.push_back({"dovetail.attention_wait_us", result->timings.attention_wait_us});
  }
  span.error = error;
  sink_->Add(std::move(span));
}

void RequestSpans::StepEnded(StepId id, const proto::StepResult* result, const std::string& error, absl::Time now) {
  const auto step = steps_.find(id);
  if (step == steps_.end()) return;
  const std::string why = result != nullptr ? ErrorOf(*result) : error;
  for (const Entry& entry : step->second.entries) Record(step->second, entry, result, why, now);
  steps_.erase(step);
}

void RequestSpans::MoveBegan(const MoveSequence& move, absl::Time now) {
  if (!sequences_.contains(move.message.sequence)) return;
  moves_[move.message.sequence] = {move.worker, move.to, now, move.message.end - move.message.begin};
}

void RequestSpans::MoveEnded(const proto::SequenceMoved& moved, absl::Time now) {
  const auto move = moves_.find(moved.sequence);
  if (move == moves_.end()) return;
  if (const auto traced = sequences_.find(moved.sequence); traced != sequences_.end()) {
    Span span{.parent = traced->second.trace, .name = "move", .begin = move->second.began, .end = now};
    span.attributes = {{"dovetail.from_attention_worker", Number(move->second.from)},
                       {"dovetail.to_attention_worker", Number(move->second.to)},
                       {"dovetail.tokens", int64_t{move->second.tokens}}};
    if (!moved.moved) span.error = moved.reason.empty() ? "the sequence was not moved" : moved.reason;
    sink_->Add(std::move(span));
  }
  moves_.erase(move);
}

void RequestSpans::Fail(const TraceContext& trace, const std::string& error, absl::Time now) {
  sink_->Add({.parent = trace, .name = "failure", .begin = now, .end = now, .attributes = {}, .error = error});
}

void RequestSpans::AttentionWorkerLost(WorkerId worker, absl::Time now) {
  for (const auto& [sequence, traced] : sequences_)
    if (Contains(traced.attention_workers, worker))
      Fail(traced.trace, absl::StrCat("attention worker ", worker.value(), " was lost; its sequences begin again"),
           now);
}

void RequestSpans::ComputeWorkerLost(WorkerId worker, absl::Time now) {
  for (auto it = steps_.begin(); it != steps_.end();) {
    const auto step = it++;
    if (step->second.compute_worker != worker) continue;
    for (const Entry& entry : step->second.entries)
      Fail(entry.trace, absl::StrCat("compute worker ", worker.value(), " was lost; its steps are planned again"), now);
    StepEnded(step->first, nullptr, "the compute worker was lost", now);
  }
}

void RequestSpans::Updated(const GenerationUpdate& update, absl::Time now) {
  const auto request = requests_.find(update.request);
  if (request == requests_.end()) return;
  const bool failed = update.choice_finished && update.reason == FinishReason::kError;
  if (failed) Fail(request->second.trace, update.error.empty() ? "the request failed" : update.error, now);
  if (!update.request_finished) return;
  by_span_.erase(request->second.trace.span);
  requests_.erase(request);
}

}  // namespace dovetail::scheduler
