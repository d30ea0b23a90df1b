// A compute worker on one GPU and an attention worker on another, two processes, driven by step plans with no scheduler
// between: tokens and times of decode with layers exchanged by the GPUs themselves, with one to three micro-batches
// under way, side by side and in turns, and through the hosts; and what becomes of the steps of a worker that is
// killed. With --logits nothing is timed: the logits of both ways after the same tokens are compared.
//   two_workers_cuda_bench MODEL [dummy] [--rows 1,16,64] [--no-hosts | --logits]
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "attention_worker/attention_worker_node.h"
#include "attention_worker/cpu/attention_executor.h"
#include "bench/exchange/two_processes.h"
#include "compute_worker/attention_specs.h"
#include "compute_worker/compute_worker_node.h"
#include "compute_worker/cuda/cuda_model.h"
#include "kernels/cuda/exchange/cuda_exchange.h"
#include "model/checkpoint.h"
#include "model/dummy_checkpoint.h"
#include "model/loaded_model.h"
#include "scheduler/core/rotation_plan.h"
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
constexpr int kMostMicroBatches = 3;
constexpr int kStepsBefore = 12;

double MillisecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// What a process of either role has.
struct Process {
  Process(TwoProcesses& processes, const char* model_path, bool dummy) : two(processes) {
    device = Must(kernels::cuda::CudaDevice::Create(Must(kernels::cuda::CudaLibrary::Open()),
                                                    {.index = two.rank(), .host_threads = 4}));
    Must(device->library().Check(device->library()->use_device(device->index()), "GPU"));
    links = Must(transport::ucx::MakeDeviceLinks(
        [this](void* list, unsigned index) { return kernels::cuda::UcxPeerPointer(*device, list, index); }));
    auto checkpoint = Must(dummy ? model::OpenDummyCheckpoint(model_path) : model::OpenCheckpoint(model_path));
    table = Must(compute::AttentionTableOf(checkpoint->config(), DType::kBF16));
    if (two.rank() == 0) {
      loaded = Must(model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
      weights =
          Must(compute::CudaModel::Load(*device, *loaded, DType::kBF16, dummy, compute::GpuWeights::kDequantise, {}));
    }
    const NodeId self = two.rank() == 0 ? kCompute : kAttention, other = two.rank() == 0 ? kAttention : kCompute;
    port = Must(UcxPort::Create({.node = self, .epoch = kEpoch, .lanes = transport::ucx::Lanes::kShm}));
    const std::string address = two.Swap(port->local_address());
    Must(port->AddPeer(other, address, UcxPort::Version(), kEpoch));
  }
  exchange::GpuExchangeMeans& means() {
    means_.device = device.get();
    means_.links = links;
    means_.on_cpu = false;
    return means_;
  }

  TwoProcesses& two;
  std::unique_ptr<kernels::cuda::CudaDevice> device;
  std::shared_ptr<transport::DeviceLinks> links;
  proto::AttentionTable table;
  std::unique_ptr<model::LoadedModel> loaded;
  std::unique_ptr<compute::CudaModel> weights;
  std::unique_ptr<UcxPort> port;

 private:
  exchange::GpuExchangeMeans means_;
};

void ServeAttention(Process& process) {
  const size_t block = attention::AttentionExecutor::BlockBytes(process.table);
  const uint64_t bytes = Must(process.device->memory()).free_bytes / 2;
  const auto blocks = static_cast<uint32_t>(std::min<uint64_t>(bytes / block, UINT32_MAX));
  attention::AttentionWorkerOptions options;
  options.worker = kWorker;
  options.epoch = kEpoch;
  options.kv_blocks = blocks;
  options.micro_batches = kMostMicroBatches;
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
    results.push_back(Must(proto::DecodeStepResult(payload)));
    return absl::OkStatus();
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    return port_.SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int most) override { return port_.Poll(handler, most); }

  std::vector<proto::StepResult> results;

 private:
  UcxPort& port_;
};

struct Times {  // of a step, ms, means
  double step = 0, dense = 0, waited = 0, attention = 0;
};

class Driver {
 public:
  Driver(Process& process, bool by_themselves) : process_(process), port_(*process.port) {
    compute::ComputeWorkerOptions options;
    options.max_step_tokens = kMostStepTokens;
    options.micro_batches = kMostMicroBatches;
    options.vocab_size = static_cast<int32_t>(process.loaded->config().vocab_size);
    compute::ComputeWorkerTuning tuning;
    tuning.dense = process.weights.get();
    if (by_themselves) tuning.exchange = process.means();
    node_ = Must(compute::ComputeWorkerNode::Create(*process.loaded, process.table, options, kScheduler,
                                                    *process.device, port_, SystemClock(), tuning));
    node_->AddAttentionWorker({kWorker, kEpoch, kAttention});
    const auto begin = Clock::now();
    while (by_themselves && node_->ExchangeWith(kAttention) != "device") {
      node_->Poll();
      if (MillisecondsSince(begin) > 20000) Must(absl::UnavailableError(node_->ExchangeWith(kAttention)));
    }
  }
  ~Driver() {
    for (const auto& batch : batches_)
      for (const proto::StepEntry& entry : batch)
        Order(proto::FrameType::kReleaseSequence, proto::ReleaseSequence{entry.sequence, entry.ctx_len, {}});
    node_->LoseAttentionWorker(kWorker, kEpoch);
  }

  // Opens `n` micro-batches of `count` sequences with prompts of `prompt` tokens.
  void Open(int n, int count, int prompt) {
    batches_.assign(n, {});
    for (int m = 0; m < n; ++m)
      for (int i = 0; i < count; ++i) batches_[m].push_back(OpenOne(m, m * count + i, prompt));
  }

  // `steps` tokens more for each sequence, all micro-batches under way together; the tokens of each, step by step, at
  // `tokens`.
  absl::StatusOr<Times> Decode(int steps, std::vector<std::vector<TokenId>>& tokens) {
    const int n = static_cast<int>(batches_.size());
    Times sum;
    int begun = 0, ended = 0;
    tokens.resize(n);
    const auto begin = Clock::now();
    for (int m = 0; m < n; ++m, ++begun) Begin(m, batches_[m]);
    while (ended < n * steps) {
      DT_ASSIGN_OR_RETURN(const proto::StepResult result, Await());
      const int m = result.micro_batch.value();
      for (size_t i = 0; i < batches_[m].size(); ++i) {
        tokens[m].push_back(result.entries[i].token);
        Take(batches_[m][i], result.entries[i]);
      }
      ++ended;
      sum.dense += static_cast<double>(result.timings.dense_us) / 1e3;
      sum.waited += static_cast<double>(result.timings.attention_wait_us) / 1e3;
      sum.attention += static_cast<double>(result.timings.attention_us) / 1e3;
      if (begun++ < n * steps) Begin(m, batches_[m]);
    }
    const double all = MillisecondsSince(begin);
    return Times{all / steps, sum.dense / ended, sum.waited / ended, sum.attention / ended};
  }

  // `tokens.size()` steps of the first micro-batch, each of which is given the tokens of `tokens`, one for each
  // sequence, and not those that it drew. The logits of each step: [sequences][vocab].
  std::vector<std::vector<std::vector<float>>> LogitsAfter(const std::vector<std::vector<TokenId>>& tokens) {
    std::vector<std::vector<std::vector<float>>> logits;
    for (const std::vector<TokenId>& given : tokens) {
      for (size_t i = 0; i < batches_[0].size(); ++i) {
        batches_[0][i].tokens = {given[i]};
        batches_[0][i].logits_rows = 1;
      }
      Begin(0, batches_[0]);
      proto::StepResult result = Must(Await());
      logits.emplace_back();
      for (size_t i = 0; i < batches_[0].size(); ++i) {
        Take(batches_[0][i], result.entries[i]);
        if (result.entries[i].logits.size() != static_cast<size_t>(process_.loaded->config().vocab_size))
          Must(Internal("a step brought no logits"));
        logits.back().push_back(std::move(result.entries[i].logits));
      }
    }
    return logits;
  }

  // After a few steps that choose products and record, or measure turns.
  Times Measure(int steps, std::vector<std::vector<TokenId>>& tokens) {
    Must(Decode(kStepsBefore, tokens));
    return Must(Decode(steps, tokens));
  }

  compute::ComputeWorkerNode& node() { return *node_; }

 private:
  proto::StepEntry OpenOne(int m, int number, int prompt) {
    proto::OpenSequence open;
    open.sequence = SequenceId(++sequences_);
    for (int g = 0; g < process_.table.group_count(); ++g) {
      const LayerGroup group(static_cast<uint16_t>(g));
      open.shards.push_back(
          {group, kWorker, kEpoch, {0, process_.table.softmax(group).kv_heads}, {0, proto::kOpenEnd}});
    }
    Order(proto::FrameType::kOpenSequence, open);
    proto::StepEntry entry;
    entry.sequence = open.sequence;
    entry.placement.assign(open.shards.begin(), open.shards.end());
    entry.sample = true;
    entry.sampling.temperature = 0;
    entry.rope_length = static_cast<int32_t>(process_.loaded->config().max_positions);
    const auto vocab = static_cast<int>(process_.loaded->config().vocab_size);
    for (int t = 0; t < prompt; ++t) entry.tokens.push_back(3 + (number * 31 + t * 17) % (vocab - 3));
    Begin(m, {entry});
    const proto::StepResult result = Must(Await());
    Take(entry, result.entries[0]);
    return entry;
  }

  template <typename T>
  void Order(proto::FrameType type, const T& order) {
    std::vector<std::byte> message;
    proto::Encode(order, message);
    const auto header = proto::MakeHeader(type, kEpoch, StepId(++orders_), MicroBatchId(), 0, message.size());
    (void)process_.port->SendMessage(kAttention, header, std::move(message));  // it may have been killed
  }

  static void Take(proto::StepEntry& entry, const proto::EntryResult& result) {
    entry.ctx_len += static_cast<Position>(entry.tokens.size());
    entry.tokens.assign(1, result.token);
  }

  void Begin(int m, const std::vector<proto::StepEntry>& entries) {
    proto::StepPlan plan;
    plan.step = StepId(++steps_);
    plan.micro_batch = MicroBatchId(static_cast<uint16_t>(m));
    plan.entries = entries;
    std::vector<std::byte> message;
    proto::Encode(plan, message);
    const auto header =
        proto::MakeHeader(proto::FrameType::kStepPlan, Epoch(0), plan.step, plan.micro_batch, 0, message.size());
    node_->OnFrame({kScheduler, header, message});
  }

  absl::StatusOr<proto::StepResult> Await() {
    const auto begin = Clock::now();
    while (port_.results.empty()) {
      node_->Poll();
      if (MillisecondsSince(begin) > 20000) return Internal("a step takes longer than 20 s");
    }
    proto::StepResult result = std::move(port_.results.front());
    port_.results.erase(port_.results.begin());
    if (result.status == proto::StepStatus::kOk) return result;
    const std::string text = absl::StrCat("status ", static_cast<int>(result.status), ", worker ",
                                          result.failed_worker.value(), ": ", result.error);
    return result.status == proto::StepStatus::kWorkerUnreachable ? absl::UnavailableError(text)
                                                                  : absl::InternalError(text);
  }

  static inline uint64_t steps_ = 0, sequences_ = 0, orders_ = 0;
  Process& process_;
  Intercept port_;
  std::unique_ptr<compute::ComputeWorkerNode> node_;
  std::vector<std::vector<proto::StepEntry>> batches_;
};

using Tokens = std::vector<std::vector<TokenId>>;
using Turns = compute::TurnChoice::Policy;

struct Options {
  bool dummy = false, hosts = true, logits = false;
  std::vector<int> rows = {1, 16, 64};  // of a micro-batch
  int prompt() const { return dummy ? 1000 : 37; }
  int steps() const { return dummy ? 48 : 100; }
};

Tokens MeasureHosts(Process& process, int batch, const Options& options) {
  Driver driver(process, /*by_themselves=*/false);
  driver.Open(1, batch, options.prompt());
  Tokens tokens;
  const Times times = driver.Measure(options.steps(), tokens);
  std::printf("through the hosts, 1 x %3d: %.3f ms for a token of each\n", batch, times.step);
  return tokens;
}

int PlanOf(const Times& times, double ops) {
  const double hop = std::max(0.0, times.waited - times.attention) / 2;
  const scheduler::StageTimes layer{times.dense * 1e3 / ops, times.attention * 1e3 / ops, hop * 1e3 / ops};
  return scheduler::PlanRotation(layer, kMostMicroBatches).micro_batches;
}

// Side by side, in turns, as the worker chooses, and side by side again. `alone`: a step of the busier side with one
// micro-batch, ms; of n = 1, and then what the others are held against. The tokens are those of the first.
Tokens MeasureGpus(Process& process, int n, int batch, const Options& options, double& alone) {
  Driver driver(process, /*by_themselves=*/true);
  driver.Open(n, batch, options.prompt());
  Tokens first;
  for (const auto& [policy, name] : {std::pair{Turns::kSideBySide, "side by side"},
                                     {Turns::kTurns, "in turns"},
                                     {Turns::kMeasured, "as measured"},
                                     {Turns::kSideBySide, "side by side"}}) {
    if (n == 1 && !first.empty()) break;
    driver.node().SetTurns(policy);
    Tokens tokens;
    const Times times = driver.Measure(options.steps(), tokens);
    if (first.empty()) first = tokens;
    if (n == 1) alone = std::max(times.dense, times.attention);
    std::printf(
        "%d x %3d %-12s: %.3f ms a token; dense %.3f, waits %.3f, attention %.3f a step; over the busier "
        "pool alone %.3f",
        n, batch, name, times.step, times.dense, times.waited, times.attention, times.step / (alone * n));
    if (n == 1) std::printf("; RotationPlan: %d", PlanOf(times, process.table.op_count()));
    std::printf("\n");
    std::fflush(stdout);
  }
  return first;
}

void Compare(const char* what, const Tokens& a, const Tokens& b) {
  size_t same = 0, all = 0;
  for (size_t m = 0; m < a.size(); ++m) {
    for (size_t i = 0; i < a[m].size(); ++i, ++all) same += i < b[m].size() && a[m][i] == b[m][i];
  }
  std::printf("%s: %zu of %zu tokens are the same\n", what, same, all);
}

// What parts the two ways is rounding: the error of a step's logits over their RMS is small and does not grow.
void CompareLogits(Process& process, int batch, const Options& options) {
  std::vector<std::vector<TokenId>> tokens(options.steps(), std::vector<TokenId>(batch));
  const auto vocab = static_cast<int>(process.loaded->config().vocab_size);
  for (int t = 0; t < options.steps(); ++t)
    for (int i = 0; i < batch; ++i) tokens[t][i] = 3 + (i * 41 + t * 13 + 5) % (vocab - 3);
  std::vector<std::vector<std::vector<float>>> ways[3];  // through the hosts, by the GPUs, by the GPUs again
  for (int way = 0; way < 3; ++way) {
    Driver driver(process, /*by_themselves=*/way > 0);
    driver.Open(1, batch, options.prompt());
    ways[way] = driver.LogitsAfter(tokens);
  }
  double worst = 0, first = 0, last = 0;
  int other_best = 0, unlike = 0;
  for (int t = 0; t < options.steps(); ++t) {
    double step = 0;
    for (int i = 0; i < batch; ++i) {
      const std::vector<float>&a = ways[0][t][i], &b = ways[1][t][i];
      double square = 0, error = 0;
      for (size_t j = 0; j < a.size(); ++j) {
        square += static_cast<double>(a[j]) * a[j];
        error += (static_cast<double>(a[j]) - b[j]) * (static_cast<double>(a[j]) - b[j]);
      }
      step = std::max(step, std::sqrt(error / square));
      other_best +=
          std::max_element(a.begin(), a.end()) - a.begin() != std::max_element(b.begin(), b.end()) - b.begin();
      unlike += b != ways[2][t][i];
    }
    (t == 0 ? first : last) = step;
    worst = std::max(worst, step);
  }
  std::printf(
      "%3d rows, %d steps of given tokens: RMS of the logits' difference over their RMS %.2e in the first step, "
      "%.2e in the last, %.2e at most; another token is best %d times; GPUs unlike themselves %d times\n",
      batch, options.steps(), first, last, worst, other_best, unlike);
}

void Drive(Process& process, const Options& options) {
  process.two.Barrier();
  if (options.logits) {
    for (const int batch : options.rows) CompareLogits(process, batch, options);
    return;
  }
  for (const int batch : options.rows) {
    double alone = 0;
    const Tokens hosts = options.hosts ? MeasureHosts(process, batch, options) : Tokens();
    if (options.hosts && batch < 64) Compare("through the hosts, again", hosts, MeasureHosts(process, batch, options));
    const Tokens one = MeasureGpus(process, 1, batch, options, alone);
    if (options.hosts) Compare("GPUs by themselves", hosts, one);
    const Tokens two = MeasureGpus(process, 2, batch, options, alone);
    Compare("two micro-batches, the first one", one, {two[0]});
    MeasureGpus(process, kMostMicroBatches, batch, options, alone);
  }
  std::fflush(stdout);
  Driver driver(process, true);
  driver.Open(2, 4, options.prompt());
  Tokens drawn;
  Must(driver.Decode(10, drawn));
  kill(process.two.child(), SIGKILL);
  int ended = 0;
  waitpid(process.two.child(), &ended, 0);
  const auto begin = Clock::now();
  const absl::Status status = driver.Decode(1000, drawn).status();
  std::printf("attention worker killed: the step ends after %.1f ms: %s\n", MillisecondsSince(begin),
              std::string(status.message()).c_str());
  driver.node().LoseAttentionWorker(kWorker, kEpoch);
  Must(Must(process.device->WorkerStream())->SynchronizeStatus());
  std::printf("the compute worker's GPU goes on\n");
  std::fflush(stdout);
}

absl::StatusOr<Options> Read(int argc, char** argv) {
  Options options;
  for (int i = 2; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "dummy") {
      options.dummy = true;
    } else if (word == "--no-hosts") {
      options.hosts = false;
    } else if (word == "--logits") {
      options.logits = true;
    } else if (word == "--rows" && i + 1 < argc) {
      options.rows.clear();
      const std::vector<std::string> texts = absl::StrSplit(argv[++i], ',');
      for (const std::string& text : texts) {
        int rows = 0;
        if (!absl::SimpleAtoi(text, &rows) || rows < 1) return InvalidArgument("rows: ", text);
        options.rows.push_back(rows);
      }
    } else {
      return InvalidArgument("what is ", std::string(word), "?");
    }
  }
  return argc < 2 ? absl::StatusOr<Options>(InvalidArgument("no model")) : options;
}

}  // namespace
}  // namespace dovetail::bench

int main(int argc, char** argv) {
  const auto options = dovetail::bench::Read(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "%s\ntwo_workers_cuda_bench MODEL [dummy] [--rows 1,16,64] [--no-hosts | --logits]\n",
                 std::string(options.status().message()).c_str());
    return 2;
  }
  dovetail::bench::TwoProcesses processes;
  auto process = std::make_unique<dovetail::bench::Process>(processes, argv[1], options->dummy);
  if (processes.rank() == 1) {
    dovetail::bench::ServeAttention(*process);
  } else {
    dovetail::bench::Drive(*process, *options);
  }
  std::fflush(stdout);
  _exit(0);
}
