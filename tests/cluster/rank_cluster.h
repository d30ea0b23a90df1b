#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/rank_frames.h"
#include "tests/cluster/node_cluster.h"

namespace dovetail::test {

// Sends nothing any more once it has sent so many frames to other ranks: the process ended there.
// Threads: thread-compatible.
class MortalPort final : public transport::Port {
 public:
  explicit MortalPort(transport::Port& port) : port_(port) {}
  NodeId id() const override { return port_.id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    if (!offers && proto::IsMemoryFrame(header.type)) return absl::OkStatus();
    names_ += header.type == proto::kRankMemory ? 1 : 0;
    return Dies(header) ? absl::OkStatus() : port_.SendMessage(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    return Dies(header) ? absl::OkStatus() : port_.SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override {
    return dead() ? 0 : port_.Poll(handler, max_frames);
  }

  bool dead() const { return rank_frames_ > lives_for; }
  int lives_for = 1 << 30;              // frames to other ranks
  bool offers = true;                   // memory of its device, to other ranks
  int names() const { return names_; }  // of memory, sent to them

 private:
  bool Dies(const proto::FrameHeader& header) {
    if (proto::IsRankFrame(header.type)) ++rank_frames_;
    return dead();
  }

  transport::Port& port_;
  int rank_frames_ = 0, names_ = 0;
};

struct RankClusterOptions {
  // Where a compute worker is, if not on the CPU of the model: both outlive the cluster.
  struct On {
    kernels::Device* device = nullptr;
    const compute::DenseBackendFactory* dense = nullptr;
  };
  proto::PrefixExchange exchange = proto::PrefixExchange::kAsk;
  proto::LinearExchange linear = proto::LinearExchange::kChain;
  int compute_workers = 1;
  uint64_t seed = 0;                  // of late and repeated frames; 0: there are none, and payloads are not read
  std::vector<On> on;                 // compute worker i is on the i-th, modulo their number
  bool rows_on_device = true;         // ComputeWorkerTuning::rank_rows_on_device of those
  int offering = 1 << 10;             // so many of them offer each other their device's memory, the first ones
  uint64_t scratch_bytes = 64 << 20;  // likewise
  int step_tokens = 128;
  int known_workers = 1 << 10;  // compute workers that the scheduler knows from the beginning
};

// Compute workers that divide prompts among each other, a scheduler and an attention worker, all real nodes, in one
// thread and with time by hand. Node 0 is the scheduler, node 1 the attention worker, node 2 + r compute worker r.
// Threads: thread-compatible.
class RankCluster {
 public:
  // `model` outlives it.
  RankCluster(NodeModel& model, const RankClusterOptions& options);

  MortalPort& port(int rank) { return *mortal_[2 + rank]; }
  // The scheduler hears of it only now (known_workers).
  void Join(int rank) { scheduler_->AddComputeWorker(IdOf(rank), NodeOf(rank)); }
  uint64_t TokensAttendedBy(int rank) const { return compute_[rank]->core().counters().prompt_tokens_here; }
  // The scheduler and the others hear that it has gone.
  void Lose(int rank);

  uint64_t Submit(requests::GenerationRequest request);
  // False: not in a time that only a hang takes.
  bool Until(const std::function<bool()>& condition);
  bool UntilFinished(uint64_t request) {
    return Until([&] { return streams_[request - 1].finished; });
  }
  const Stream& stream(uint64_t request) { return streams_[request - 1]; }
  scheduler::SchedulerStats stats() const { return scheduler_->stats(); }

  // Blocks, and what survivors keep of ranks and for them.
  uint64_t Held() const;
  std::string WhatIsHeld() const;

 private:
  static constexpr uint32_t kBlocks = 20000;
  static constexpr int kMicroBatches = 16;

  static WorkerId IdOf(int rank) { return WorkerId(static_cast<uint32_t>(10 + rank)); }
  static NodeId NodeOf(int rank) { return NodeId(static_cast<uint32_t>(2 + rank)); }
  void AddCompute(int rank, const RankClusterOptions& options);

  NodeModel& model_;
  HandClock clock_;
  transport::InprocFabric fabric_;
  std::vector<std::unique_ptr<transport::Port>> ports_;
  std::vector<std::unique_ptr<transport::FaultyPort>> faulty_;
  std::vector<std::unique_ptr<MortalPort>> mortal_;
  std::unique_ptr<scheduler::SchedulerNode> scheduler_;
  std::unique_ptr<attention::AttentionWorkerNode> attention_;
  std::vector<std::unique_ptr<compute::ComputeWorkerNode>> compute_;
  std::set<int> lost_;
  std::vector<Stream> streams_;
};

}  // namespace dovetail::test
