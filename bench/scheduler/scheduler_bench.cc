#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/statistics.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/simulation/willing_workers.h"

// What a step costs the scheduler: the time of all SchedulerCore::Handle calls between two steps, and of freeing what
// they asked for. The workers answer at once and outside of the time. The limit is 50 us a step at 256 sequences.

namespace dovetail::scheduler {
namespace {

struct Workload {
  int sequences = 256;
  int prompt_tokens = 128;
  int output_tokens = 1 << 20;  // of a request; then it ends and another arrives
  int tenants = 4;
  int attention_workers = 1;
  bool shared_prompts = false;  // the attention workers hold all full blocks of every prompt
  int logprobs = -1;
  bool penalties = false;
};

proto::AttentionTable ThirtyLayers() {
  const proto::SoftmaxSpec spec{.query_heads = 9, .kv_heads = 3, .key_dim = 64, .value_dim = 64, .scale = 0.125f};
  auto table = proto::AttentionTable::Build(std::vector<proto::AttentionSpec>(30, spec));
  DT_CHECK(table.ok(), std::string(table.status().message()));
  return *std::move(table);
}

// Workers that agree to everything.
class Driver {
 public:
  explicit Driver(const Workload& workload) : workload_(workload), core_(OptionsOf(workload), 1) {
    for (int i = 0; i < workload.attention_workers; ++i)
      Tell(AttentionWorkerJoined{WorkerId(static_cast<uint32_t>(i)), Epoch(1), uint64_t{1} << 30});
    Tell(ComputeWorkerJoined{WorkerId(100)});
    for (int i = 0; i < workload.sequences; ++i) Submit(StaggeredOutput());
    while (core_.stats().running_sequences < workload.sequences || !all_decode_) Step();
  }

  // From the end of a step to the end of the next: what the core does with its results, the answers of workers and new
  // requests that come while it runs, and its successor's plan. Returns the seconds spent in the core.
  double Step() {
    seconds_ = 0;
    if (step_.has_value()) Tell(*std::exchange(step_, std::nullopt));
    while (!events_.empty()) {
      const Event event = std::move(events_.front());
      events_.pop_front();
      Tell(event);
    }
    DT_CHECK(step_.has_value(), "nothing is running");
    return seconds_;
  }

  uint64_t finished() const { return finished_; }
  SchedulerStats stats() const { return core_.stats(); }

 private:
  static SchedulerOptions OptionsOf(const Workload& workload) {
    SchedulerOptions options;
    options.max_num_seqs = workload.sequences;
    options.max_num_batched_tokens = 2048;
    options.max_model_len = 1 << 24;
    options.attention = ThirtyLayers();
    return options;
  }

  // Spreads the ends of the first requests, so that later ones end evenly.
  int StaggeredOutput() {
    return workload_.output_tokens >= 1 << 20 ? workload_.output_tokens
                                              : 1 + static_cast<int>(random_() % workload_.output_tokens);
  }

  void Submit(int output_tokens) {
    auto request = std::make_shared<GenerationRequest>();
    request->id = RequestId(next_request_++);
    request->tenant = "tenant " + std::to_string(request->id.value() % static_cast<uint64_t>(workload_.tenants));
    std::mt19937_64 tokens(workload_.shared_prompts ? 1 : request->id.value());
    for (int i = 0; i < workload_.prompt_tokens; ++i) request->prompt.push_back(static_cast<TokenId>(tokens() % 49152));
    request->max_tokens = output_tokens;
    request->sampling.logprobs = workload_.logprobs;
    if (workload_.penalties) request->sampling.repetition_penalty = 1.1f;
    events_.push_back(RequestArrived{std::move(request)});
  }

  void Tell(const Event& event) {
    const auto start = std::chrono::steady_clock::now();
    core_.Handle(event, now_, actions_);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const Action& action : actions_) std::visit([this](const auto& a) { Do(a); }, action);
    const auto freeing = std::chrono::steady_clock::now();
    actions_.clear();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - freeing).count();
  }

  std::vector<uint32_t> Offer(const std::vector<proto::BlockHash>& hashes) const {
    if (!workload_.shared_prompts) return {0};
    return {static_cast<uint32_t>(hashes.size()), 0};
  }

  void Do(const OpenSequence& a) { events_.push_back(AnswerTo(a, Offer(a.message.hashes))); }
  void Do(const ForkSequence&) { DT_CHECK(false, "nothing is forked here"); }
  void Do(const ReleaseSequence&) {}
  void Do(const ProbePrefix& a) { events_.push_back(AnswerTo(a, Offer(a.message.hashes))); }
  void Do(const WithdrawStep&) {}
  void Do(const DismissComputeWorker&) {}
  void Do(const Unpin&) {}
  void Do(const EmitCacheEvents&) {}
  void Do(const MoveSequence&) { DT_CHECK(false, "nothing is moved here"); }
  void Do(const RunStep& a) {
    now_ += absl::Milliseconds(10);
    step_ = AnswerTo(a, [this] { return static_cast<TokenId>(random_() % 49152); });
    all_decode_ = static_cast<int>(a.plan.entries.size()) == workload_.sequences;
    for (const proto::StepEntry& entry : a.plan.entries) all_decode_ = all_decode_ && entry.tokens.size() == 1;
  }
  void Do(const EmitUpdate& a) {
    if (!a.update.request_finished) return;
    ++finished_;
    Submit(workload_.output_tokens);
  }

  const Workload workload_;
  SchedulerCore core_;
  std::mt19937_64 random_{7};
  absl::Time now_ = absl::UnixEpoch();
  uint64_t next_request_ = 1;
  std::deque<Event> events_;
  std::optional<Event> step_;  // the result of the one in flight
  std::vector<Action> actions_;
  double seconds_ = 0;
  uint64_t finished_ = 0;
  bool all_decode_ = false;
};

void Run(benchmark::State& state, const Workload& workload) {
  Driver driver(workload);
  const uint64_t finished = driver.finished();
  const uint64_t steps = driver.stats().steps;
  std::vector<double> us;
  for (auto _ : state) {
    const double seconds = driver.Step();
    state.SetIterationTime(seconds);
    us.push_back(seconds * 1e6);
  }
  const double measured = static_cast<double>(driver.stats().steps - steps);
  DT_CHECK(measured == static_cast<double>(state.iterations()), "an iteration is a step");
  // The mean contains the times when another process had the core; the percentiles tell them apart.
  state.counters["p50_us"] = Percentile(us, 50);
  state.counters["p99_us"] = Percentile(us, 99);
  state.counters["ends_per_step"] = static_cast<double>(driver.finished() - finished) / measured;
}

void SteadyDecode(benchmark::State& state) { Run(state, {.sequences = static_cast<int>(state.range(0))}); }

void SteadyDecodeWithPenalties(benchmark::State& state) {
  Run(state, {.sequences = static_cast<int>(state.range(0)), .penalties = true});
}

// Each request decodes 100 tokens, so that 2.5 of 256 end in a step and as many are admitted and prefilled.
void RequestsComeAndGo(benchmark::State& state) {
  Run(state, {.sequences = static_cast<int>(state.range(0)), .output_tokens = 100});
}

// The same with prompts of 1024 tokens of which attention workers hold all but the last block, on 2 workers: hashes,
// probes and pins.
void RequestsLookUpTheirPrefix(benchmark::State& state) {
  Run(state, {.sequences = static_cast<int>(state.range(0)),
              .prompt_tokens = 1024,
              .output_tokens = 100,
              .attention_workers = 2,
              .shared_prompts = true});
}

void Sizes(benchmark::internal::Benchmark* bench) {
  bench->Arg(16)->Arg(64)->Arg(256)->Arg(1024)->UseManualTime()->Unit(benchmark::kMicrosecond);
}
BENCHMARK(SteadyDecode)->Apply(Sizes);
BENCHMARK(SteadyDecodeWithPenalties)->Apply(Sizes);
BENCHMARK(RequestsComeAndGo)->Apply(Sizes);
BENCHMARK(RequestsLookUpTheirPrefix)->Apply(Sizes);

}  // namespace
}  // namespace dovetail::scheduler

BENCHMARK_MAIN();
