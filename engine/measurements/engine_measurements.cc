#include "engine/measurements/engine_measurements.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/segment_tree.h"

namespace dovetail::engine {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

constexpr uint64_t kOtherPrompts = uint64_t{1} << 32;  // seeds that counting from 0 does not reach

double Seconds(TimePoint from, TimePoint to) { return duration<double>(to - from).count(); }

// Notes when tokens come.
class TimingSink final : public GenerationSink {
 public:
  void OnUpdate(requests::GenerationUpdate update) override {
    const TimePoint now = steady_clock::now();
    MutexLock lock(mutex_);
    if (!update.tokens.empty()) arrivals_.push_back({now, static_cast<int>(update.tokens.size())});
    if (update.choice_finished && update.reason != requests::FinishReason::kLength)
      status_ = absl::UnavailableError(
          absl::StrCat("a measured sequence ended early: ", update.error.empty() ? "stopped" : update.error));
    if (!update.request_finished) return;
    finished_ = true;
    changed_.notify_all();
  }

  absl::Status Wait() {
    MutexLock lock(mutex_);
    changed_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return finished_; });
    return status_;
  }

  // After Wait().
  const std::vector<Arrival>& arrivals() const { return arrivals_; }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<Arrival> arrivals_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

requests::GenerationRequest RequestOf(std::vector<TokenId> prompt, int max_tokens) {
  requests::GenerationRequest request;
  request.tenant = "bench";
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  request.use_prefix_cache = false;
  return request;
}

struct TimedRun {
  TimePoint start;
  std::vector<std::vector<Arrival>> sequences;
};

// Reads prompts, one after the other, on a thread of its own, until it is stopped.
class Reader {
 public:
  Reader(Engine& engine, PromptSource prompts, int tokens) : tokens_(tokens) {
    if (tokens > 0) thread_ = std::thread([this, &engine, prompts]() mutable { Read(engine, prompts); });
  }
  ~Reader() { [[maybe_unused]] const absl::Status status = Stop(); }

  // Waits for the prompt at hand.
  absl::Status Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return status_;
  }

  // After Stop(): tokens read in a stretch of time, as if each prompt were read evenly.
  double TokensWithin(TimePoint start, TimePoint end) const {
    double tokens = 0;
    for (const auto& [from, to] : read_) {
      const double within = Seconds(std::max(from, start), std::min(to, end));
      if (within > 0) tokens += tokens_ * within / Seconds(from, to);
    }
    return tokens;
  }

 private:
  void Read(Engine& engine, PromptSource& prompts) {
    while (!stop_ && status_.ok()) {
      const auto sink = std::make_shared<TimingSink>();
      const TimePoint from = steady_clock::now();
      status_ = engine.Submit(RequestOf(prompts.Next(tokens_), 1), sink).status();
      if (status_.ok()) status_ = sink->Wait();
      read_.emplace_back(from, steady_clock::now());
    }
  }

  const int tokens_;
  std::atomic<bool> stop_{false};
  std::vector<std::pair<TimePoint, TimePoint>> read_;
  absl::Status status_;
  std::thread thread_;
};

absl::StatusOr<TimedRun> RunAll(
    Engine& engine, std::vector<requests::GenerationRequest> requests,
    const std::function<void()>& once_submitted = [] {}) {
  std::vector<std::shared_ptr<TimingSink>> sinks;
  TimedRun run;
  run.start = steady_clock::now();
  absl::Status status;
  for (requests::GenerationRequest& request : requests) {
    auto sink = std::make_shared<TimingSink>();
    status = engine.Submit(std::move(request), sink).status();
    if (!status.ok()) break;
    sinks.push_back(std::move(sink));
  }
  if (status.ok()) once_submitted();
  for (const auto& sink : sinks) {
    status.Update(sink->Wait());
    run.sequences.push_back(sink->arrivals());
  }
  DT_RETURN_IF_ERROR(status);
  return run;
}

}  // namespace

std::vector<TokenId> PromptSource::Next(int length) {
  std::mt19937_64 random(seed++);
  std::vector<TokenId> prompt(length);
  for (TokenId& token : prompt) token = static_cast<TokenId>(random() % static_cast<uint64_t>(vocab_size));
  return prompt;
}

absl::StatusOr<Window> FullBatchWindow(const std::vector<std::vector<Arrival>>& sequences, int tokens_each) {
  if (sequences.empty() || tokens_each < 1) return InvalidArgument("batch: has no sequence or no token to measure");
  TimePoint start = TimePoint::min();
  for (const std::vector<Arrival>& arrivals : sequences) {
    if (arrivals.empty()) return FailedPrecondition("batch: a sequence gave no token");
    start = std::max(start, arrivals.front().time);
  }
  struct Later {
    TimePoint time;
    int tokens;
    size_t sequence;
  };
  std::vector<Later> later;
  for (size_t i = 0; i < sequences.size(); ++i)
    for (const Arrival& arrival : sequences[i])
      if (arrival.time > start) later.push_back({arrival.time, arrival.tokens, i});
  std::sort(later.begin(), later.end(), [](const Later& a, const Later& b) { return a.time < b.time; });

  const int64_t wanted = int64_t{tokens_each} * static_cast<int64_t>(sequences.size());
  Window window;
  window.start = start;
  std::vector<int> share(sequences.size());
  for (const Later& arrival : later) {
    if (window.tokens >= wanted) break;
    window.tokens += arrival.tokens;
    window.seconds = Seconds(start, arrival.time);
    share[arrival.sequence] += arrival.tokens;
  }
  // The window begins and ends inside a step, so that a sequence may have one token less than the others; those of
  // another micro-batch more, as long as none of them ended.
  const int least = *std::min_element(share.begin(), share.end());
  bool full = window.tokens >= wanted && least >= std::min(tokens_each - 1, tokens_each * 3 / 4);
  for (const std::vector<Arrival>& arrivals : sequences)
    full = full && Seconds(start, arrivals.back().time) >= window.seconds;
  if (full) return window;
  return FailedPrecondition("batch: was not full throughout: one of ", sequences.size(), " sequences gave ", least,
                            " of ", tokens_each,
                            " tokens, or ended early; does the engine run as many at a time (--max-num-seqs), and has "
                            "it KV cache for them?");
}

absl::StatusOr<Window> MeasureDecode(Engine& engine, PromptSource& prompts, int tokens) {
  DT_ASSIGN_OR_RETURN(const TimedRun run, RunAll(engine, {RequestOf(prompts.Next(1), tokens)}));
  return Window{Seconds(run.start, run.sequences[0].back().time), tokens};
}

absl::StatusOr<Window> MeasurePrefill(Engine& engine, PromptSource& prompts, int tokens) {
  DT_ASSIGN_OR_RETURN(const TimedRun run, RunAll(engine, {RequestOf(prompts.Next(tokens), 1)}));
  return Window{Seconds(run.start, run.sequences[0].front().time), tokens};
}

// What a step takes of a prompt where the scheduler spares running streams (SchedulerOptions::prefill_itl_budget).
constexpr int kLeastPart = kSegmentTokens;

int OutputTokensNeeded(const BatchShape& shape) {
  // Steps: a prompt that ends inside one, and the first and last of the window; and a quarter more, as much as the
  // sequences of one micro-batch may be ahead of another's.
  constexpr int kMargin = 8;
  const int64_t prompt_tokens = int64_t{shape.sequences} * shape.prompt_tokens;
  const int64_t prompt_tokens_per_step =
      std::max(1, shape.tokens_per_step - shape.sequences);  // what decodes leave of a step
  const auto prompt_steps = static_cast<int>((prompt_tokens + prompt_tokens_per_step - 1) / prompt_tokens_per_step);
  return shape.output_tokens + shape.output_tokens / 4 + prompt_steps + kMargin;
}

static absl::StatusOr<Window> MeasureOnce(Engine& engine, PromptSource& prompts, const BatchShape& shape) {
  std::vector<requests::GenerationRequest> requests;
  for (int i = 0; i < shape.sequences; ++i)
    requests.push_back(RequestOf(prompts.Next(shape.prompt_tokens), OutputTokensNeeded(shape)));
  std::optional<Reader> reader;
  DT_ASSIGN_OR_RETURN(const TimedRun run, RunAll(engine, std::move(requests), [&] {
                        const PromptSource others{prompts.vocab_size, prompts.seed + kOtherPrompts};
                        reader.emplace(engine, others, shape.beside_prompt_tokens);
                      }));
  DT_RETURN_IF_ERROR(reader->Stop());
  DT_ASSIGN_OR_RETURN(Window window, FullBatchWindow(run.sequences, shape.output_tokens));
  const auto length = std::chrono::duration_cast<TimePoint::duration>(duration<double>(window.seconds));
  window.beside_tokens = reader->TokensWithin(window.start, window.start + length);
  return window;
}

absl::StatusOr<Window> MeasureBatch(Engine& engine, PromptSource& prompts, const BatchShape& shape) {
  const auto window = MeasureOnce(engine, prompts, shape);
  if (!absl::IsFailedPrecondition(window.status())) return window;
  BatchShape slowly = shape;
  slowly.tokens_per_step = shape.sequences + kLeastPart;
  if (OutputTokensNeeded(slowly) <= OutputTokensNeeded(shape)) return window;
  const auto again = MeasureOnce(engine, prompts, slowly);
  return again.ok() ? again : window;
}

}  // namespace dovetail::engine
