// A compute worker on one GPU and an attention worker on another, two processes, driven by step plans with no scheduler
// between: tokens and times of decode with layers exchanged by the GPUs themselves and through the hosts, and what
// becomes of the steps of a worker that is killed.
//   two_workers_cuda_bench MODEL [dummy]
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "attention_worker/attention_executor.h"
#include "attention_worker/attention_worker_node.h"
#include "bench/exchange/two_processes.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/compute_worker_node.h"
#include "compute_worker/cuda/cuda_model.h"
#include "kernels/cuda/cuda_exchange.h"
#include "model/checkpoint.h"
#include "model/dummy_checkpoint.h"
#include "model/loaded_model.h"
#include "transport/ucx/device_link.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::bench {
namespace {

using transport::ucx::UcxPort;
using Clock = std::chrono::steady_clock;

constexpr NodeId kScheduler(0), kCompute(1), kAttention(2);
constexpr WorkerId kWorker(1);
constexpr Epoch kEpoch(1);
constexpr int kMostStepTokens = 1024;

double MillisecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// What a process of either role has.
struct Process {
  Process(TwoProcesses& processes, const char* model_path, bool dummy) : two(processes) {
    device = Must(kernels::cuda::CudaDevice::Create(Must(kernels::cuda::CudaLibrary::Open()),
                                                    {.index = two.rank(), .host_threads = 4}));
    Must(device->library().Check(device->library()->use_device(device->index()), "GPU"));
    links = Must(transport::ucx::MakeDeviceLinks([this](void* list, unsigned index) {
      return kernels::cuda::UcxPeerPointer(*device, list, index);
    }));
    auto checkpoint = Must(dummy ? model::OpenDummyCheckpoint(model_path) : model::OpenCheckpoint(model_path));
    table = Must(compute::AttentionTableOf(checkpoint->config(), DType::kBF16));
    if (two.rank() == 0) {
      loaded = Must(model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
      weights = Must(compute::CudaModel::Load(*device, *loaded, DType::kBF16, dummy, {}));
    }
    const NodeId self = two.rank() == 0 ? kCompute : kAttention, other = two.rank() == 0 ? kAttention : kCompute;
    port = Must(UcxPort::Create({.node = self, .epoch = kEpoch, .lanes = transport::ucx::Lanes::kShm}));
    const std::string address = two.Swap(port->local_address());
    Must(port->AddPeer(other, address, UcxPort::Version(), kEpoch));
  }
  exchange::GpuExchangeMeans means() const { return {device.get(), links.get()}; }

  TwoProcesses& two;
  std::unique_ptr<kernels::cuda::CudaDevice> device;
  std::unique_ptr<transport::DeviceLinks> links;
  proto::AttentionTable table;
  std::unique_ptr<model::LoadedModel> loaded;
  std::unique_ptr<compute::CudaModel> weights;
  std::unique_ptr<UcxPort> port;
};

void ServeAttention(Process& process) {
  const size_t block = attention::AttentionExecutor::BlockBytes(process.table);
  const uint64_t bytes = Must(process.device->memory()).free_bytes / 2;
  const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(bytes / block, UINT32_MAX));
  attention::AttentionWorkerOptions options;
  options.worker = kWorker;
  options.epoch = kEpoch;
  options.kv_blocks = blocks;
  auto node = Must(attention::AttentionWorkerNode::Create(process.table, options, *process.device, *process.port));
  node->AllowExchange(process.means());
  process.two.Barrier();
  while (getppid() != 1) node->Poll();
}

// Takes what is for the scheduler out of what the compute worker sends.
class Intercept final : public transport::Port {
 public:
  explicit Intercept(UcxPort& port) : port_(port) {}
  NodeId id() const override { return port_.id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    if (to != kScheduler) return port_.SendMessage(to, header, std::move(payload));
    result = Must(proto::DecodeStepResult(payload));
    finished = true;
    return absl::OkStatus();
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, std::span<const std::byte> payload) override {
    return port_.SendTensor(to, header, payload);
  }
  int Poll(transport::FrameHandler& handler, int most) override { return port_.Poll(handler, most); }

  proto::StepResult result;
  bool finished = false;

 private:
  UcxPort& port_;
};

class Driver {
 public:
  Driver(Process& process, bool by_themselves) : process_(process), port_(*process.port) {
    compute::ComputeWorkerOptions options;
    options.max_step_tokens = kMostStepTokens;
    options.vocab_size = static_cast<int32_t>(process.loaded->config().vocab_size);
    compute::ComputeWorkerTuning tuning;
    tuning.dense = process.weights.get();
    if (by_themselves) tuning.exchange = process.means();
    node_ = Must(compute::ComputeWorkerNode::Create(*process.loaded, process.table, options, kScheduler,
                                                    *process.device, port_, SystemClock(), tuning));
    node_->AddAttentionWorker({kWorker, kEpoch, kAttention});
    const auto begin = Clock::now();
    while (by_themselves && MillisecondsSince(begin) < 3000) node_->Poll();  // links are made
  }

  // Opens sequences with prompts of `prompt` tokens.
  void Open(int count, int prompt) {
    entries_.clear();
    for (int i = 0; i < count; ++i) {
      proto::OpenSequence open;
      open.sequence = SequenceId(++sequences_);
      for (int g = 0; g < process_.table.group_count(); ++g) {
        const LayerGroup group(static_cast<uint16_t>(g));
        open.shards.push_back(
            {group, kWorker, kEpoch, {0, process_.table.softmax(group).kv_heads}, {0, proto::kOpenEnd}});
      }
      std::vector<std::byte> message;
      proto::Encode(open, message);
      const auto header = proto::MakeHeader(proto::FrameType::kOpenSequence, kEpoch, StepId(++orders_),
                                            MicroBatchId(), 0, message.size());
      Must(process_.port->SendMessage(kAttention, header, std::move(message)));
      proto::StepEntry entry;
      entry.sequence = open.sequence;
      entry.placement.assign(open.shards.begin(), open.shards.end());
      entry.sample = true;
      entry.sampling.temperature = 0;
      entry.rope_length = static_cast<int32_t>(process_.loaded->config().max_positions);
      const auto vocab = static_cast<int>(process_.loaded->config().vocab_size);
      for (int t = 0; t < prompt; ++t) entry.tokens.push_back(3 + (i * 31 + t * 17) % (vocab - 3));
      entries_.push_back(std::move(entry));
      Must(RunStep({entries_.back()}));
      Take(entries_.back(), port_.result.entries[0]);
    }
  }

  // One token more for each; the tokens of all, sequence by sequence, at `tokens`.
  absl::Status Decode(std::vector<TokenId>& tokens) {
    DT_RETURN_IF_ERROR(RunStep(entries_));
    for (size_t i = 0; i < entries_.size(); ++i) {
      tokens.push_back(port_.result.entries[i].token);
      Take(entries_[i], port_.result.entries[i]);
    }
    return absl::OkStatus();
  }

  compute::ComputeWorkerNode& node() { return *node_; }

 private:
  static void Take(proto::StepEntry& entry, const proto::EntryResult& result) {
    entry.ctx_len += static_cast<Position>(entry.tokens.size());
    entry.tokens.assign(1, result.token);
  }

  absl::Status RunStep(const std::vector<proto::StepEntry>& entries) {
    proto::StepPlan plan;
    plan.step = StepId(++steps_);
    plan.entries = entries;
    std::vector<std::byte> message;
    proto::Encode(plan, message);
    const auto header =
        proto::MakeHeader(proto::FrameType::kStepPlan, Epoch(0), plan.step, MicroBatchId(), 0, message.size());
    port_.finished = false;
    node_->OnFrame({kScheduler, header, message});
    const auto begin = Clock::now();
    while (!port_.finished) {
      node_->Poll();
      if (MillisecondsSince(begin) > 20000) return Internal("a step takes longer than 20 s");
    }
    if (port_.result.status == proto::StepStatus::kOk) return absl::OkStatus();
    const std::string text = absl::StrCat("status ", static_cast<int>(port_.result.status), ", worker ",
                                          port_.result.failed_worker.value(), ": ", port_.result.error);
    return port_.result.status == proto::StepStatus::kWorkerUnreachable ? absl::UnavailableError(text)
                                                                        : absl::InternalError(text);
  }

  static inline uint64_t steps_ = 0, sequences_ = 0, orders_ = 0;
  Process& process_;
  Intercept port_;
  std::unique_ptr<compute::ComputeWorkerNode> node_;
  std::vector<proto::StepEntry> entries_;
};

void Drive(Process& process, bool dummy) {
  process.two.Barrier();
  const int prompt = dummy ? 1000 : 37, steps = dummy ? 64 : 100;
  std::vector<int> batches = {1, 16, 64};
  std::vector<std::vector<TokenId>> tokens[2];
  for (const bool by_themselves : {false, true}) {
    Driver driver(process, by_themselves);
    for (const int batch : batches) {
      driver.Open(batch, prompt);
      std::vector<TokenId> drawn;
      for (int i = 0; i < 4; ++i) Must(driver.Decode(drawn));
      const auto begin = Clock::now();
      for (int i = 0; i < steps; ++i) Must(driver.Decode(drawn));
      std::printf("%s, batch %2d: %.3f ms a step\n", by_themselves ? "GPUs by themselves" : "through the hosts ", batch,
                  MillisecondsSince(begin) / steps);
      std::fflush(stdout);
      tokens[by_themselves].push_back(drawn);
    }
  }
  for (size_t b = 0; b < batches.size(); ++b) {
    size_t same = 0;
    for (size_t i = 0; i < tokens[0][b].size(); ++i) same += tokens[0][b][i] == tokens[1][b][i];
    std::printf("batch %2d: %zu of %zu tokens are the same\n", batches[b], same, tokens[0][b].size());
  }
  std::fflush(stdout);
  Driver driver(process, true);
  driver.Open(4, prompt);
  std::vector<TokenId> drawn;
  for (int i = 0; i < 10; ++i) Must(driver.Decode(drawn));
  kill(process.two.child(), SIGKILL);
  const auto begin = Clock::now();
  absl::Status status;
  while (status.ok()) status = driver.Decode(drawn);
  std::printf("attention worker killed: the step ends after %.1f ms: %s\n", MillisecondsSince(begin),
              std::string(status.message()).c_str());
  driver.node().LoseAttentionWorker(kWorker, kEpoch);
  Must(Must(process.device->WorkerStream())->SynchronizeStatus());
  std::printf("the compute worker's GPU goes on\n");
  std::fflush(stdout);
  int ended = 0;
  waitpid(process.two.child(), &ended, 0);
}

}  // namespace
}  // namespace dovetail::bench

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "two_workers_cuda_bench MODEL [dummy]\n");
    return 2;
  }
  const bool dummy = argc > 2 && std::strcmp(argv[2], "dummy") == 0;
  dovetail::bench::TwoProcesses processes;
  auto process = std::make_unique<dovetail::bench::Process>(processes, argv[1], dummy);
  if (processes.rank() == 1) {
    dovetail::bench::ServeAttention(*process);
  } else {
    dovetail::bench::Drive(*process, dummy);
  }
  std::fflush(stdout);
  _exit(0);
}
