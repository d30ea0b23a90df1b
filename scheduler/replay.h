#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "requests/generation.h"

namespace dovetail::scheduler {

using requests::FinishReason;
using requests::GenerationRequest;
using requests::GenerationUpdate;

// The workers that a replay may run on.
struct ReplayWorkers {
  std::vector<WorkerId> attention, compute;
};

struct ReplayStats {
  uint64_t same = 0;       // requests whose replay gave their tokens
  uint64_t different = 0;  // requests whose replay gave others
  uint64_t unclear = 0;    // requests whose replay did not finish
};

// Computes one finished request in N again and compares the tokens (--replay-one-in). What no check on the way can see
// shows here: a device or a kernel that computes something else, KV that was damaged before it was finished.
//
// A first replay runs on other workers than the request did, where there are others. If it gives other tokens, the
// request is run once on each attention worker, then on each compute worker: those that differ from most are named. On
// a GPU a step's rounding depends on what else is in it, so a near tie may fall otherwise; such a request differs from
// run to run on one worker, too, and the finding says so.
//
// Requests and updates in, requests to submit and findings out. Holds at most kMostTracked requests and kMostTokens of
// their tokens; more are passed over.
// Threads: thread-compatible.
class Replay {
 public:
  static constexpr size_t kMostTracked = 64;
  static constexpr int64_t kMostTokens = 1 << 20;
  static constexpr size_t kMostWorkers = 16;               // of a kind that are compared
  static constexpr int kMostRetries = 64;                  // of a case, where clients' requests came first
  static constexpr uint64_t kFirstId = uint64_t{1} << 62;  // request ids from here on are replays

  explicit Replay(int one_in) : one_in_(one_in) {}  // 0: none

  static bool Is(RequestId id) { return id.value() >= kFirstId; }

  // A client's request arrives.
  void Arrived(const std::shared_ptr<const GenerationRequest>& request);
  // An update of any request. Those of replays (Is) end here.
  void Take(const GenerationUpdate& update);
  // What to submit; null while one runs or none is due. Call it when no client's request waits.
  std::shared_ptr<const GenerationRequest> Next(const ReplayWorkers& workers);
  // One is due, and none runs.
  bool due() const { return !running_ && (case_ || !due_.empty()); }
  // The replay that runs. It is to be cancelled where a client's request waits, and comes again.
  std::optional<RequestId> running() const;

  const ReplayStats& stats() const { return stats_; }
  // Lines for the log, of differences.
  std::vector<std::string> TakeFindings();

 private:
  // What one run of a request gave.
  struct Run {
    std::vector<std::vector<TokenId>> outputs;  // by choice
    std::vector<WorkerId> attention, compute;   // that had a part in it
    int open_choices = 0;
    bool complete = true;    // no choice was cancelled or failed
    bool cancelled = false;  // a choice was
  };
  struct Tracked {
    std::shared_ptr<const GenerationRequest> request;
    Run run;
  };
  enum class Stage : uint8_t { kCheck, kAttentionWorkers, kComputeWorkers };
  struct Pins {
    WorkerId attention, compute;
  };
  struct Trial {
    Pins pins;
    Run run;
  };
  struct Case {
    Tracked original;
    Stage stage = Stage::kCheck;
    std::deque<Pins> todo;
    std::vector<Trial> trials;  // of this stage; the last one may still run
    Run check;                  // the first replay
    int retries = 0;
  };

  static int64_t TokensOf(const GenerationRequest& request);
  static void Add(const GenerationUpdate& update, Run& run);
  static bool RanWhereAsked(const Trial& trial);
  static bool Same(const Run& original, const Run& replay);
  void TakeOriginal(const GenerationUpdate& update);
  void Begin(const ReplayWorkers& workers);
  std::shared_ptr<const GenerationRequest> Submit(const Pins& pins);
  void EndTrial();
  void EndStage();
  std::string Difference() const;
  bool ReportOdd(const char* kind);  // false: all gave the same
  void ReportUnnamed();
  void Close();

  const int one_in_;
  uint64_t seen_ = 0;
  uint64_t next_id_ = kFirstId;
  int64_t tokens_ = 0;  // of all that is held
  absl::flat_hash_map<RequestId, Tracked> tracked_;
  std::deque<Tracked> due_;
  std::optional<Case> case_;
  std::optional<RequestId> running_;
  ReplayWorkers workers_;  // when the case began
  ReplayStats stats_;
  std::vector<std::string> findings_;
};

}  // namespace dovetail::scheduler
