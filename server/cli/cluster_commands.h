#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/api_server.h"
#include "server/cli/cluster_flags.h"
#include "server/cli/engine_flags.h"
#include "server/cli/kv_capacity.h"
#include "server/cli/log_flags.h"
#include "server/cli/trace_flags.h"

// The commands of a cluster of processes: one for each role, `up` for all of them on this machine, `status` and `drain`
// for operators.
// Threads: the main thread only.

namespace dovetail::cli {

struct SchedulerFlags {
  std::string listen = "127.0.0.1:7100";
  EngineFlags engine;  // what the scheduler decides by
  ControlFlags control;
  control::DataPlane data;
  int lease_ms = 400;
  int step_timeout = 60;  // seconds
  int max_workers = 128;
  int unserved_timeout = 10;  // seconds
  bool unlike_workers = false;
  LogFlags log;
  TraceFlags traces;
  bool check_flags = false;
};
absl::Status RunScheduler(const SchedulerFlags& flags);

struct AttentionWorkerFlags {
  KvCapacityFlags kv;
  std::string kv_cache_dtype = "auto";
  int state_snapshots = attention::kSnapshotPercent;
  bool kv_checksums = false;
  std::string name;
  std::string device = "cpu";
  int threads = 0;
  std::optional<int> numa_node;
  std::string trace_file;
  int join_timeout = 30;
  std::string exchange = "auto";
  bool spare = false;
  ControlFlags control;
  control::DataPlane data;
  LogFlags log;
  TraceFlags traces;
  bool check_flags = false;
};
// With `spare` it joins as the worker that it is told to be (spare_input.h). kOk, if it never is.
absl::Status RunAttentionWorker(const AttentionWorkerFlags& flags);

struct ComputeWorkerFlags {
  EngineFlags engine;  // weights and their device
  std::string name;
  int join_timeout = 30;
  std::string exchange = "auto";
  ControlFlags control;
  control::DataPlane data;
  LogFlags log;
  TraceFlags traces;
  bool check_flags = false;
};
absl::Status RunComputeWorker(const ComputeWorkerFlags& flags);

// A pair: a compute worker and an attention worker in one process, on one device.
struct PairWorkerFlags {
  ComputeWorkerFlags compute;
  KvCapacityFlags kv;
  int state_snapshots = attention::kSnapshotPercent;
  bool kv_checksums = false;
};
absl::Status RunPairWorker(const PairWorkerFlags& flags);
// A compute worker logs this, and behind it the name of its device, before it loads its model.
inline constexpr const char* kComputesOn = "the layers run on ";

struct ServerFlags {
  ApiFlags api;
  int connect_timeout = 60;
  std::optional<uint64_t> seed;
  ControlFlags control;
  LogFlags log;
  TraceFlags traces;
  bool check_flags = false;
};
absl::Status RunServer(const ServerFlags& flags);

struct UpFlags {
  EngineFlags engine;
  ServerFlags server;
  std::string attention_devices = "cpu";  // taken in turn by the attention workers
  std::string gpus;                       // empty: as the other flags of devices say
  std::string layout;                     // auto, pairs or split; empty: auto where `gpus` are named, else split
  int spares = 0;                         // attention workers that wait, for each place of these
  std::string numa = "auto";
  std::string lanes = "shm";
  bool trust_network = false;
  std::string exchange = "auto";
  std::string listen = "127.0.0.1:0";  // of the scheduler
  int lease_ms = 400;
  int unserved_timeout = 10;
  int step_timeout = 60;  // seconds
  bool unlike_workers = false;
  LogFlags log;
  TraceFlags traces;
};
// Starts every role as a process of its own on this machine, serves, restarts processes that end; SIGTERM or SIGINT
// stops all.
absl::Status RunUp(const UpFlags& flags);

struct StatusFlags {
  ControlFlags control;
  std::string ready;  // this worker must serve
  std::string alive;  // this worker must be a member, where the scheduler answers
};
// Prints the cluster. With `ready` or `alive` it prints nothing: kFailedPrecondition says what is not so.
absl::Status RunStatus(const StatusFlags& flags);

struct DrainFlags {
  ControlFlags control;
  std::string worker;
  bool alone = false;  // waits until no other worker of its role drains
};
absl::Status RunDrain(const DrainFlags& flags);

// Adds all of them to the binary. `report` prints a status and gives the exit code.
class ClusterCommands {
 public:
  using Report = std::function<void(const absl::Status&)>;

  void AddTo(CLI::App& app, const Report& report);

 private:
  void AddUp(CLI::App& app, const Report& report);
  void AddScheduler(CLI::App& app, const Report& report);
  void AddAttentionWorker(CLI::App& app, const Report& report);
  void AddComputeWorker(CLI::App& app, const Report& report);
  void AddPairWorker(CLI::App& app, const Report& report);
  void AddServer(CLI::App& app, const Report& report);
  void AddStatus(CLI::App& app, const Report& report);
  void AddDrain(CLI::App& app, const Report& report);

  SchedulerFlags scheduler_;
  AttentionWorkerFlags attention_;
  ComputeWorkerFlags compute_;
  PairWorkerFlags pair_;
  ServerFlags server_;
  UpFlags up_;
  StatusFlags status_;
  DrainFlags drain_;
};

}  // namespace dovetail::cli
