#pragma once
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace dovetail::server::test {

struct FakeEngineOptions {
  int max_queued = 1024;         // live requests; one more is refused
  absl::Duration step_interval;  // 0: as fast as it can
  bool manual = false;           // steps only when Step() is called
  int eos_after = -1;            // >= 0: the first end token comes as this output token, if it may
  int fail_after = -1;           // >= 0: every choice fails after so many tokens
  // The token a choice chooses; by default a text that depends on the seed if the temperature is not 0.
  std::function<TokenId(const requests::GenerationRequest&, int choice, int index)> next;
};

// An Engine without a model: deterministic tokens, one for each choice of each request a step, on a thread of its own.
// It obeys Cancel, StopChoice, Pause and Resume, and remembers what it was told.
class FakeEngine : public engine::Engine {
 public:
  explicit FakeEngine(FakeEngineOptions options = {});
  ~FakeEngine() override;

  absl::StatusOr<RequestId> Submit(requests::GenerationRequest request,
                                   std::shared_ptr<engine::GenerationSink> sink) override;
  void Cancel(RequestId request) override;
  void StopChoice(RequestId request, int choice) override;
  void Pause(RequestId request) override;
  void Resume(RequestId request) override;
  engine::EngineStats stats() override;
  std::vector<engine::StepSample> TakeStepSamples() override;

  void Step(int steps = 1);  // manual: lets so many steps happen
  void SetLongestSequence(Position tokens);
  void SetHealthy(bool healthy);
  void SetStalled();                      // has work, and made no progress for an hour
  void SetRefusal(absl::Status refusal);  // what Submit answers, if not OK

  struct Log {
    std::vector<requests::GenerationRequest> submitted;
    int cancelled = 0, stopped_choices = 0, paused = 0, resumed = 0;
    uint64_t tokens = 0;
    int live = 0;
  };
  Log log();
  // Blocks until the log fulfils the condition; false after 30 s.
  bool WaitFor(const std::function<bool(const Log&)>& condition);

 private:
  struct Live {
    requests::GenerationRequest request;
    std::shared_ptr<engine::GenerationSink> sink;
    std::vector<int> produced;  // by choice
    std::vector<bool> finished;
    bool began = false, half_read = false, paused = false, cancelled = false;
  };
  struct Delivery {
    std::shared_ptr<engine::GenerationSink> sink;
    requests::GenerationUpdate update;
  };

  void Run();
  bool HasWork() const;
  void StepAll(std::vector<Delivery>& out);
  requests::GenerationUpdate NextOf(Live& live, int choice);
  Live* Find(RequestId id);

  const FakeEngineOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_, changed_;
  std::map<uint64_t, Live> live_;
  uint64_t next_id_ = 1;
  int steps_allowed_ = 0;
  bool stopping_ = false, healthy_ = true, stalled_ = false;
  absl::Status refusal_;
  Log log_;
  scheduler::SchedulerStats stats_;
  std::vector<engine::StepSample> samples_;
  std::thread thread_;
};

}  // namespace dovetail::server::test
