#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "attention_worker/attention_worker_node.h"
#include "compute_worker/compute_worker_node.h"
#include "model/loaded_model.h"
#include "scheduler/scheduler_node.h"
#include "tests/support/frail_device.h"
#include "transport/faulty/faulty_port.h"
#include "transport/inproc/inproc_fabric.h"

namespace dovetail::test {

class HandClock final : public Clock {
 public:
  absl::Time Now() override { return now; }
  absl::Time now = absl::UnixEpoch();
};

// A model on the CPU, in f32 unless told otherwise, shared by clusters.
struct NodeModel {
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<model::LoadedModel> loaded;
  proto::AttentionTable table;

  explicit NodeModel(const std::filesystem::path& path, model::WeightFormat weights = model::WeightFormat::kF32,
                     DType kv = DType::kF32);
};

// What a request was answered.
struct Stream {
  std::vector<TokenId> tokens;
  std::vector<std::vector<float>> logits;
  bool finished = false;
  std::string error;

  void Take(requests::GenerationUpdate update);  // of any choice
  bool operator==(const Stream&) const = default;
};

// A greedy request that asks for the logits of its output; the prompts of two salts differ.
requests::GenerationRequest NodeRequest(int prompt, int max_tokens, int salt);

struct NodeClusterOptions {
  int workers = 1;                  // attention workers to begin with: 0, 1, ..
  std::vector<uint64_t> kv_blocks;  // of these; others have plenty
  std::vector<double> rates;        // of these, as scheduler::AttentionWorkerJoined; of others 1
  scheduler::PlacementPolicy placement = scheduler::PlacementPolicy::kRequest;
  attention::Digests digests = attention::Digests::kNone;
  transport::Faults faults;  // of all ports
  uint64_t seed = 1;         // of the faults
};

// A scheduler, a compute worker and attention workers, all real nodes, over a fabric in memory. One thread and time by
// hand: the same calls give the same run, and between two calls nothing runs.
class NodeCluster {
 public:
  static constexpr int kMostWorkers = 4;

  // `model` outlives the cluster.
  NodeCluster(NodeModel& model, const NodeClusterOptions& options);

  void Add(int worker);
  // It is given up: no node listens to it any more, but it may still receive and send.
  void GiveUp(int worker);
  void Stop(int worker) { stopped_.insert(worker); }
  void Continue(int worker) { stopped_.erase(worker); }
  void Drain(int worker);

  uint64_t Submit(requests::GenerationRequest request);
  void Pause(uint64_t request) { scheduler_->Handle(scheduler::RequestPaused{RequestId(request)}); }
  void Resume(uint64_t request) { scheduler_->Handle(scheduler::RequestResumed{RequestId(request)}); }
  // False: not in a time that only a hang takes.
  bool Until(const std::function<bool()>& condition);
  bool UntilTokens(uint64_t request, size_t tokens);
  bool UntilFinished(uint64_t request);
  void Turns(int count);  // all nodes have so many turns

  const Stream& stream(uint64_t request) { return streams_[request]; }
  scheduler::SchedulerStats stats() const { return scheduler_->stats(); }
  uint64_t BlocksHeld() const;  // by the workers that were not given up
  int64_t repeated() const;     // frames that came more than once
  attention::AttentionWorkerCore& attention(int worker) { return attention_.at(worker)->core(); }
  FrailDevice& attention_device(int worker) { return *devices_.at(worker); }

 private:
  void Take(requests::GenerationUpdate update);
  void Turn();

  NodeModel& model_;
  const NodeClusterOptions options_;
  HandClock clock_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<std::unique_ptr<transport::FaultyPort>> faulty_;
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::unique_ptr<compute::ComputeWorkerNode> compute_;
  std::map<int, std::unique_ptr<FrailDevice>> devices_;
  std::map<int, std::unique_ptr<attention::AttentionWorkerNode>> attention_;
  std::set<int> stopped_, given_up_;
  std::map<uint64_t, Stream> streams_;
  uint64_t requests_ = 0;
};

}  // namespace dovetail::test
