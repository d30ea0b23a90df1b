#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/cuda/cuda_model.h"
#include "engine/device_choice.h"
#include "engine/embedded_cluster.h"
#include "engine/kv_room.h"
#include "kernels/cpu/isa.h"
#include "server/cli/announcement.h"
#include "server/cli/attention_places.h"
#include "server/cli/child_processes.h"
#include "server/cli/cluster_commands.h"
#include "server/cli/compute_devices.h"
#include "server/cli/core_shares.h"
#include "server/cli/deterministic_flags.h"
#include "server/cli/kv_capacity.h"
#include "server/cli/kv_taken.h"
#include "server/cli/layout.h"
#include "server/cli/numa_places.h"
#include "server/cli/prefill_flags.h"
#include "server/cli/restart_pauses.h"
#include "server/cli/role.h"
#include "server/cli/role_arguments.h"
#include "server/cli/spare_input.h"
#include "server/cli/spares.h"
#include "server/cli/stop_signal.h"

namespace dovetail::cli {
namespace {

constexpr absl::Duration kPollPause = absl::Milliseconds(50);
constexpr absl::Duration kSchedulerStart = absl::Seconds(15);
constexpr absl::Duration kLanesAreKnown = absl::Milliseconds(300);  // by the next heartbeats
constexpr absl::Duration kAnnounceAnyway = absl::Seconds(10);
constexpr uint64_t kSpareBytes = uint64_t{512} << 20;  // of a spare on a GPU: its context and kernels
constexpr absl::Duration kStopPatience = absl::Seconds(5);
// Until a spare is started in place of one that was taken: a worker that joins needs the cores itself.
constexpr absl::Duration kNextSpare = absl::Seconds(1);

constexpr const char* kScheduler = "scheduler";
constexpr const char* kServer = "server";
constexpr const char* kComputePrefix = "compute-";
constexpr const char* kPairPrefix = "pair-";
constexpr const char* kNumaNode = "--numa-node";
constexpr const char* kThreadsOfShare = "share";  // in place of a number, until it is known where the layers run

class Up {
 public:
  Up(const UpFlags& flags, StopSignal& stop) : flags_(flags), stop_(stop), spares_(flags.spares) {}

  absl::Status Run() {
    DT_ASSIGN_OR_RETURN(pairs_, ApplyLayout(flags_));
    if (!pairs_) {
      DT_ASSIGN_OR_RETURN(places_, ParseAttentionPlaces("--attention-devices", flags_.attention_devices));
    }
    DT_ASSIGN_OR_RETURN(compute_workers_, ComputeWorkersOf(flags_.engine));
    compute_devices_ = ComputeDevicesOf(flags_.engine);
    if (pairs_) flags_.engine.attention_workers = compute_workers_;
    DT_RETURN_IF_ERROR(CheckPrefillRanks(flags_.engine, /*compute_workers=*/std::nullopt));
    DT_RETURN_IF_ERROR(TuningOf(flags_.engine).status());
    DT_RETURN_IF_ERROR(CheckTraceFlags(flags_.traces));
    DT_RETURN_IF_ERROR(SizeKvCache());
    stop_.OwnerEnds();  // its children end before it
    DT_RETURN_IF_ERROR(StartScheduler());
    if (stop_.Raised()) return absl::OkStatus();
    numa_ = NumaPlaces(flags_.numa == "auto" ? engine::ReadHostFacts() : engine::HostFacts{}, CpuAttentionWorkers());
    if (const std::string text = numa_.Text(); !text.empty()) LogInfo(text);
    NameWorkers();
    for (const auto& [name, arguments] : workers_) {
      if (WaitsForDevice(name))
        held_.insert(name);
      else
        DT_RETURN_IF_ERROR(StartOne(name));
    }
    DT_RETURN_IF_ERROR(StartOne(kServer));
    const absl::Status end = Watch();
    if (!http_address_.empty())  // it serves, and the others are needed while it drains
      children_.Stop(kServer, absl::Seconds(flags_.server.api.shutdown_timeout) + absl::Seconds(1),
                     [this] { return stop_.RaisedAgain(); });
    children_.StopAll(kStopPatience);
    return end;
  }

 private:
  absl::Status SizeKvCache() {
    DT_ASSIGN_OR_RETURN(const auto checkpoint, OpenModel(flags_.engine));
    DT_ASSIGN_OR_RETURN(const auto table, compute::AttentionTableOf(checkpoint->config(), KvDtypeOf(flags_.engine),
                                                                    StateDtypeOf(flags_.engine)));
    const attention::KvStorage storage = KvStorageOf(flags_.engine.kv_cache_dtype);
    if (FirstComputeDevice().starts_with("cuda"))
      DT_RETURN_IF_ERROR(CheckDeterministic(
          flags_.engine, !pairs_ && std::any_of(places_.begin(), places_.end(),
                                                [](const AttentionPlace& place) { return place.device == "cpu"; })));
    if (flags_.engine.deterministic && FirstComputeDevice() != "cpu") flags_.engine.prefill_ranks = "1";
    for (const AttentionPlace& place : places_) {
      DT_RETURN_IF_ERROR(attention::CheckKvStorage(table, storage, place.device == "cpu" ? "" : place.device));
      if (place.kv_bytes.has_value())
        DT_RETURN_IF_ERROR(engine::CheckKvCacheBytes(table, *place.kv_bytes, 1, storage,
                                                     absl::StrCat("--attention-devices: ", place.device)));
    }
    DT_RETURN_IF_ERROR(CheckPrefillExchange(flags_.engine, table, FirstComputeDevice().starts_with("cuda"),
                                            /*cache_on_its_gpu=*/pairs_ && compute_devices_.size() < 2));
    prefill_exchange_ = flags_.engine.prefill_exchange;
    if (compute_devices_.size() > 1 && !flags_.engine.deterministic)
      prefill_exchange_ = ExchangeBetweenGpus(flags_.engine, table);
    if (flags_.engine.kv_cache_memory != "auto") {
      DT_ASSIGN_OR_RETURN(const uint64_t bytes,
                          ParseBytes("--kv-cache-memory-bytes", flags_.engine.kv_cache_memory, "auto"));
      kv_bytes_ = bytes / flags_.engine.attention_workers;
      if (bytes > 0)
        DT_RETURN_IF_ERROR(engine::CheckKvCacheBytes(table, bytes, flags_.engine.attention_workers, storage));
    } else {
      scheduler::SchedulerOptions options = SchedulerOptionsOf(flags_.engine);
      if (options.max_model_len == 0) options.max_model_len = static_cast<int>(checkpoint->config().max_positions);
      options.ChooseStepTokens(/*on_gpu=*/FirstComputeDevice() != "cpu");
      const int workers = flags_.engine.attention_workers;
      kv_bytes_ = engine::DefaultKvCacheBytes(table, options, workers, 0, storage) / workers;
      most_kv_bytes_ = engine::DefaultKvCacheBytes(table, options, workers, UINT64_MAX, storage) / workers;
      DT_RETURN_IF_ERROR(SizeWeights(*checkpoint));
    }
    if (kv_bytes_ > 0) return absl::OkStatus();
    return InvalidArgument("--kv-cache-memory-bytes: a KV cache of no bytes holds no token; write 8GiB, or auto");
  }

  // As kept by --gpu-weights keep; auto may dequantise them.
  absl::Status SizeWeights(const model::Checkpoint& checkpoint) {
    weight_bytes_ = compute::CudaModel::WeightBytes(checkpoint.config());
    if (flags_.engine.gpu_weights == "keep") {
      const bool dummy = flags_.engine.load_format == "dummy";
      DT_ASSIGN_OR_RETURN(weight_bytes_, compute::CudaModel::KeptWeightBytes(checkpoint, dummy));
    }
    weight_bytes_ += kBesideWeights;
    return absl::OkStatus();
  }

  // A GPU's own memory bounds what lies there: the worker finds out, and leaves room for the weights that are loaded
  // meanwhile.
  Arguments KvArguments(const AttentionPlace& place) const {
    if (place.kv_bytes.has_value()) return {"--kv-capacity", std::to_string(*place.kv_bytes)};
    if (place.device == "cpu" || most_kv_bytes_ == 0) return {"--kv-capacity", std::to_string(kv_bytes_)};
    int sharers = 0;
    for (int i = 1; i <= flags_.engine.attention_workers; ++i) sharers += PlaceOf(i).device == place.device ? 1 : 0;
    int weights = FirstComputeDevice() == "auto" ? 1 : 0;
    for (int i = 1; i <= compute_workers_; ++i) weights += ComputeDevice(i) == place.device ? 1 : 0;
    const uint64_t leave = static_cast<uint64_t>(weights) * weight_bytes_ + GpuSpares() * kSpareBytes;
    return {"--kv-capacity", "auto",
            "--kv-sharers",  std::to_string(sharers),
            "--kv-leave",    std::to_string(leave),
            "--kv-most",     std::to_string(most_kv_bytes_)};
  }

  // The weights are there before it looks at what is free.
  Arguments KvArgumentsOfPair() const {
    if (FirstComputeDevice() == "cpu" || most_kv_bytes_ == 0) return {"--kv-capacity", std::to_string(kv_bytes_)};
    const size_t devices = std::max<size_t>(1, compute_devices_.size());
    const size_t sharers = (static_cast<size_t>(compute_workers_) + devices - 1) / devices;
    return {"--kv-capacity",         "auto",      "--kv-sharers",
            std::to_string(sharers), "--kv-most", std::to_string(most_kv_bytes_)};
  }

  // Each of which opens every GPU of this machine.
  uint64_t GpuSpares() const {
    std::set<std::pair<std::string, std::optional<uint64_t>>> places;
    for (int i = 1; !pairs_ && i <= flags_.engine.attention_workers; ++i)
      if (PlaceOf(i).device != "cpu") places.emplace(PlaceOf(i).device, PlaceOf(i).kv_bytes);
    return places.size() * static_cast<uint64_t>(flags_.spares);
  }

  // Of the attention worker with that number, from 1.
  const AttentionPlace& PlaceOf(int number) const { return places_[static_cast<size_t>(number - 1) % places_.size()]; }

  // Of the compute worker with that number, from 1: cpu, cuda:N, cuda or auto.
  const std::string& ComputeDevice(int number) const {
    if (compute_devices_.empty()) return flags_.engine.device;
    return compute_devices_[static_cast<size_t>(number - 1) % compute_devices_.size()];
  }
  const std::string& FirstComputeDevice() const { return ComputeDevice(1); }

  absl::Status StartScheduler() {
    DT_RETURN_IF_ERROR(StartOne(kScheduler));
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

  // --exchange device is for roles that have a GPU.
  std::string ExchangeOn(const std::string& device) const { return device == "cpu" ? "auto" : flags_.exchange; }

  std::vector<std::string> ComputeWorkerWords(const std::string& name, const std::string& device, int threads) const {
    const EngineFlags& engine = flags_.engine;
    return {pairs_ ? "pair-worker" : "compute-worker",
            engine.model,
            "--name",
            name,
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
            device,
            "--threads",
            std::to_string(threads),
            "--prompt-scratch",
            PromptScratch(),
            "--linear-prompts",
            engine.linear_prompts,
            "--hand-over",
            engine.hand_over,
            engine.q_first ? "--q-first" : "--no-q-first",
            engine.deterministic ? "--deterministic" : "--no-deterministic"};
  }

  // Compute workers attend to prompts where no GPU of an attention worker can, and where they divide prompts.
  std::string PromptScratch() const {
    const bool elsewhere =
        std::any_of(places_.begin(), places_.end(), [](const auto& at) { return at.device != "cpu"; });
    const bool own = !pairs_ && (!elsewhere || compute_devices_.size() > 1);
    if (flags_.engine.prompt_scratch != "auto") return flags_.engine.prompt_scratch;
    // One pair has all prompts in its KV cache, which gets that memory.
    if (pairs_ && compute_workers_ == 1 && FirstComputeDevice().starts_with("cuda")) return "0";
    return own ? "own" : "auto";
  }

  std::string ComputeName(int number) const { return absl::StrCat(pairs_ ? kPairPrefix : kComputePrefix, number); }

  void AddAttentionOfPair(Arguments& arguments) const {
    arguments.insert(arguments.end(), {"--state-snapshots", std::to_string(flags_.engine.state_snapshots)});
    const Arguments kv = KvArgumentsOfPair();
    arguments.insert(arguments.end(), kv.begin(), kv.end());
    if (flags_.engine.kv_checksums) arguments.push_back("--kv-checksums");
  }

  // What starts them: as of the command line.
  void NameWorkers() {
    const EngineFlags& engine = flags_.engine;
    // Several compute workers on a CPU share its cores.
    const int compute_threads =
        engine.threads > 0 || compute_workers_ == 1
            ? engine.threads
            : std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / compute_workers_);
    for (int i = 1; i <= compute_workers_; ++i) {
      const std::string name = ComputeName(i);
      workers_[name] = ComputeWorkerWords(name, ComputeDevice(i), compute_threads);
      if (pairs_) AddAttentionOfPair(workers_[name]);
    }
    const auto trace = [&](const std::string& name) {
      if (engine.trace_file.empty()) return;
      workers_[name].insert(workers_[name].end(), {"--trace-file", absl::StrCat(engine.trace_file, ".", name)});
    };
    for (int i = 1; i <= compute_workers_; ++i) trace(ComputeName(i));
    int on_cpu = 0;
    for (int i = 1; !pairs_ && i <= engine.attention_workers; ++i) {
      const std::string name = absl::StrCat("attention-", i);
      const std::optional<int> node = PlaceOf(i).device == "cpu" ? numa_.NodeOf(on_cpu++) : std::nullopt;
      workers_[name] = AttentionWorkerWords({"--name", name}, PlaceOf(i), node);
      trace(name);
      AddSparesFor(name, AttentionWorkerWords({"--spare"}, PlaceOf(i), node));
    }
    if (flags_.trust_network)
      for (auto& [name, arguments] : workers_) arguments.push_back("--trust-network");
  }

  // `who`: which worker it is.
  Arguments AttentionWorkerWords(const Arguments& who, const AttentionPlace& place,
                                 std::optional<int> numa_node) const {
    const EngineFlags& engine = flags_.engine;
    Arguments words = {"attention-worker"};
    const auto add = [&](const Arguments& more) { words.insert(words.end(), more.begin(), more.end()); };
    add(who);
    add({"--scheduler", address_, "--lanes", flags_.lanes, "--exchange", ExchangeOn(place.device), "--state-snapshots",
         std::to_string(engine.state_snapshots), "--device", place.device, "--threads", kThreadsOfShare});
    if (numa_node) add({kNumaNode, std::to_string(*numa_node)});
    add(KvArguments(place));
    if (engine.kv_checksums) add({"--kv-checksums"});
    if (KvStorageOf(engine.kv_cache_dtype) != attention::KvStorage::kAsSent)
      add({"--kv-cache-dtype", engine.kv_cache_dtype});
    return words;
  }

  void AddSparesFor(const std::string& worker, Arguments words) {
    // It puts its name behind that.
    if (!flags_.engine.trace_file.empty()) words.insert(words.end(), {"--trace-file", flags_.engine.trace_file});
    if (flags_.trust_network) words.push_back("--trust-network");
    MutexLock lock(mutex_);
    spares_.AddWorker(worker, words);
  }

  absl::Status StartOne(const std::string& name) {
    pauses_.Started(name, SystemClock().Now());
    const std::string& listen = address_.empty() ? flags_.listen : address_;  // another one is where the first one was
    if (name == kScheduler)
      return Launch(name, SchedulerArguments(flags_, listen, prefill_exchange_),
                    [this](const std::string&, const std::string& line) {
                      scheduler_.OnLine(line);
                      if (line.find(" serves as ") != std::string::npos) ++workers_that_serve_;
                    });
    if (name == kServer)
      return Launch(name, ServerArguments(flags_, address_, http_address_, grpc_address_),
                    [this](const std::string&, const std::string& line) {
                      grpc_.OnLine(line);
                      http_.OnLine(line);
                    });
    const std::optional<Arguments> spare = SpareCalled(name);
    return Launch(
        name, WithThreads(spare ? *spare : kv_taken_.Again(name, OnChosenDevice(workers_[name]))),
        [this](const std::string& now, const std::string& line) { OnWorkersLine(now, line); },
        spare ? ChildProcesses::Input::kLines : ChildProcesses::Input::kOfParent);
  }

  // What it is started with; nothing: it is none.
  std::optional<Arguments> SpareCalled(const std::string& name) {
    MutexLock lock(mutex_);
    const Arguments* const found = spares_.ArgumentsOf(name);
    return found == nullptr ? std::nullopt : std::optional(*found);
  }

  // With what all roles share.
  absl::Status Launch(const std::string& name, Arguments arguments, ChildProcesses::OnLine on_line,
                      ChildProcesses::Input input = ChildProcesses::Input::kOfParent) {
    LogFlags log = flags_.log;
    if (log.level != "debug") log.level = "info";  // what is read here is on that level: it is shown if ours is as low
    for (const Arguments& more : {ArgumentsOf(log), ArgumentsOf(flags_.traces)})
      arguments.insert(arguments.end(), more.begin(), more.end());
    return children_.Start(name, arguments, std::move(on_line), input);
  }

  // With --device auto the first compute worker chooses between the CPU and a GPU for all: a cluster refuses unlike
  // ones. How many threads attention on the CPU has depends on it as well.
  bool WaitsForDevice(const std::string& name) const {
    return FirstComputeDevice() == "auto" && name != ComputeName(1);
  }

  void OnWorkersLine(const std::string& name, const std::string& line) {
    kv_taken_.OnLine(name, line);
    MutexLock lock(mutex_);
    if (line == kSpareIsReady) spares_.Ready(name);
    if (line.find(name + " was drained") != std::string::npos) drained_.insert(name);
    if (const size_t at = line.find(kComputesOn); at != std::string::npos && device_.empty())
      device_ = line.substr(at + strlen(kComputesOn)) == "cpu" ? "cpu" : engine::kAnyGpu;
  }

  std::string ChosenDevice() {
    MutexLock lock(mutex_);
    return device_;
  }

  // Also for those that are started again.
  Arguments OnChosenDevice(Arguments arguments) {
    const std::string chosen = ChosenDevice();
    const auto flag = std::find(arguments.begin(), arguments.end(), "--device");
    if (flag != arguments.end() && *(flag + 1) == "auto" && !chosen.empty()) *(flag + 1) = chosen;
    return arguments;
  }

  int CpuAttentionWorkers() const {
    int workers = 0;
    for (int i = 1; !pairs_ && i <= flags_.engine.attention_workers; ++i) workers += PlaceOf(i).device == "cpu" ? 1 : 0;
    return workers;
  }

  // Once it is known where the layers run.
  WorkersOfMachine Workers() {
    const std::string& asked = FirstComputeDevice();
    WorkersOfMachine workers{.compute = compute_workers_};
    workers.layers_on_gpu = (asked == "auto" ? ChosenDevice() : asked).starts_with("cuda");
    workers.attention_on_cpu = CpuAttentionWorkers();
    workers.attention_on_gpu = flags_.engine.attention_workers - workers.attention_on_cpu;
    return workers;
  }

  Arguments WithThreads(Arguments arguments) {
    const auto share = std::find(arguments.begin(), arguments.end(), kThreadsOfShare);
    if (share == arguments.end()) return arguments;
    const WorkersOfMachine workers = Workers();
    const int cores = kernels::UsableCores();
    const int threads = AttentionThreads(cores, workers);
    const auto node = std::find(arguments.begin(), arguments.end(), kNumaNode);
    *share = std::to_string(node == arguments.end() ? threads : numa_.ThreadsOn(std::stoi(*(node + 1)), threads));
    if (workers.layers_on_gpu)
      arguments.insert(arguments.end(), {"--spin-us", std::to_string(engine::kSpinBesideGpuUs)});
    if (std::exchange(shares_told_, true) || !workers.layers_on_gpu || workers.attention_on_cpu == 0) return arguments;
    LogInfo("of ", cores, " cores, attention on the CPU computes with ", threads,
            " a worker, and each worker on a GPU has ", kCoresOfGpuWorker);
    if (CoresAreShort(cores, workers))
      LogWarning(workers.attention_on_cpu, " attention workers on the CPU, and workers on GPUs, share ", cores,
                 " cores: each step waits for what the system runs last. Start fewer attention workers "
                 "(--attention-workers), or take a machine with more cores");
    return arguments;
  }

  absl::Status Watch() {
    while (!stop_.Raised()) {
      for (const ChildProcesses::Ended& ended : children_.Reap()) DT_RETURN_IF_ERROR(OnEnd(ended));
      StartAgain();
      if (!announced_ && ServerListens()) AnnounceWhenWhole();
      absl::SleepFor(kPollPause);
    }
    return absl::OkStatus();
  }

  // An operator asked it to leave.
  bool WasDrained(const std::string& name) {
    MutexLock lock(mutex_);
    return drained_.contains(name);
  }

  // Before the cluster serves, one that exits says that it cannot be started as it was asked for; nothing is lost then.
  // A cluster that serves goes on without it, and with another as soon as one stays up.
  absl::Status OnEnd(const ChildProcesses::Ended& ended) {
    if (WasDrained(ended.name)) {
      LogInfo(ended.name, " was drained and stays away");
      EndSparesOf(ended.name);
      return absl::OkStatus();
    }
    if (unneeded_.erase(ended.name) > 0) return absl::OkStatus();
    const absl::Duration pause = pauses_.Ended(ended.name, SystemClock().Now());
    const bool stays_up = pauses_.StaysUp(ended.name);
    NotReady(ended.name);
    if (stays_up && GiveToSpare(ended.name)) {
      LogWarning(ended.name, " ", ended.how, "; a spare takes its place");
      return absl::OkStatus();
    }
    if (!announced_ && (!stays_up || ended.how.rfind("exited", 0) == 0))
      return absl::UnavailableError(absl::StrCat(ended.name, " ", ended.how, "; its last line says why"));
    if (stays_up)
      LogWarning(ended.name, " ", ended.how, "; starting another");
    else
      LogError(ended.name, " ", ended.how, "; starting another in ", absl::FormatDuration(pause),
               ": it does not stay up, ", pauses_.QuickEnds(ended.name), " in a row ended soon after their start");
    to_restart_[ended.name] = SystemClock().Now() + pause;
    return absl::OkStatus();
  }

  void NotReady(const std::string& spare) {
    MutexLock lock(mutex_);
    spares_.NotReady(spare);
  }

  std::optional<std::string> TakeSpare(const std::string& worker) {
    MutexLock lock(mutex_);
    return spares_.Take(worker);
  }

  // A ready spare is that worker from here on. False: there is none.
  bool GiveToSpare(const std::string& worker) {
    while (const std::optional<std::string> spare = TakeSpare(worker)) {
      if (!children_.Tell(*spare, ServeLine({worker, kv_taken_.By(worker)})).ok())
        continue;  // it has just ended, and will be reaped
      children_.Rename(*spare, worker);
      const absl::Time now = SystemClock().Now();
      pauses_.Started(worker, now);
      to_restart_[*spare] = now + kNextSpare;
      return true;
    }
    return false;
  }

  void EndSparesOf(const std::string& worker) {
    MutexLock lock(mutex_);
    for (const std::string& spare : spares_.RemoveWorker(worker)) {
      to_restart_.erase(spare);
      if (children_.PidOf(spare) < 0) continue;
      LogInfo(spare, " ends: no worker is left whose place it could take");
      unneeded_.insert(spare);
      children_.EndInput(spare);
    }
  }

  void StartAgain() {
    const absl::Time now = SystemClock().Now();
    if (!held_.empty() && !ChosenDevice().empty())
      for (const std::string& name : std::exchange(held_, {})) to_restart_[name] = now;
    for (auto& [name, due] : to_restart_) {
      if (now < due) continue;
      if (GiveToSpare(name)) {
        LogInfo(name, ": a spare takes its place");
        due = absl::InfiniteFuture();
        continue;
      }
      const absl::Status started = StartOne(name);
      if (!started.ok()) LogError(std::string(started.message()), "; trying again");
      due = started.ok() ? absl::InfiniteFuture() : now + pauses_.Ended(name, now);
    }
  }

  // Where it listens is known from then on: another server listens there, too.
  bool ServerListens() {
    if (http_address_.empty() && http_.Ready()) {
      http_address_ = http_.Take();
      if (grpc_.Ready()) grpc_address_ = grpc_.Take();
    }
    return !http_address_.empty();
  }

  void AnnounceWhenWhole() {
    const absl::Time now = SystemClock().Now();
    server_ready_ = std::min(server_ready_, now);
    const bool all = workers_that_serve_ >= static_cast<int>(workers_.size()) * (pairs_ ? 2 : 1);
    all_serve_ = all ? std::min(all_serve_, now) : absl::InfiniteFuture();
    announced_ = now > all_serve_ + kLanesAreKnown || now > server_ready_ + kAnnounceAnyway;
    if (!announced_) return;
    Announce();
    StartSpares();
  }

  // Not sooner: what starts until then needs the cores itself.
  void StartSpares() {
    MutexLock lock(mutex_);
    for (const std::string& spare : spares_.names()) to_restart_[spare] = SystemClock().Now();
  }

  void Announce() {
    ControlFlags control;
    control.scheduler = address_;
    if (!LogsAsJson()) {
      if (const absl::Status shown = RunStatus({control}); !shown.ok()) LogWarning(std::string(shown.message()));
      std::printf("\n");
    }
    cli::Announce(
        absl::StrCat("ready: http", s_, "://", http_address_, "  (scheduler ", address_, "; Ctrl-C stops all)"));
  }

  UpFlags flags_;
  StopSignal& stop_;
  bool pairs_ = false;  // the compute workers have the attention workers in their processes
  int compute_workers_ = 1;
  std::vector<std::string> compute_devices_;  // taken in turn by the compute workers; none: all are on --device
  std::string prefill_exchange_;              // of the scheduler
  std::vector<AttentionPlace> places_;        // taken in turn by the attention workers
  NumaPlaces numa_{engine::HostFacts{}, 0};
  KvTaken kv_taken_;
  uint64_t kv_bytes_ = 0;                    // of each attention worker whose place names no size
  uint64_t most_kv_bytes_ = 0;               // of a worker, if memory were no bound; 0: its size was given
  uint64_t weight_bytes_ = 0;                // on a GPU, with what else lies there
  std::string address_;                      // of the scheduler
  std::string http_address_, grpc_address_;  // of the server, once it has listened
  const std::string s_ = flags_.server.api.tls.enabled() ? "s" : "";  // of the schemes
  Announcement scheduler_{"listening on "}, http_{"listening on http" + s_ + "://"},
      grpc_{"listening on grpc" + s_ + "://"};
  std::map<std::string, Arguments> workers_;
  std::atomic<int> workers_that_serve_{0};  // so far, of all incarnations
  absl::Time server_ready_ = absl::InfiniteFuture(), all_serve_ = absl::InfiniteFuture();
  RestartPauses pauses_;
  bool shares_told_ = false;                      // how the cores are shared out
  std::set<std::string> held_;                    // not started yet
  std::map<std::string, absl::Time> to_restart_;  // when; absl::InfiniteFuture(): it runs
  bool announced_ = false;
  std::set<std::string> unneeded_;  // spares that were told to end
  Mutex mutex_;
  std::set<std::string> drained_ ABSL_GUARDED_BY(mutex_);
  Spares spares_ ABSL_GUARDED_BY(mutex_);
  std::string device_ ABSL_GUARDED_BY(mutex_);  // of compute workers: "cpu" or "cuda"; empty: not chosen yet
  ChildProcesses children_;                     // last: its readers use the announcements
};

}  // namespace

absl::Status RunUp(const UpFlags& flags) {
  BeginRole("up");
  const LogWriter log(LogOptionsOf(flags.log, "up"));
  StopSignal stop;
  return Up(flags, stop).Run();
}

}  // namespace dovetail::cli
