#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <future>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/log.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/cuda/cuda_model.h"
#include "kernels/cuda/cuda_device.h"
#include "server/cli/child_processes.h"
#include "server/cli/cluster_commands.h"
#include "server/embedded_cluster.h"
#include "server/kv_room.h"

namespace dovetail::cli {
namespace {

constexpr absl::Duration kPollPause = absl::Milliseconds(50);
constexpr absl::Duration kSchedulerStart = absl::Seconds(15);
constexpr absl::Duration kQuickEnd = absl::Seconds(3);
constexpr absl::Duration kRestartPause = absl::Milliseconds(200);
constexpr absl::Duration kLanesAreKnown = absl::Milliseconds(300);  // by the next heartbeats
constexpr absl::Duration kAnnounceAnyway = absl::Seconds(10);
constexpr int kQuickEndsAllowed = 3;
constexpr uint64_t kBesideWeights = uint64_t{2} << 30;  // a compute worker's buffers, cuBLASLt and CUDA itself
constexpr absl::Duration kStopPatience = absl::Seconds(5);

using Arguments = std::vector<std::string>;

// What the parent must know of a child's output: the address after a marker in its first line that has it.
class Announcement {
 public:
  explicit Announcement(std::string marker) : marker_(std::move(marker)), future_(promise_.get_future()) {}
  void OnLine(const std::string& line) {  // on the reader's thread
    if (said_ || line.rfind(marker_, 0) != 0) return;
    said_ = true;
    promise_.set_value(line.substr(marker_.size()));
  }
  bool Ready() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  std::string Take() { return future_.get(); }

 private:
  const std::string marker_;
  std::promise<std::string> promise_;
  std::future<std::string> future_;
  bool said_ = false;
};

class Up {
 public:
  Up(const UpFlags& flags, StopSignal& stop) : flags_(flags), stop_(stop) {}

  absl::Status Run() {
    for (const absl::string_view device : absl::StrSplit(flags_.attention_devices, ','))
      if (device != "cpu" && !kernels::cuda::ParseCudaName(std::string(device)).ok())
        return InvalidArgument("--attention-devices: '", device, "' is neither cpu nor cuda:N, as in cuda:1,cpu");
    DT_RETURN_IF_ERROR(SizeKvCache());
    DT_RETURN_IF_ERROR(StartScheduler());
    if (stop_.Raised()) return absl::OkStatus();
    DT_RETURN_IF_ERROR(StartWorkers());
    DT_RETURN_IF_ERROR(
        children_.Start("server", ServerArguments(), [this](const std::string& line) { server_.OnLine(line); }));
    const absl::Status end = Watch();
    children_.Stop("server", absl::Seconds(flags_.server.api.shutdown_timeout) + absl::Seconds(1));
    children_.StopAll(kStopPatience);
    return end;
  }

 private:
  absl::Status SizeKvCache() {
    DT_ASSIGN_OR_RETURN(const auto checkpoint, OpenModel(flags_.engine));
    DT_ASSIGN_OR_RETURN(const auto table,
                        compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(flags_.engine),
                                                  StateDtypeOf(flags_.engine)));
    if (flags_.engine.kv_cache_memory != "auto") {
      DT_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes("--kv-cache-memory-bytes", flags_.engine.kv_cache_memory));
      kv_bytes_ = bytes / flags_.engine.attention_workers;
      if (bytes > 0)
        DT_RETURN_IF_ERROR(server::CheckKvCacheBytes(table, bytes, flags_.engine.attention_workers,
                                                     KvStorageOf(flags_.engine.kv_cache_dtype)));
    } else {
      scheduler::SchedulerOptions options = SchedulerOptionsOf(flags_.engine);
      if (options.max_model_len == 0) options.max_model_len = static_cast<int>(checkpoint->config().max_positions);
      const int workers = flags_.engine.attention_workers;
      const attention::KvStorage storage = KvStorageOf(flags_.engine.kv_cache_dtype);
      kv_bytes_ = server::DefaultKvCacheBytes(table, options, workers, 0, storage) / workers;
      most_kv_bytes_ = server::DefaultKvCacheBytes(table, options, workers, UINT64_MAX, storage) / workers;
      weight_bytes_ = compute::CudaModel::WeightBytes(checkpoint->config()) + kBesideWeights;
    }
    if (kv_bytes_ > 0) return absl::OkStatus();
    return InvalidArgument("--kv-cache-memory-bytes: a KV cache of no bytes holds no token; write 8GiB, or auto");
  }

  // A GPU's own memory bounds what lies there: the worker finds out, and leaves room for the weights that are loaded
  // meanwhile.
  Arguments KvArguments(const std::string& device) const {
    if (device == "cpu" || most_kv_bytes_ == 0) return {"--kv-capacity", std::to_string(kv_bytes_)};
    const std::vector<std::string> devices = absl::StrSplit(flags_.attention_devices, ',');
    int sharers = 0;
    for (int i = 0; i < flags_.engine.attention_workers; ++i) sharers += devices[i % devices.size()] == device ? 1 : 0;
    const bool with_weights = flags_.engine.device == device || flags_.engine.device == "auto";
    return {"--kv-capacity", "auto", "--kv-sharers", std::to_string(sharers), "--kv-leave",
            std::to_string(with_weights ? weight_bytes_ : 0), "--kv-most", std::to_string(most_kv_bytes_)};
  }

  absl::Status StartScheduler() {
    const EngineFlags& engine = flags_.engine;
    Arguments arguments = {"scheduler",
                           "--listen",
                           flags_.listen,
                           "--lanes",
                           flags_.lanes,
                           "--lease-ms",
                           std::to_string(flags_.lease_ms),
                           "--max-model-len",
                           std::to_string(engine.max_model_len),
                           "--max-num-seqs",
                           std::to_string(engine.max_num_seqs),
                           "--max-num-batched-tokens",
                           std::to_string(engine.max_num_batched_tokens),
                           "--max-num-queued-reqs",
                           std::to_string(engine.max_queued_requests),
                           "--placement",
                           engine.placement,
                           "--micro-batches",
                           std::to_string(engine.micro_batches),
                           engine.enable_prefix_caching ? "--enable-prefix-caching" : "--no-enable-prefix-caching",
                           engine.enable_chunked_prefill ? "--enable-chunked-prefill" : "--no-enable-chunked-prefill"};
    if (engine.seed) arguments.insert(arguments.end(), {"--seed", std::to_string(*engine.seed)});
    if (flags_.trust_network) arguments.push_back("--trust-network");
    DT_RETURN_IF_ERROR(children_.Start("scheduler", arguments, [this](const std::string& line) {
      scheduler_.OnLine(line);
      if (line.find(" serves as ") != std::string::npos) ++workers_that_serve_;
    }));
    const absl::Time give_up = SystemClock().Now() + kSchedulerStart;
    while (!scheduler_.Ready() && !stop_.Raised()) {
      if (!children_.Reap().empty())
        return absl::UnavailableError("the scheduler did not start; its last line says why");
      if (SystemClock().Now() > give_up) return absl::DeadlineExceededError("the scheduler did not start within 15 s");
      absl::SleepFor(kPollPause);
    }
    if (!stop_.Raised()) address_ = scheduler_.Take();
    return absl::OkStatus();
  }

  // --exchange device is for those who have a GPU.
  std::string ExchangeOn(const std::string& device) const { return device == "cpu" ? "auto" : flags_.exchange; }

  absl::Status StartWorkers() {
    const EngineFlags& engine = flags_.engine;
    workers_["compute-1"] = {"compute-worker",
                             engine.model,
                             "--name",
                             "compute-1",
                             "--scheduler",
                             address_,
                             "--lanes",
                             flags_.lanes,
                             "--exchange",
                             flags_.exchange,
                             "--dtype",
                             engine.dtype,
                             "--kv-cache-dtype",
                             engine.kv_cache_dtype,
                             "--state-dtype",
                             engine.state_dtype,
                             "--load-format",
                             engine.load_format,
                             "--gpu-weights",
                             engine.gpu_weights,
                             "--device",
                             engine.device,
                             "--threads",
                             std::to_string(engine.threads),
                             "--prompt-scratch",
                             engine.prompt_scratch,
                             "--hand-over",
                             engine.hand_over,
                             engine.q_first ? "--q-first" : "--no-q-first"};
    const auto trace = [&](const std::string& name) {
      if (engine.trace_file.empty()) return;
      workers_[name].insert(workers_[name].end(), {"--trace-file", absl::StrCat(engine.trace_file, ".", name)});
    };
    trace("compute-1");
    // Attention shares the cores with the dense layers here: one thread a worker unless there are many cores.
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int threads = std::max(1, cores / (2 * engine.attention_workers));
    const std::vector<std::string> devices = absl::StrSplit(flags_.attention_devices, ',');
    for (int i = 1; i <= engine.attention_workers; ++i) {
      const std::string name = absl::StrCat("attention-", i);
      workers_[name] = {"attention-worker",
                        "--name",
                        name,
                        "--scheduler",
                        address_,
                        "--lanes",
                        flags_.lanes,
                        "--exchange",
                        ExchangeOn(devices[(i - 1) % devices.size()]),
                        "--state-snapshots",
                        std::to_string(engine.state_snapshots),
                        "--device",
                        devices[(i - 1) % devices.size()],
                        "--threads",
                        std::to_string(threads)};
      const Arguments kv = KvArguments(devices[(i - 1) % devices.size()]);
      workers_[name].insert(workers_[name].end(), kv.begin(), kv.end());
      if (engine.kv_checksums) workers_[name].push_back("--kv-checksums");
      if (engine.kv_cache_dtype == "fp8_e4m3")
        workers_[name].insert(workers_[name].end(), {"--kv-cache-dtype", "fp8_e4m3"});
      trace(name);
    }
    for (auto& [name, arguments] : workers_) {
      if (flags_.trust_network) arguments.push_back("--trust-network");
      DT_RETURN_IF_ERROR(StartWorker(name));
    }
    return absl::OkStatus();
  }

  absl::Status StartWorker(const std::string& name) {
    started_[name] = SystemClock().Now();
    return children_.Start(name, workers_[name]);
  }

  Arguments ServerArguments() const {
    const ApiFlags& api = flags_.server.api;
    Arguments arguments = {"server",
                           "--scheduler",
                           address_,
                           "--host",
                           api.host,
                           "--port",
                           std::to_string(api.port),
                           "--overload-status",
                           std::to_string(api.overload_status),
                           "--shutdown-timeout",
                           std::to_string(api.shutdown_timeout)};
    const auto add = [&](const std::string& flag, const std::string& value) {
      if (!value.empty()) arguments.insert(arguments.end(), {flag, value});
    };
    for (const std::string& key : api.api_keys) add("--api-key", key);
    for (const std::string& key : api.metrics_api_keys) add("--metrics-api-key", key);
    for (const std::string& name : api.served_model_names) add("--served-model-name", name);
    add("--chat-template", api.chat_template);
    add("--grpc-listen", api.grpc_listen);
    if (api.ignore_model_name) arguments.push_back("--ignore-model-name");
    if (flags_.engine.seed) add("--seed", std::to_string(*flags_.engine.seed));
    return arguments;
  }

  absl::Status Watch() {
    bool announced = false;
    std::map<std::string, absl::Time> to_restart;
    while (!stop_.Raised()) {
      for (const ChildProcesses::Ended& ended : children_.Reap()) {
        if (!workers_.contains(ended.name))
          return absl::UnavailableError(absl::StrCat("the ", ended.name, " ", ended.how, "; stopping"));
        const bool quick = SystemClock().Now() - started_[ended.name] < kQuickEnd;
        quick_ends_[ended.name] = quick ? quick_ends_[ended.name] + 1 : 0;
        if (quick_ends_[ended.name] >= kQuickEndsAllowed || (quick && !announced && ended.how.rfind("exited", 0) == 0))
          return absl::UnavailableError(absl::StrCat(ended.name, " ", ended.how, "; its last line says why"));
        LogWarning(ended.name, " ", ended.how, "; starting another");
        to_restart[ended.name] = SystemClock().Now() + kRestartPause;
      }
      for (auto it = to_restart.begin(); it != to_restart.end();) {
        if (SystemClock().Now() < it->second) {
          ++it;
          continue;
        }
        DT_RETURN_IF_ERROR(StartWorker(it->first));
        it = to_restart.erase(it);
      }
      if (!announced && server_.Ready()) {
        const absl::Time now = SystemClock().Now();
        server_ready_ = std::min(server_ready_, now);
        const bool all = workers_that_serve_ >= static_cast<int>(workers_.size());
        all_serve_ = all ? std::min(all_serve_, now) : absl::InfiniteFuture();
        announced = now > all_serve_ + kLanesAreKnown || now > server_ready_ + kAnnounceAnyway;
        if (announced) Announce();
      }
      absl::SleepFor(kPollPause);
    }
    return absl::OkStatus();
  }

  void Announce() {
    ControlFlags control;
    control.scheduler = address_;
    if (const absl::Status shown = RunStatus(control); !shown.ok()) LogWarning(std::string(shown.message()));
    std::printf("\nready: http://%s  (scheduler %s; Ctrl-C stops all)\n", server_.Take().c_str(), address_.c_str());
    std::fflush(stdout);
  }

  const UpFlags& flags_;
  StopSignal& stop_;
  uint64_t kv_bytes_ = 0;  // of each attention worker
  uint64_t most_kv_bytes_ = 0;  // of a worker, if memory were no bound; 0: its size was given
  uint64_t weight_bytes_ = 0;   // on a GPU, with what lies beside them
  std::string address_;    // of the scheduler
  Announcement scheduler_{"listening on "}, server_{"listening on http://"};
  std::map<std::string, Arguments> workers_;
  std::atomic<int> workers_that_serve_{0};  // so far, of all incarnations
  absl::Time server_ready_ = absl::InfiniteFuture(), all_serve_ = absl::InfiniteFuture();
  std::map<std::string, absl::Time> started_;
  std::map<std::string, int> quick_ends_;
  ChildProcesses children_;  // last: its readers use the announcements
};

}  // namespace

absl::Status RunUp(const UpFlags& flags) {
  StopSignal stop;
  return Up(flags, stop).Run();
}

}  // namespace dovetail::cli
