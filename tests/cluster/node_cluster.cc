#include "tests/cluster/node_cluster.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/check.h"
#include "compute_worker/attention_specs.h"
#include "model/checkpoint.h"

namespace dovetail::test {
namespace {

constexpr uint32_t kBlocks = 20000;  // of each attention worker
constexpr int kMicroBatches = 2;
constexpr int kStepTokens = 128;
constexpr uint64_t kModelDigest = 7;

WorkerId IdOf(int worker) { return WorkerId(static_cast<uint32_t>(worker)); }

}  // namespace

NodeModel::NodeModel(const std::filesystem::path& path, model::WeightFormat weights, DType kv)
    : device(*kernels::CreateCpuDevice({.threads = 1})) {
  auto checkpoint = model::OpenCheckpoint(path);
  DT_CHECK(checkpoint.ok(), std::string(checkpoint.status().message()));
  const auto stream = device->CreateStream();
  auto made = model::LoadModel(*std::move(checkpoint), weights, &stream->pool(), {});
  DT_CHECK(made.ok(), std::string(made.status().message()));
  loaded = *std::move(made);
  table = *compute::AttentionTableOf(loaded->config(), kv);
}

void Stream::Take(requests::GenerationUpdate update) {
  tokens.insert(tokens.end(), update.tokens.begin(), update.tokens.end());
  for (auto& row : update.logits) logits.push_back(std::move(row));
  finished = update.request_finished;
  error += update.error;
}

requests::GenerationRequest NodeRequest(int prompt, int max_tokens, int salt) {
  requests::GenerationRequest request;
  request.tenant = "test";
  request.prompt = {1};
  for (int i = 1; i < prompt; ++i) request.prompt.push_back(3 + (17 * i * i + 31 * i + 5 * salt) % 90);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  request.logits_of_output = true;
  return request;
}

NodeCluster::NodeCluster(NodeModel& model, const NodeClusterOptions& options) : model_(model), options_(options) {
  for (int i = 0; i < 2 + kMostWorkers; ++i) {
    ports_.push_back(fabric_.CreatePort(nullptr));
    faulty_.push_back(std::make_unique<transport::FaultyPort>(*ports_.back(), clock_, options.seed * 100 + i));
    faulty_.back()->Set(options.faults);
  }
  scheduler::SchedulerOptions scheduler;
  scheduler.max_num_seqs = 8;
  scheduler.max_num_batched_tokens = kStepTokens;
  scheduler.max_model_len = 512;
  scheduler.micro_batches = kMicroBatches;
  scheduler.placement = options.placement;
  scheduler.attention = model.table;
  scheduler.model_digest = kModelDigest;
  scheduler_ = std::make_unique<scheduler::SchedulerNode>(
      scheduler, 0, *faulty_[0], clock_, [this](requests::GenerationUpdate update) { Take(std::move(update)); },
      [](const proto::StepResult&, int, int) {});
  compute::ComputeWorkerOptions compute;
  compute.micro_batches = kMicroBatches;
  compute.max_step_tokens = kStepTokens;
  compute.vocab_size = static_cast<int32_t>(model.loaded->config().vocab_size);
  compute_ = std::make_unique<compute::ComputeWorkerNode>(*model.loaded, model.table, compute, faulty_[0]->id(),
                                                          *model.device, *faulty_[1], clock_);
  scheduler_->AddComputeWorker(WorkerId(0), faulty_[1]->id());
  for (int worker = 0; worker < options.workers; ++worker) Add(worker);
}

void NodeCluster::Add(int worker) {
  transport::FaultyPort& port = *faulty_[2 + worker];
  attention::AttentionWorkerOptions options;
  options.worker = IdOf(worker);
  options.epoch = Epoch(1);
  const auto index = static_cast<size_t>(worker);
  options.kv_blocks = index < options_.kv_blocks.size() ? options_.kv_blocks[index] : kBlocks;
  options.micro_batches = kMicroBatches;
  options.model_digest = kModelDigest;
  options.digests = options_.digests;
  devices_[worker] = std::make_unique<FrailDevice>(*kernels::CreateCpuDevice({.threads = 1}));
  attention_[worker] = *attention::AttentionWorkerNode::Create(model_.table, options, *devices_[worker], port, clock_);
  compute_->AddAttentionWorker({IdOf(worker), Epoch(1), port.id()});
  scheduler_->AddAttentionWorker(IdOf(worker), Epoch(1), port.id(), options.kv_blocks,
                                 index < options_.rates.size() ? options_.rates[index] : 1);
}

void NodeCluster::GiveUp(int worker) {
  scheduler_->LoseAttentionWorker(IdOf(worker), Epoch(1));
  compute_->LoseAttentionWorker(IdOf(worker), Epoch(1));
  given_up_.insert(worker);
}

void NodeCluster::Drain(int worker) {
  scheduler_->DrainAttentionWorker(IdOf(worker), Epoch(1));
  ASSERT_TRUE(Until([&] { return scheduler_->HoldsNothing(IdOf(worker)); }));
  GiveUp(worker);
}

uint64_t NodeCluster::Submit(requests::GenerationRequest request) {
  request.id = RequestId(++requests_);
  scheduler_->Handle(scheduler::RequestArrived{std::make_shared<requests::GenerationRequest>(std::move(request))});
  return requests_;
}

bool NodeCluster::Until(const std::function<bool()>& condition) {
  for (int turn = 0; turn < 300'000; ++turn) {
    if (condition()) return true;
    Turn();
  }
  return false;
}

bool NodeCluster::UntilTokens(uint64_t request, size_t tokens) {
  return Until([&] { return streams_[request].tokens.size() >= tokens || streams_[request].finished; });
}

bool NodeCluster::UntilFinished(uint64_t request) {
  return Until([&] { return streams_[request].finished; });
}

void NodeCluster::Turns(int count) {
  for (int turn = 0; turn < count; ++turn) Turn();
}

void NodeCluster::Turn() {
  clock_.now += absl::Microseconds(20);
  scheduler_->Poll();
  compute_->Poll();
  for (auto& [worker, node] : attention_)
    if (!stopped_.contains(worker)) node->Poll();
}

uint64_t NodeCluster::BlocksHeld() const {
  uint64_t held = 0;
  for (const auto& [worker, node] : attention_)
    if (!given_up_.contains(worker)) held += node->core().status().blocks_in_use;
  return held;
}

int64_t NodeCluster::repeated() const {
  int64_t count = 0;
  for (const auto& port : faulty_) count += port->duplicated() + port->echoed();
  return count;
}

void NodeCluster::Take(requests::GenerationUpdate update) {
  Stream& stream = streams_[update.request.value()];
  EXPECT_FALSE(stream.finished) << "an update after the end";
  if (!update.tokens.empty()) {
    EXPECT_EQ(static_cast<size_t>(update.first_index), stream.tokens.size());
  }
  stream.Take(std::move(update));
}

}  // namespace dovetail::test
