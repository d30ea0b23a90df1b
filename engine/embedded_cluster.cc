#include "engine/embedded_cluster.h"

#include <algorithm>
#include <utility>

#include "attention_worker/cpu/attention_executor.h"
#include "base/log.h"
#include "base/thread_name.h"
#include "base/trace.h"
#include "compute_worker/attention_specs.h"
#include "engine/idle_spin.h"
#include "engine/kv_room.h"
#include "engine/model_digest.h"
#include "proto/kv_blocks.h"
#include "scheduler/core/limits.h"

namespace dovetail::engine {
namespace {

bool IsCpu(const kernels::Device& device) { return dynamic_cast<const kernels::cuda::CudaDevice*>(&device) == nullptr; }

}  // namespace

EmbeddedCluster::EmbeddedCluster(const model::LoadedModel& model, const EmbeddedClusterOptions& options)
    : model_(model), options_(options), clock_(SystemClock()) {}

absl::StatusOr<std::unique_ptr<EmbeddedCluster>> EmbeddedCluster::Create(const model::LoadedModel& model,
                                                                         kernels::Device& device,
                                                                         const EmbeddedClusterOptions& options) {
  if (options.attention_workers < 1 || options.attention_workers > kMaxAttentionWorkers)
    return InvalidArgument("--attention-workers: ", options.attention_workers, " is outside 1..", kMaxAttentionWorkers);
  if (options.compute_workers < 1 || options.compute_workers > kMaxComputeWorkers)
    return InvalidArgument("--compute-workers: ", options.compute_workers, " is outside 1..", kMaxComputeWorkers);
  std::unique_ptr<EmbeddedCluster> cluster(new EmbeddedCluster(model, options));
  DT_RETURN_IF_ERROR(cluster->Build(device));
  std::vector<attention::AttentionWorkerNode*> apart;
  for (int i = 0; i < cluster->options_.attention_workers; ++i)
    (cluster->AttendsApart(i) ? apart : cluster->attention_here_).push_back(cluster->attention_[i].get());
  if (!apart.empty())
    cluster->attention_thread_ =
        std::make_unique<AttentionThread>(std::move(apart), cluster->attention_doorbell_, cluster->doorbell_);
  cluster->thread_ = std::thread([raw = cluster.get()] { raw->Run(); });
  return cluster;
}

absl::Status EmbeddedCluster::SizeKvCache(const proto::AttentionTable& table) {
  const uint64_t block_bytes = attention::KvBlockBytes(table, options_.kv_storage);
  const uint64_t blocks_per_64_tokens = proto::BlocksPerSegment(table);
  const uint64_t set_bytes = blocks_per_64_tokens * block_bytes;
  if (!options_.attention_places.empty()) return SizeKvOfPlaces(table, set_bytes);
  uint64_t bytes = options_.kv_cache_bytes;
  using proto::LinearPrompts;
  const bool leave =
      std::all_of(compute_.begin(), compute_.end(), [](const auto& node) { return node->leaves_states(); });
  const LinearPrompts linear = leave ? LinearPrompts::kOnComputeWorkers : LinearPrompts::kOnAttentionWorkers;
  if (bytes == 0) {
    const uint64_t room = options_.kv_room ? options_.kv_room() : 0;
    if (options_.kv_room) {
      DT_RETURN_IF_ERROR(
          CheckKvRoom(table, options_.scheduler, options_.attention_workers, room, options_.kv_storage, linear));
    }
    bytes =
        DefaultKvCacheBytes(table, options_.scheduler, options_.attention_workers, room, options_.kv_storage, linear);
  }
  const uint64_t sets = bytes / set_bytes / options_.attention_workers;  // of each worker
  DT_RETURN_IF_ERROR(CheckKvCacheBytes(table, bytes, options_.attention_workers, options_.kv_storage));
  const uint64_t worker_blocks = sets * blocks_per_64_tokens;
  if (worker_blocks > UINT32_MAX)
    return InvalidArgument("--kv-cache-memory-bytes: ", bytes, " is more than a worker can index");
  worker_blocks_.assign(options_.attention_workers, static_cast<uint32_t>(worker_blocks));
  kv_blocks_ = worker_blocks * options_.attention_workers;
  kv_tokens_ = sets * kSegmentTokens * options_.attention_workers;
  kv_bytes_ = kv_blocks_ * block_bytes;
  return absl::OkStatus();
}

absl::Status EmbeddedCluster::SizeKvOfPlaces(const proto::AttentionTable& table, uint64_t set_bytes) {
  for (const EmbeddedClusterOptions::AttentionPlace& place : options_.attention_places) {
    const uint64_t bytes = place.kv_bytes();
    DT_RETURN_IF_ERROR(CheckKvCacheBytes(table, bytes, 1, options_.kv_storage, place.sized_by));
    const uint64_t blocks = bytes / set_bytes * proto::BlocksPerSegment(table);
    if (blocks > UINT32_MAX)
      return InvalidArgument(place.sized_by, ": ", bytes, " bytes on ", place.device->name(),
                             " are more than a worker can index");
    worker_blocks_.push_back(static_cast<uint32_t>(blocks));
    kv_blocks_ += blocks;
    kv_tokens_ += bytes / set_bytes * kSegmentTokens;
  }
  kv_bytes_ = kv_blocks_ * attention::KvBlockBytes(table, options_.kv_storage);
  return absl::OkStatus();
}

std::vector<EmbeddedClusterOptions::ComputeDevice> EmbeddedCluster::ComputeDevices(kernels::Device& first) const {
  std::vector<EmbeddedClusterOptions::ComputeDevice> distinct = {{&first, options_.compute.dense}};
  distinct.insert(distinct.end(), options_.more_compute_devices.begin(), options_.more_compute_devices.end());
  std::vector<EmbeddedClusterOptions::ComputeDevice> devices;
  for (size_t i = 0; i < static_cast<size_t>(options_.compute_workers); ++i)
    devices.push_back(distinct[i % distinct.size()]);
  return devices;
}

// An attention worker that holds sequences whole: tensors of these need not leave the GPU, which needs not wait for the
// host between two steps where all are there.
int EmbeddedCluster::PairOf(int compute_worker, kernels::Device& first) const {
  const bool whole = options_.scheduler.placement == scheduler::PlacementPolicy::kRequest ||
                     options_.scheduler.placement == scheduler::PlacementPolicy::kTiers;
  if (options_.compute.dense == nullptr || !whole) return -1;
  if (options_.attention_places.empty()) {
    const bool one_of_each = options_.compute_workers == 1 && options_.attention_workers == 1;
    return one_of_each && options_.attention_device == nullptr ? 0 : -1;
  }
  const auto devices = ComputeDevices(first);
  const kernels::Device* const own = devices[static_cast<size_t>(compute_worker)].device;
  const auto on_it = [&](const auto& one) { return one.device == own; };
  if (std::count_if(devices.begin(), devices.end(), on_it) != 1) return -1;  // whose stream would it be?
  const auto place = std::find_if(options_.attention_places.begin(), options_.attention_places.end(), on_it);
  return place == options_.attention_places.end() ? -1 : static_cast<int>(place - options_.attention_places.begin());
}

absl::Status EmbeddedCluster::ShareGpus(kernels::Device& first, int micro_batches) {
  const auto devices = ComputeDevices(first);
  for (size_t i = 0; i < devices.size(); ++i) {
    auto* const gpu = pairs_[i] >= 0 ? dynamic_cast<kernels::cuda::CudaDevice*>(devices[i].device) : nullptr;
    if (gpu == nullptr) {
      pairs_[i] = -1;
      shared_gpus_.emplace_back();
      continue;
    }
    const transport::Port& attention = *ports_[1 + devices.size() + static_cast<size_t>(pairs_[i])];
    DT_ASSIGN_OR_RETURN(shared_gpus_.emplace_back(), exchange::SharedGpu::Create(*gpu, attention.id(), micro_batches));
  }
  return absl::OkStatus();
}

kernels::Device& EmbeddedCluster::DeviceOf(int attention_worker, kernels::Device& computing) const {
  if (!options_.attention_places.empty()) return *options_.attention_places[attention_worker].device;
  return options_.attention_device != nullptr ? *options_.attention_device : computing;
}

bool EmbeddedCluster::AttendsApart(int attention_worker) const {
  if (options_.attention_places.empty())
    return options_.attention_device != nullptr && IsCpu(*options_.attention_device);
  return options_.compute.dense != nullptr && IsCpu(*options_.attention_places[attention_worker].device);
}

absl::Status EmbeddedCluster::Build(kernels::Device& device) {
  DT_ASSIGN_OR_RETURN(const proto::AttentionTable table,
                      compute::AttentionTableOf(model_.config(), options_.kv_dtype, options_.state_dtype));
  options_.scheduler.attention = table;
  options_.scheduler.model_digest = ModelDigest(*model_.checkpoint, options_.kv_dtype, options_.state_dtype) ^
                                    static_cast<uint64_t>(options_.kv_storage);
  if (!options_.attention_places.empty())
    options_.attention_workers = static_cast<int>(options_.attention_places.size());
  for (int i = 0; i < options_.compute_workers; ++i) pairs_.push_back(PairOf(i, device));
  const bool only_pairs = options_.attention_workers == options_.compute_workers &&
                          std::find(pairs_.begin(), pairs_.end(), -1) == pairs_.end();
  if (only_pairs && !IsCpu(device) && options_.scheduler.micro_batches == 1 && !options_.scheduler.adapt_micro_batches)
    options_.scheduler.run_ahead = true;
  // Tiers may be parted.
  const int least = options_.scheduler.placement == scheduler::PlacementPolicy::kTiers ? 2 : 1;
  const int micro_batches = options_.compute_workers > 1   ? scheduler::kMaxMicroBatches
                            : options_.scheduler.run_ahead ? 2
                                                           : std::max(options_.scheduler.micro_batches, least);
  DT_RETURN_IF_ERROR(options_.scheduler.Validate());

  const int nodes = 1 + options_.compute_workers + options_.attention_workers;
  for (int i = 0; i < nodes; ++i) {
    const bool apart = i > options_.compute_workers && AttendsApart(i - options_.compute_workers - 1);
    ports_.push_back(fabric_.CreatePort(apart ? &attention_doorbell_ : &doorbell_));
  }
  transport::Port& scheduler_port = *ports_[0];
  DT_RETURN_IF_ERROR(ShareGpus(device, micro_batches));

  scheduler_ = std::make_unique<scheduler::SchedulerNode>(
      options_.scheduler, options_.seed, scheduler_port, clock_,
      [this](requests::GenerationUpdate update) { Emit(std::move(update)); },
      [this](const proto::StepResult& result, int sequences, int new_tokens) {
        MutexLock lock(mutex_);
        if (step_samples_.size() == kMaxStepSamples) step_samples_.pop_front();
        step_samples_.push_back({new_tokens, sequences, result.timings.total_us, result.timings.dense_us,
                                 result.timings.attention_wait_us, result.timings.sample_us,
                                 result.timings.attention_us, result.timings.prompt_us, result.timings.overlapped_us});
      });
  scheduler_->SetSpans(options_.spans);
  scheduler_->SetCacheListener([this](requests::CacheEvents events) {
    if (cache_sink_ != nullptr) cache_sink_->OnCacheEvents(std::move(events));
  });
  DT_RETURN_IF_ERROR(BuildComputeWorkers(device, table, micro_batches));
  DT_RETURN_IF_ERROR(SizeKvCache(table));
  for (int i = 0; i < options_.compute_workers; ++i) {
    const WorkerId worker(static_cast<uint32_t>(i));
    scheduler_->AddComputeWorker(worker, ports_[1 + i]->id(), compute_[i]->leaves_states());
    for (int other = 0; other < options_.compute_workers; ++other)
      if (other != i) compute_[other]->AddComputeWorker({worker, Epoch(1), ports_[1 + i]->id()});
    for (int earlier = 0; earlier < i; ++earlier)
      scheduler_->LinkComputeWorkers(WorkerId(static_cast<uint32_t>(earlier)), worker, true);
  }
  DT_RETURN_IF_ERROR(BuildAttentionWorkers(device, table, micro_batches));
  PublishStats();
  return absl::OkStatus();
}

absl::Status EmbeddedCluster::BuildAttentionWorkers(kernels::Device& device, const proto::AttentionTable& table,
                                                    int micro_batches) {
  for (int i = 0; i < options_.attention_workers; ++i) {
    const WorkerId worker(static_cast<uint32_t>(i));
    const Epoch epoch(1);
    transport::Port& port = *ports_[1 + options_.compute_workers + i];
    attention::AttentionWorkerOptions options{worker, epoch, worker_blocks_[i], micro_batches};
    options.snapshot_percent = options_.snapshot_percent;
    options.model_digest = options_.scheduler.model_digest;
    options.poison_freed = options_.poison_freed_kv;
    options.digests = options_.digests;
    options.deterministic = options_.compute.deterministic && options_.compute.dense != nullptr;
    options.reports_cache = options_.scheduler.tell_cache && options_.scheduler.enable_prefix_caching;
    const auto pair = std::find(pairs_.begin(), pairs_.end(), i);
    const auto partner = static_cast<size_t>(pair - pairs_.begin());  // the compute worker
    exchange::SharedGpu* const shared_gpu = pair != pairs_.end() ? shared_gpus_[partner].get() : nullptr;
    auto node = attention::AttentionWorkerNode::Create(table, options, DeviceOf(i, device), port, SystemClock(),
                                                       shared_gpu, options_.kv_storage);
    if (!node.ok())
      return Annotate(node.status(), absl::StrCat("KV cache of ", kv_bytes_,
                                                  " bytes (--kv-cache-memory-bytes asks for another size)"));
    attention_.push_back(*std::move(node));
    attention_.back()->SetTrace(NewTrace(absl::StrCat("attention worker ", i)));
    attention_.back()->SetSpans(options_.spans);
    for (size_t c = 0; c < compute_.size(); ++c)
      compute_[c]->AddAttentionWorker(
          {.worker = worker, .epoch = epoch, .node = port.id(), .same_gpu = pairs_[c] == i});
    const double rate = options_.attention_places.empty() ? 1 : options_.attention_places[i].read_rate;
    std::optional<WorkerId> with;
    if (shared_gpu != nullptr) with = WorkerId(static_cast<uint32_t>(partner));
    scheduler_->AddAttentionWorker(worker, epoch, port.id(), worker_blocks_[i], rate, with);
  }
  return absl::OkStatus();
}

absl::Status EmbeddedCluster::BuildComputeWorkers(kernels::Device& device, const proto::AttentionTable& table,
                                                  int micro_batches) {
  compute::ComputeWorkerOptions options;
  options.micro_batches = micro_batches;
  options.max_step_tokens = std::max(options_.scheduler.max_num_batched_tokens, options_.scheduler.max_num_seqs);
  options.vocab_size = static_cast<int32_t>(model_.config().vocab_size);
  const auto devices = ComputeDevices(device);
  for (int i = 0; i < options_.compute_workers; ++i) {
    const EmbeddedClusterOptions::ComputeDevice& on = devices[i];
    compute::ComputeWorkerTuning tuning = options_.compute;
    tuning.dense = on.dense;
    tuning.shared_gpu = shared_gpus_[i].get();
    tuning.attends_elsewhere = tuning.shared_gpu != nullptr && options_.attention_workers > 1;
    tuning.kv_storage = options_.kv_storage;
    tuning.rank_rows_on_device = on.dense != nullptr;
    tuning.spans = options_.spans;
    tuning.trace = NewTrace(options_.compute_workers == 1 ? "compute worker" : absl::StrCat("compute worker ", i));
    DT_ASSIGN_OR_RETURN(auto node, compute::ComputeWorkerNode::Create(model_, table, options, ports_[0]->id(),
                                                                      *on.device, *ports_[1 + i], clock_, tuning));
    compute_.push_back(std::move(node));
  }
  return absl::OkStatus();
}

Trace* EmbeddedCluster::NewTrace(const std::string& name) {
  if (options_.trace_file.empty()) return nullptr;
  return traces_.emplace_back(std::make_unique<Trace>(name)).get();
}

EmbeddedCluster::~EmbeddedCluster() {
  {
    MutexLock lock(mutex_);
    stopping_.store(true, std::memory_order_release);
  }
  doorbell_.Ring();
  if (thread_.joinable()) thread_.join();
  attention_thread_.reset();
  std::vector<const Trace*> traces;
  for (const auto& trace : traces_) traces.push_back(trace.get());
  if (traces.empty()) return;
  if (const absl::Status written = WriteChromeTrace(options_.trace_file, traces); !written.ok())
    LogWarning(std::string(written.message()));
}

absl::Status EmbeddedCluster::CheckRequest(const requests::GenerationRequest& request) const {
  if (request.prompt.empty()) return InvalidArgument("prompt: has no token");
  for (const TokenId token : request.prompt)
    if (token < 0 || token >= model_.config().vocab_size)
      return InvalidArgument("prompt: token ", token, " is outside the vocabulary of ", model_.config().vocab_size);
  const bool wants_vector = request.pooling != requests::Pooling::kNone;
  const int64_t longest = options_.scheduler.max_model_len - (wants_vector ? 0 : 1);
  if (static_cast<int64_t>(request.prompt.size()) > longest)
    return InvalidArgument("prompt: ", request.prompt.size(),
                           " tokens leave no room for output; sequences have at most ",
                           options_.scheduler.max_model_len, " tokens (--max-model-len)");
  if (request.choices < 1 || request.choices > requests::kMaxChoices)
    return InvalidArgument("n: ", request.choices, " is outside 1..", requests::kMaxChoices);
  if (wants_vector && request.max_tokens != 0)
    return InvalidArgument("max_tokens: ", request.max_tokens, " tokens with a vector; ask for 0");
  if (!wants_vector && request.max_tokens < 1)
    return InvalidArgument("max_tokens: ", request.max_tokens, " is not positive");
  return absl::OkStatus();
}

absl::StatusOr<RequestId> EmbeddedCluster::Submit(requests::GenerationRequest request,
                                                  std::shared_ptr<GenerationSink> sink) {
  DT_RETURN_IF_ERROR(CheckRequest(request));
  // Rotated keys of length-dependent rope kinds are shared only between sequences that rotate alike.
  for (const model::RopeSpec& rope : model_.config().ropes)
    if (const int64_t variant = model::RopeVariant(rope, static_cast<int64_t>(request.prompt.size())); variant != 0)
      absl::StrAppend(&request.cache_salt, "|rope", variant);
  const RequestId id(next_request_.fetch_add(1, std::memory_order_relaxed));
  request.id = id;
  {
    MutexLock lock(mutex_);
    if (stopping_.load(std::memory_order_relaxed)) return absl::UnavailableError("the engine is stopping");
    if (!lost_.ok()) return absl::UnavailableError(lost_.message());
    // The scheduler says which of several tenants gives way in a full queue; this bounds what it has not seen yet.
    if (requests_in_system_ >= 2 * options_.scheduler.max_queued_requests + options_.scheduler.max_num_seqs)
      return ResourceExhausted("the queue is full: ", requests_in_system_, " requests are being served or waiting");
    ++requests_in_system_;
    new_sinks_[id] = std::move(sink);
    inbox_.push_back(
        scheduler::RequestArrived{std::make_shared<const requests::GenerationRequest>(std::move(request))});
    inbox_filled_.store(true, std::memory_order_release);
  }
  doorbell_.Ring();
  return id;
}

void EmbeddedCluster::Push(scheduler::Event event) {
  {
    MutexLock lock(mutex_);
    inbox_.push_back(std::move(event));
    inbox_filled_.store(true, std::memory_order_release);
  }
  doorbell_.Ring();
}

void EmbeddedCluster::WatchCache(std::shared_ptr<CacheSink> sink) {
  {
    MutexLock lock(mutex_);
    new_cache_sink_ = std::move(sink);
    inbox_filled_.store(true, std::memory_order_release);
  }
  doorbell_.Ring();
}

void EmbeddedCluster::Cancel(RequestId request) { Push(scheduler::RequestCancelled{request}); }
void EmbeddedCluster::StopChoice(RequestId request, int choice) { Push(scheduler::ChoiceStopped{request, choice}); }
void EmbeddedCluster::Pause(RequestId request) { Push(scheduler::RequestPaused{request}); }
void EmbeddedCluster::Resume(RequestId request) { Push(scheduler::RequestResumed{request}); }

EngineStats EmbeddedCluster::stats() {
  MutexLock lock(mutex_);
  return stats_;
}

std::vector<StepSample> EmbeddedCluster::TakeStepSamples() {
  MutexLock lock(mutex_);
  std::vector<StepSample> samples(step_samples_.begin(), step_samples_.end());
  step_samples_.clear();
  return samples;
}

void EmbeddedCluster::Emit(requests::GenerationUpdate update) {
  const auto it = sinks_.find(update.request);
  if (it == sinks_.end()) return;
  const std::shared_ptr<GenerationSink> sink = it->second;
  if (update.request_finished) {
    sinks_.erase(it);
    MutexLock lock(mutex_);
    --requests_in_system_;
  }
  sink->OnUpdate(std::move(update));
}

void EmbeddedCluster::PublishStats() {
  EngineStats now;
  now.max_queued_requests = options_.scheduler.max_queued_requests;
  now.scheduler = scheduler_->stats();
  std::vector<AttentionThread::State> apart;
  if (attention_thread_ != nullptr) apart = attention_thread_->states();
  auto next = apart.begin();
  for (size_t i = 0; i < attention_.size(); ++i) {
    if (attention_[i] == nullptr) continue;
    const bool there = attention_thread_ != nullptr && AttendsApart(static_cast<int>(i));
    const AttentionThread::State state = there ? *next++ : AttentionThread::StateOf(*attention_[i]);
    now.kv_blocks_total += state.blocks_total;
    now.kv_blocks_in_use += state.blocks_in_use;
    now.kv_blocks_cached += state.blocks_cached;
    now.damaged_blocks.push_back({absl::StrCat("attention-", now.damaged_blocks.size() + 1), 0, state.damaged_blocks});
  }
  now.last_progress = clock_.Now();
  MutexLock lock(mutex_);
  stats_ = now;
}

void EmbeddedCluster::TakeNewSinks() {
  for (auto& [id, sink] : new_sinks_) sinks_[id] = std::move(sink);
  new_sinks_.clear();
}

bool EmbeddedCluster::RunOnce() {
  // Looked at between any two layers: no lock unless there is something.
  std::shared_ptr<CacheSink> new_cache_sink;
  if (inbox_filled_.load(std::memory_order_acquire)) {
    MutexLock lock(mutex_);
    inbox_filled_.store(false, std::memory_order_relaxed);
    taken_.swap(inbox_);
    TakeNewSinks();
    new_cache_sink = std::move(new_cache_sink_);
  }
  if (new_cache_sink != nullptr) {
    cache_sink_ = std::move(new_cache_sink);
    cache_sink_->OnCacheEvents(scheduler_->CacheSnapshot());
  }
  for (const scheduler::Event& event : taken_) scheduler_->Handle(event);
  int handled = static_cast<int>(taken_.size());
  taken_.clear();
  const int scheduled = scheduler_->Poll();
  if (handled + scheduled > 0) PublishStats();
  handled += scheduled;
  for (const auto& node : compute_)
    if (node != nullptr) handled += node->Poll();
  for (attention::AttentionWorkerNode* worker : attention_here_) handled += worker->Poll();
  return handled > 0;
}

absl::Status EmbeddedCluster::Health() const {
  for (const auto& node : compute_)
    if (node != nullptr) DT_RETURN_IF_ERROR(node->Health());
  for (const attention::AttentionWorkerNode* worker : attention_here_) DT_RETURN_IF_ERROR(worker->Health());
  return attention_thread_ != nullptr ? attention_thread_->health() : absl::OkStatus();
}

bool EmbeddedCluster::LosePair() {
  const auto is_lost = [&](size_t i) {
    if (compute_[i] == nullptr || pairs_[i] < 0) return false;
    return !compute_[i]->Health().ok() || !attention_[static_cast<size_t>(pairs_[i])]->Health().ok();
  };
  size_t lost = 0;
  while (lost < compute_.size() && !is_lost(lost)) ++lost;
  if (lost == compute_.size() || lost_compute_.size() + 1 == compute_.size()) return false;
  const auto place = static_cast<size_t>(pairs_[lost]);
  const WorkerId computes(static_cast<uint32_t>(lost)), attends(static_cast<uint32_t>(place));
  const Epoch epoch(1);
  std::erase(attention_here_, attention_[place].get());
  lost_compute_.push_back(std::move(compute_[lost]));
  lost_attention_.push_back(std::move(attention_[place]));
  for (const auto& node : compute_) {
    if (node == nullptr) continue;
    node->LoseComputeWorker(computes, epoch);
    node->LoseAttentionWorker(attends, epoch);
  }
  for (const auto& node : attention_)
    for (const size_t port : {1 + lost, 1 + compute_.size() + place})
      if (node != nullptr) node->LosePeer(ports_[port]->id());
  scheduler_->LoseComputeWorker(computes);
  scheduler_->LoseAttentionWorker(attends, epoch);
  LogWarning(lost_compute_.size(), " of ", compute_.size(),
             " GPUs are lost; the others go on with their requests. Start this process again to have it back");
  return true;
}

void EmbeddedCluster::Run() {
  NameThread("dt-engine");
  IdleSpin spin(clock_);
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool busy = RunOnce();
    if (busy) spin.Worked();
    if (const absl::Status health = Health(); !health.ok()) {
      LogError(std::string(health.message()));
      if (LosePair()) continue;
      {
        MutexLock lock(mutex_);
        lost_ = health;
        stats_.healthy = false;
        stats_.error = std::string(health.message());
      }
      return EndEverything(requests::FinishReason::kError, std::string(health.message()));
    }
    if (busy || (attention_thread_ != nullptr && spin.GoesOn())) continue;
    PublishStats();
    const absl::Duration until_deadline = scheduler_->NextDeadline() - clock_.Now();
    doorbell_.Wait(std::clamp(until_deadline, absl::ZeroDuration(), absl::Milliseconds(500)));
  }
  EndEverything(requests::FinishReason::kCancelled, "the engine was stopped");
}

void EmbeddedCluster::EndEverything(requests::FinishReason reason, const std::string& why) {
  {
    MutexLock lock(mutex_);
    TakeNewSinks();
  }
  for (auto& [id, sink] : sinks_) {
    requests::GenerationUpdate update;
    update.request = id;
    update.reason = reason;
    update.choice_finished = update.request_finished = true;
    update.error = why;
    update.error_code = absl::StatusCode::kUnavailable;
    sink->OnUpdate(std::move(update));
  }
  sinks_.clear();
}

}  // namespace dovetail::engine
