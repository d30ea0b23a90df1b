#include "tests/cluster/linked_cluster.h"

#include <utility>

#include "compute_worker/attention_specs.h"
#include "model/checkpoint.h"
#include "proto/link_frames.h"
#include "tests/seam/watched.h"
#include "tests/support/test_data.h"

namespace dovetail::test {
namespace {

using kernels::cuda::CudaDevice;

constexpr Epoch kEpoch(1);
constexpr absl::Duration kHang = absl::Seconds(120);

WorkerId IdOf(int worker) { return WorkerId(static_cast<uint32_t>(worker)); }

// A library that was opened by another name has memory, streams and a running kernel of its own. Copies stay open, as
// the library wants to, and are used again.
absl::StatusOr<std::unique_ptr<CudaDevice>> EmulatedGpu(size_t index) {
  static auto& copies = *new std::vector<std::shared_ptr<const kernels::cuda::CudaLibrary>>;
  const std::filesystem::path own =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libdovetail_cuda.so";
  if (!std::filesystem::exists(own)) return NotFound("there is no emulated GPU next to this program");
  while (copies.size() <= index) {
    const std::filesystem::path copy = TempFolder() / "libdovetail_cuda.so";
    std::filesystem::copy_file(own, copy);
    DT_ASSIGN_OR_RETURN(auto library, kernels::cuda::CudaLibrary::Open(copy.string()));
    copies.push_back(std::move(library));
  }
  DT_ASSIGN_OR_RETURN(auto gpu, CudaDevice::Create(copies[index], {.index = 0, .host_threads = 1}));
  if (std::string_view(gpu->info().name) != "CPU emulation") return NotFound("this is no emulated GPU");
  return gpu;
}

}  // namespace

// Counts what the compute worker sends.
class LinkedCluster::Port final : public transport::Port {
 public:
  Port(std::unique_ptr<transport::Port> port, LinkedFrames& frames) : port_(std::move(port)), frames_(frames) {}
  NodeId id() const override { return port_->id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    frames_.begun_through_hosts += header.type == proto::FrameType::kStepBegin;
    frames_.begun_between_gpus += header.type == proto::kStepBeginOnDevice;
    return port_->SendMessage(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    ++frames_.tensors;
    return port_->SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override { return port_->Poll(handler, max_frames); }

 private:
  const std::unique_ptr<transport::Port> port_;
  LinkedFrames& frames_;
};

absl::Status LinkedCluster::Possible() { return EmulatedGpu(0).status(); }

absl::StatusOr<std::unique_ptr<LinkedCluster>> LinkedCluster::Create(const std::filesystem::path& path,
                                                                     const LinkedClusterOptions& options) {
  std::unique_ptr<LinkedCluster> cluster(new LinkedCluster(options));
  DT_RETURN_IF_ERROR(cluster->Build(path));
  return cluster;
}

LinkedCluster::~LinkedCluster() {
  for (const auto& worker : workers_) worker->stops = true;
  for (const auto& worker : workers_)
    if (worker->thread.joinable()) worker->thread.join();
}

absl::Status LinkedCluster::Build(const std::filesystem::path& path) {
  DT_ASSIGN_OR_RETURN(gpu_, EmulatedGpu(0));
  DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenCheckpoint(path));
  DT_ASSIGN_OR_RETURN(model_, model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
  DT_ASSIGN_OR_RETURN(
      weights_, compute::CudaModel::Load(*gpu_, *model_, DType::kBF16, false, compute::GpuWeights::kDequantise, {}));
  DT_ASSIGN_OR_RETURN(table_, compute::AttentionTableOf(model_->config(), DType::kBF16));
  const int workers = alone() ? 1 : options_.attention_workers;
  for (int i = 0; i < 2 + workers; ++i) ports_.push_back(fabric_.CreatePort(nullptr));
  ports_[1] = std::make_unique<Port>(std::move(ports_[1]), frames_);
  scheduler::SchedulerOptions scheduler;
  scheduler.max_num_batched_tokens = options_.step_tokens;
  scheduler.max_num_seqs = 8;
  scheduler.max_model_len = 512;
  scheduler.attention = table_;
  scheduler.micro_batches = options_.micro_batches;
  scheduler.adapt_micro_batches = false;
  scheduler.placement = options_.placement;
  scheduler.token_shard_tokens = options_.token_shard_tokens;
  scheduler_ = std::make_unique<scheduler::SchedulerNode>(
      scheduler, 0, *ports_[0], SystemClock(), [this](requests::GenerationUpdate update) { Take(std::move(update)); },
      [this](const proto::StepResult& result, int, int) { failed_ += result.status != proto::StepStatus::kOk; });
  if (alone()) {
    DT_ASSIGN_OR_RETURN(shared_gpu_, exchange::SharedGpu::Create(*gpu_, NodeId(2), options_.micro_batches));
  } else {
    means_.device = gpu_.get();
    means_.links = links_;
    means_.on_cpu = false;
  }
  DT_RETURN_IF_ERROR(BuildCompute());
  for (int i = 0; i < workers; ++i) DT_RETURN_IF_ERROR(AddWorker(i));
  scheduler_->AddComputeWorker(WorkerId(0), NodeId(1));
  for (int i = 0; !alone() && i < workers; ++i)
    if (!Until([&] { return compute_->ExchangeWith(ports_[2 + i]->id()) == "device"; })) return Internal("no link");
  return absl::OkStatus();
}

absl::Status LinkedCluster::BuildCompute() {
  compute::ComputeWorkerOptions options;
  options.micro_batches = options_.micro_batches;
  options.max_step_tokens = options_.step_tokens;
  options.vocab_size = static_cast<int32_t>(model_->config().vocab_size);
  compute::ComputeWorkerTuning tuning;
  tuning.dense = weights_.get();
  tuning.shared_gpu = shared_gpu_.get();
  tuning.exchange = means_;
  tuning.prompt_scratch_bytes = options_.scratch_bytes;
  DT_ASSIGN_OR_RETURN(compute_, compute::ComputeWorkerNode::Create(*model_, table_, options, NodeId(0), *gpu_,
                                                                   *ports_[1], SystemClock(), tuning));
  return absl::OkStatus();
}

absl::Status LinkedCluster::AddWorker(int index) {
  workers_.push_back(std::make_unique<Worker>());
  Worker& worker = *workers_.back();
  if (!alone()) {
    DT_ASSIGN_OR_RETURN(worker.own_gpu, EmulatedGpu(1 + index));
    worker.means.device = worker.own_gpu.get();
    worker.means.links = std::make_shared<LoopLinks>();
    worker.means.on_cpu = false;
  }
  attention::AttentionWorkerOptions options;
  options.worker = IdOf(index);
  options.epoch = kEpoch;
  options.kv_blocks = options_.kv_blocks;
  options.micro_batches = options_.micro_batches;
  options.poison_freed = true;
  transport::Port& port = *ports_[2 + index];
  DT_ASSIGN_OR_RETURN(worker.node,
                      attention::AttentionWorkerNode::Create(table_, options, alone() ? *gpu_ : *worker.own_gpu, port,
                                                             SystemClock(), shared_gpu_.get()));
  worker.node->WrapBackend([&](std::unique_ptr<attention::AttentionBackend> backend) {
    return std::make_unique<WatchedAttention>(std::move(backend), worker.node->core(), port.id(), worker.monitor,
                                              worker.fail_next);
  });
  compute_->AddAttentionWorker({IdOf(index), kEpoch, port.id()});
  scheduler_->AddAttentionWorker(IdOf(index), kEpoch, port.id(), options_.kv_blocks);
  if (alone()) return absl::OkStatus();
  worker.node->AllowExchange(worker.means);
  worker.thread = std::thread([&worker] {
    while (!worker.stops)
      if (worker.node->Poll() == 0) std::this_thread::yield();
  });
  return absl::OkStatus();
}

uint64_t LinkedCluster::Submit(std::vector<TokenId> prompt, int max_tokens, int logits_last, bool logits_of_output) {
  requests::GenerationRequest request;
  request.tenant = "test";
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  request.logits_last = logits_last;
  request.logits_of_output = logits_of_output;
  request.id = RequestId(++requests_);
  scheduler_->Handle(scheduler::RequestArrived{std::make_shared<requests::GenerationRequest>(std::move(request))});
  return requests_;
}

bool LinkedCluster::Until(const std::function<bool()>& condition) {
  const absl::Time end = SystemClock().Now() + kHang;
  while (SystemClock().Now() < end) {
    if (condition()) return true;
    int frames = scheduler_->Poll() + compute_->Poll();
    if (alone()) frames += workers_[0]->node->Poll();
    if (frames == 0) std::this_thread::yield();
  }
  return false;
}

bool LinkedCluster::UntilTheEndOf(uint64_t request) {
  return Until([&] { return streams_[request].finished; });
}

void LinkedCluster::Lose(int worker) {
  scheduler_->LoseAttentionWorker(IdOf(worker), kEpoch);
  compute_->LoseAttentionWorker(IdOf(worker), kEpoch);
}

void LinkedCluster::Take(requests::GenerationUpdate update) {
  LinkedStream& stream = streams_[update.request.value()];
  stream.tokens.insert(stream.tokens.end(), update.tokens.begin(), update.tokens.end());
  stream.prompt_logits.insert(stream.prompt_logits.end(), update.prompt_logits.begin(), update.prompt_logits.end());
  for (auto& row : update.logits) stream.logits.push_back(std::move(row));
  stream.finished = update.request_finished;
  stream.error += update.error;
  stream.cached_tokens = update.cached_tokens;
}

}  // namespace dovetail::test
