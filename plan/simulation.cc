#include "plan/simulation.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <queue>
#include <unordered_map>
#include <utility>
#include <variant>

#include "scheduler/simulation/willing_workers.h"

namespace dovetail::plan {
namespace {

using scheduler::Action;
using scheduler::Event;

constexpr double kFull = 0.9;  // of the blocks of the fullest attention worker
constexpr uint32_t kFirstComputeWorker = 1000;
constexpr TokenId kToken = 1;

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }
int64_t Microseconds(double seconds) { return std::llround(1e6 * seconds); }

// A device that does one thing at a time.
struct Busy {
  double until = 0, sum = 0;

  // When it is done with work that comes at `now`.
  double Take(double now, double seconds) {
    until = std::max(until, now) + seconds;
    sum += seconds;
    return until;
  }
};

class Simulator {
 public:
  Simulator(const StepModel& steps, const SimulatedCluster& cluster, std::span<const SimulatedRequest> requests,
            const std::function<bool(const RequestTimes&)>& hopeless,
            const std::function<void(size_t request, double at_s)>& on_token)
      : steps_(steps),
        cluster_(cluster),
        requests_(requests),
        hopeless_(hopeless),
        on_token_(on_token),
        core_(cluster.options, 1) {
    result_.requests.resize(requests.size());
    result_.begin_s = result_.end_s = requests.front().at_s;
  }

  absl::StatusOr<SimulationResult> Run() {
    for (int i = 0; i < cluster_.attention_workers; ++i)
      Post(0, scheduler::AttentionWorkerJoined{WorkerId(static_cast<uint32_t>(i)), Epoch(1), cluster_.kv_blocks});
    for (int i = 0; i < cluster_.compute_workers; ++i)
      Post(0, scheduler::ComputeWorkerJoined{WorkerId(kFirstComputeWorker + static_cast<uint32_t>(i))});
    for (size_t i = 0; i < requests_.size(); ++i) Post(requests_[i].at_s, Arrival{i});
    while (left_ > 0 && status_.ok() && !result_.stopped) {
      if (events_.empty() && core_.NextDeadline() == absl::InfiniteFuture())
        return Internal("simulation: nothing is left to happen, but ", left_, " requests have not ended");
      const double deadline = absl::ToDoubleSeconds(core_.NextDeadline() - absl::UnixEpoch());
      if (events_.empty() || deadline < events_.top().at)
        Tell(std::max(now_, deadline), scheduler::Tick{});
      else
        TakeNext();
    }
    DT_RETURN_IF_ERROR(status_);
    Finish();
    return std::move(result_);
  }

 private:
  struct Arrival {
    size_t request = 0;
  };
  struct Coming {
    double at = 0;
    uint64_t order = 0;
    std::variant<Event, Arrival> what;
  };
  struct Later {
    bool operator()(const Coming& a, const Coming& b) const { return a.at != b.at ? a.at > b.at : a.order > b.order; }
  };

  void Post(double at, std::variant<Event, Arrival> what) { events_.push({at, order_++, std::move(what)}); }

  void TakeNext() {
    Coming next = events_.top();
    events_.pop();
    if (const Arrival* const arrival = std::get_if<Arrival>(&next.what); arrival != nullptr)
      Tell(next.at, scheduler::RequestArrived{RequestOf(arrival->request)});
    else
      Tell(next.at, std::get<Event>(next.what));
  }

  std::shared_ptr<scheduler::GenerationRequest> RequestOf(size_t index) const {
    auto request = std::make_shared<scheduler::GenerationRequest>();
    request->id = RequestId(index);
    request->tenant = "plan";
    request->prompt.assign(static_cast<size_t>(requests_[index].input), kToken);
    request->max_tokens = static_cast<int>(requests_[index].output);
    return request;
  }

  void Tell(double now, const Event& event) {
    now_ = now;
    core_.Handle(event, At(now), actions_);
    std::vector<Action> actions;
    actions.swap(actions_);
    for (const Action& action : actions) std::visit([this](const auto& a) { Do(a); }, action);
  }

  void Do(const scheduler::OpenSequence& a) { Post(now_, Event(AnswerTo(a))); }
  void Do(const scheduler::ForkSequence& a) { Post(now_, Event(AnswerTo(a))); }
  void Do(const scheduler::ProbePrefix& a) { Post(now_, Event(AnswerTo(a))); }
  void Do(const scheduler::MoveSequence& a) { Post(now_, Event(AnswerTo(a))); }
  void Do(const scheduler::ReleaseSequence&) {}
  void Do(const scheduler::Unpin&) {}
  void Do(const scheduler::EmitCacheEvents&) {}
  void Do(const scheduler::WithdrawStep&) {}  // its result comes all the same
  void Do(const scheduler::DismissComputeWorker& a) { status_ = Internal("simulation: ", a.why); }

  void Do(const scheduler::RunStep& a) {
    if (++result_.steps > kMostSimulatedSteps) {
      status_ = ResourceExhausted("simulation: takes more than ", kMostSimulatedSteps, " steps; plan fewer requests");
      return;
    }
    const StepCost cost = steps_.CostOf(a.plan);
    const double own = cost.parts.Sum();
    double end = now_ + own;
    if (steps_.split()) {
      end = std::max(end, compute_[a.compute_worker.value()].Take(now_, cost.compute_s));
      for (const StepCost::Worker& worker : cost.attention)
        end = std::max(end, attention_[worker.worker.value()].Take(now_, worker.seconds));
    } else {
      end = std::max(end, compute_[a.compute_worker.value()].Take(now_, own));
    }
    scheduler::StepFinished finished = AnswerTo(a, [] { return kToken; });
    finished.result.timings = {.total_us = Microseconds(end - now_),
                               .dense_us = Microseconds(cost.compute_s - cost.parts.prompts_s),
                               .attention_wait_us = Microseconds(cost.parts.attention_s + cost.link_s),
                               .attention_us = Microseconds(cost.parts.attention_s),
                               .prompt_us = Microseconds(cost.parts.prompts_s),
                               .linear_us = Microseconds(cost.linear_s)};
    finished.result.work = cost.work;
    finished.result.work.scratch_blocks = UINT32_MAX;
    Note(cost, end - now_);
    Post(end, Event(std::move(finished)));
  }

  void Note(const StepCost& cost, double seconds) {
    result_.parts.Add(cost.parts);
    result_.step_seconds += seconds;
    const scheduler::SchedulerStats stats = core_.stats();
    result_.most_kv_usage = std::max(result_.most_kv_usage, stats.kv_usage);
    if (stats.waiting_requests > 0 && stats.kv_usage > kFull && stats.running_sequences < cluster_.options.max_num_seqs)
      ++steps_without_room_;
  }

  void Do(const scheduler::EmitUpdate& a) {
    const size_t index = a.update.request.value();
    RequestTimes& times = result_.requests[index];
    const double since = now_ - requests_[index].at_s;
    if (!a.update.tokens.empty() && times.output == 0) times.ttft_s = since;
    times.output += static_cast<int64_t>(a.update.tokens.size());
    for (size_t i = 0; on_token_ && i < a.update.tokens.size(); ++i) on_token_(index, now_);
    if (!a.update.request_finished) return;
    --left_;
    if (a.update.reason == requests::FinishReason::kError) {
      status_ = FailedPrecondition("a request of ", requests_[index].input, " and ", requests_[index].output,
                                   " tokens cannot be served: ", a.update.error);
      return;
    }
    times.finished = true;
    times.latency_s = since;
    times.input = requests_[index].input;
    result_.end_s = std::max(result_.end_s, now_);
    if (hopeless_ && hopeless_(times)) result_.stopped = left_ > 0;
  }

  void Finish() {
    const scheduler::SchedulerStats stats = core_.stats();
    result_.preemptions = stats.preemptions;
    result_.shortened_chunks = stats.shortened_chunks;
    if (result_.steps > 0) result_.waiting_for_kv = static_cast<double>(steps_without_room_) / result_.steps;
    if (result_.seconds() <= 0) return;
    const auto share = [&](const std::unordered_map<uint32_t, Busy>& devices, int count) {
      double sum = 0;
      for (const auto& [id, busy] : devices) sum += busy.sum;
      return sum / count / result_.seconds();
    };
    result_.compute_busy = share(compute_, cluster_.compute_workers);
    result_.attention_busy = share(attention_, cluster_.attention_workers);
  }

  const StepModel& steps_;
  const SimulatedCluster& cluster_;
  const std::span<const SimulatedRequest> requests_;
  const std::function<bool(const RequestTimes&)>& hopeless_;
  const std::function<void(size_t request, double at_s)>& on_token_;
  scheduler::SchedulerCore core_;
  double now_ = 0;
  uint64_t order_ = 0;
  std::priority_queue<Coming, std::vector<Coming>, Later> events_;
  std::vector<Action> actions_;
  std::unordered_map<uint32_t, Busy> compute_, attention_;  // by WorkerId; only sums are taken over all
  size_t left_ = requests_.size();
  uint64_t steps_without_room_ = 0;
  absl::Status status_;
  SimulationResult result_;
};

}  // namespace

absl::StatusOr<SimulationResult> Simulate(const StepModel& steps, const SimulatedCluster& cluster,
                                          std::span<const SimulatedRequest> requests,
                                          const std::function<bool(const RequestTimes&)>& hopeless,
                                          const std::function<void(size_t request, double at_s)>& on_token) {
  if (requests.empty()) return InvalidArgument("simulation: there is no request");
  DT_RETURN_IF_ERROR(cluster.options.Validate());
  return Simulator(steps, cluster, requests, hopeless, on_token).Run();
}

}  // namespace dovetail::plan
