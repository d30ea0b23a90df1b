#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "requests/cache_events.h"
#include "requests/generation.h"
#include "scheduler/core/scheduler.h"

namespace dovetail::engine {

// Receives what happens to one request. Updates come in order. OnUpdate must return at once (post to a thread of your
// own) and must not call the Engine. The engine keeps the sink alive until it delivered the update with
// request_finished. If that one says kError or kCancelled, it ends every choice that had not ended, whichever it names.
// Threads: OnUpdate is called on the engine's thread.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  virtual void OnUpdate(requests::GenerationUpdate update) = 0;
};

// Receives what the prefix cache gains and loses. The first events are a reset with all that is cached; so are those
// after the scheduler was lost. OnCacheEvents must return at once and must not call the Engine.
// Threads: OnCacheEvents is called on the engine's thread.
class CacheSink {
 public:
  virtual ~CacheSink() = default;
  virtual void OnCacheEvents(requests::CacheEvents events) = 0;
};

struct StepSample {    // of one finished step, for metrics; proto::StepTimings says what they are
  int new_tokens = 0;  // computed: of prompts and of decoding
  int sequences = 0;
  int64_t total_us = 0, dense_us = 0, attention_wait_us = 0, sample_us = 0;
  int64_t attention_us = 0;   // of the wait: the attention workers were busy
  int64_t prompt_us = 0;      // attention over prompts, on the compute worker itself
  int64_t overlapped_us = 0;  // of the wait: the compute worker was at work for other steps

  // The step's time is its own work (dense, prompts, sampling), attention and the wire as far as the compute worker
  // had nothing else to do meanwhile, and the bubble in which the step waited for its turn.
  int64_t OwnUs() const { return dense_us + prompt_us + sample_us; }
  int64_t IdleUs() const { return std::max<int64_t>(0, attention_wait_us - overlapped_us); }
  int64_t AttentionPartUs() const { return std::min(attention_us, IdleUs()); }
  int64_t WirePartUs() const { return IdleUs() - AttentionPartUs(); }
  int64_t BubbleUs() const { return std::max<int64_t>(0, total_us - OwnUs() - IdleUs()); }
};

// KV blocks of an attention worker that were not what was written.
struct DamagedBlocks {
  std::string worker;        // its name
  uint64_t incarnation = 0;  // each counts from 0
  uint64_t blocks = 0;
};

// A member of the cluster.
struct WorkerLoad {
  std::string worker;  // its name
  std::string role;    // "attention", "compute"
  bool serving = false;
  uint64_t steps = 0;                            // since it joined
  uint64_t kv_blocks = 0, kv_blocks_in_use = 0;  // of an attention worker
  uint32_t host_links = 0;                       // to workers with a GPU, over which layers cross through the hosts
  int64_t certificate_end = 0;  // of its certificate, in seconds since 1970; 0: it has none, or does not say
};

struct EngineStats {
  scheduler::SchedulerStats scheduler;
  int max_queued_requests = 0;                                               // requests that may wait; 0: not known
  uint64_t kv_blocks_total = 0, kv_blocks_in_use = 0, kv_blocks_cached = 0;  // over all attention workers
  std::vector<DamagedBlocks> damaged_blocks;                                 // of the attention workers that are here
  std::vector<WorkerLoad> workers;                                           // none in an embedded cluster
  // Of the control plane, in seconds since 1970; 0: there is none.
  int64_t scheduler_certificate_end = 0, own_certificate_end = 0;
  absl::Time last_progress;  // when a step last finished, or the engine was last idle
  bool healthy = true;       // false: the engine cannot make progress any more; `error` says why
  std::string error;
};

// Generates tokens. EmbeddedCluster does so in this process, RemoteEngine as a client of another process's scheduler.
// Threads: thread-safe; nothing blocks for longer than a queue push.
class Engine {
 public:
  virtual ~Engine() = default;

  // Takes the request (its id is chosen here and returned). The sink is told everything that follows, at least the end.
  // kResourceExhausted: the queue is full, nothing was taken. kUnavailable: draining or dead. kInvalidArgument: can
  // never run here (empty prompt, prompt and max_tokens beyond the model's positions, more KV than all workers have).
  virtual absl::StatusOr<RequestId> Submit(requests::GenerationRequest request,
                                           std::shared_ptr<GenerationSink> sink) = 0;

  virtual void Cancel(RequestId request) = 0;                  // unknown or finished: nothing happens
  virtual void StopChoice(RequestId request, int choice) = 0;  // a stop string was found
  virtual void Pause(RequestId request) = 0;                   // the reader is slow
  virtual void Resume(RequestId request) = 0;

  // From now on the sink hears of the prefix cache, in place of an earlier one. Nothing comes from an engine that has
  // none.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): engines that have one keep the sink
  virtual void WatchCache(std::shared_ptr<CacheSink> /*sink*/) {}

  virtual EngineStats stats() = 0;
  virtual std::vector<StepSample> TakeStepSamples() = 0;  // since the last call; at most the last 4096
};

}  // namespace dovetail::engine
