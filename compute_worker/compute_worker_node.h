#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/kv_storage.h"
#include "base/status.h"
#include "base/trace.h"
#include "compute_worker/compute_spans.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/dense_backend.h"
#include "compute_worker/earlier_rows.h"
#include "compute_worker/gpu_links.h"
#include "compute_worker/rank_exchange.h"
#include "compute_worker/rank_links.h"
#include "compute_worker/rank_reach.h"
#include "compute_worker/sampling_lists_cache.h"
#include "compute_worker/seam_choice.h"
#include "kernels/device.h"
#include "model/loaded_model.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// How a compute worker works; none of it changes a bit of what comes out.
struct ComputeWorkerTuning {
  bool q_first = true;  // q leaves before k and v are computed
  // K and V of prompts attended here; default: a few steps, at most 256 MiB; on a GPU an eighth of its free memory.
  std::optional<uint64_t> prompt_scratch_bytes;
  bool prompts_here = false;  // so much by default also on a GPU that exchanges layers with those of attention workers
  KvStorage kv_storage = KvStorage::kAsSent;  // of attention workers; prompts are attended here in the same on CPUs
  int64_t gather_piece_bytes = kGatherPieceBytes;  // ComputeWorkerOptions; fewer are for tests
  int prompt_tokens = 16;                          // new tokens from which on an entry is attended here
  bool linear_prompts = true;                      // the linear layers of such entries run here, and their states cross
  int key_values_in_flight = 4;                    // ops of k and v that an attention worker may owe an answer, 2..64
  bool hand_over_at_end = false;                   // all k and v of a prompt's step go when its layers are done
  Trace* trace = nullptr;                          // what is done when; outlives the worker
  SpanSink* spans = nullptr;                       // the same for sequences of sampled traces; outlives the worker
  // Where the dense layers run, if not on the CPU; outlives the worker.
  const DenseBackendFactory* dense = nullptr;
  // With an attention worker of this process and GPU, which then attends prompts, too; outlives the worker.
  exchange::SharedGpu* shared_gpu = nullptr;
  bool attends_elsewhere = false;  // with shared_gpu: other attention workers are there, too, in the host's memory
  // All compute workers are of this process and on GPUs: K and V that they give each other go from GPU to GPU.
  bool rank_rows_on_device = false;
  // Of other processes: they name each other memory of their GPUs, where that can be (rank_reach.h).
  bool names_rank_memory = true;
  // As ComputeWorkerOptions has it; attention workers attend prompts, too. kFailedPrecondition: not such a GPU.
  // kUnimplemented: not such a model.
  bool deterministic = false;
  // Steps whose sequences lie whole on linked attention workers exchange layers from GPU to GPU (peer_crossing.h).
  exchange::GpuExchangeMeans exchange;
};

// A compute worker: core + device + port + clock.
// Threads: reactor-owned; the event loop calls Poll().
class ComputeWorkerNode final : public transport::FrameHandler {
 public:
  // All references outlive the node. `scheduler` gets the step results. kResourceExhausted when the device has no
  // room for the largest step.
  static absl::StatusOr<std::unique_ptr<ComputeWorkerNode>> Create(const model::LoadedModel& model,
                                                                   const proto::AttentionTable& table,
                                                                   const ComputeWorkerOptions& options,
                                                                   NodeId scheduler, kernels::Device& device,
                                                                   transport::Port& port, Clock& clock,
                                                                   const ComputeWorkerTuning& tuning = {});

  // The same on the CPU.
  ComputeWorkerNode(const model::LoadedModel& model, const proto::AttentionTable& table,
                    const ComputeWorkerOptions& options, NodeId scheduler, kernels::Device& device,
                    transport::Port& port, Clock& clock, const ComputeWorkerTuning& tuning = {});

  void AddAttentionWorker(const AttentionWorkerAddress& address);

  // Its steps end as failed by it; what else it sends is dropped. Not from inside Poll().
  void LoseAttentionWorker(WorkerId worker, Epoch epoch);

  // Another compute worker, with which this one may prefill a prompt. It is told apart by its worker id.
  void AddComputeWorker(const ComputeWorkerAddress& address) {
    rank_links_.Add(address);
    rank_reach_.Add(address);
  }
  // Nothing is sent to it any more. Steps that wait for it wait until the scheduler withdraws them.
  void LoseComputeWorker(WorkerId worker, Epoch epoch) {
    rank_links_.Lose(worker, epoch);
    rank_reach_.Lose(worker, epoch);
  }

  // Handles what has arrived; returns how many frames. When nothing has, and all steps under way are being drawn on the
  // device, waits for the oldest of them: 1.
  int Poll();

  // Attention workers whose partials a step has waited for five times as long as usual, and at least 100 ms. They may
  // be lost, or just slow. To be asked when Poll() has handled everything that is there.
  std::vector<NodeId> Overdue() const;

  void OnFrame(const transport::Delivery& delivery) override;

  // Not kOk once its device is lost (Device::Health()). Steps under way are not answered then and frames not handled:
  // the process must go, and the scheduler repeats those steps elsewhere.
  const absl::Status& Health() const { return health_; }

  const ComputeWorkerCore& core() const { return core_; }
  // Linear layers of prompts run here, and attention workers hold what these leave (proto/state_blocks.h).
  bool leaves_states() const { return core_.options().linear_prompts && core_.table().has_linear(); }
  const RankLinks& rank_links() const { return rank_links_; }

  // See DenseBackend.
  void SetTurns(TurnChoice::Policy policy) { dense_->SetTurns(policy); }

  // How layers cross to an attention worker, and what ranks give each other to a compute worker: "device", or "host: "
  // and why; empty if the dense layers run on a CPU.
  std::string ExchangeWith(NodeId node) const {
    const std::string layers = links_.Describe(node);
    return layers.empty() ? rank_reach_.Describe(node) : layers;
  }

 private:
  static constexpr int kFramesPerPoll = 64;

  // Without `dense`: on the CPU.
  ComputeWorkerNode(const model::LoadedModel& model, const proto::AttentionTable& table,
                    const ComputeWorkerOptions& options, NodeId scheduler, kernels::Device& device,
                    transport::Port& port, Clock& clock, const ComputeWorkerTuning& tuning,
                    std::unique_ptr<DenseBackend> dense);

  struct Timer {                            // of one micro-batch's step
    absl::Time begun, waiting_since, sent;  // sent: q of the op at hand
    absl::Duration dense, waiting, sampling, prompts;
    absl::Duration linear;             // of prompts: linear layers
    absl::Duration attention;          // of the waiting: what the slowest worker of each op was busy
    int op = -1;                       // the op at hand
    absl::Duration op_busy;            // of the slowest worker that has answered
    absl::Duration overlapped;         // of the waiting: worked_ went on, for other steps
    absl::Duration worked_at_waiting;  // worked_ when it began to wait
    bool measured = true;              // dense, prompts and attention say how long these took
  };

  void BeginWaiting(Timer& timer, absl::Time now);
  void Waited(Timer& timer, absl::Time now);
  void Worked(absl::Duration& part, Timer& timer, absl::Time begun);
  void NoteBusy(const proto::FrameHeader& partial);
  void Note(const char* what, MicroBatchId id, int op, absl::Time begin = absl::InfinitePast());
  // Gives the core an event and performs what it asks for, until nothing is left to do.
  void Feed(Event event);
  absl::Status Perform(Action& action);
  absl::Status Perform(SendStepBegin& send);
  absl::Status Perform(SendKeyValue& send);
  absl::Status Perform(RunDense& run);
  absl::Status Perform(AttendPrompts& attend);
  template <typename Attend>
  absl::Status AttendForRanks(const char* what, const Attend& attend,
                              absl::Status (DenseBackend::*run)(const ComputeWorkerCore&, const Attend&));
  template <typename Send, typename By>
  absl::Status SendToRanks(const char* what, Send& send, By by);
  absl::Status Perform(KeepRankRows& keep);
  absl::Status Perform(KeepEarlierRows& keep);
  void OnRankFrame(const transport::Delivery& delivery);
  int TakeFromRanks();  // what they sent, as far as it has been copied; not 0 while some of it has not
  void FailOfRank(const proto::FrameHeader& header, const absl::Status& why);  // what it sent cannot be taken
  absl::Status Perform(Sample& sample);
  absl::Status FinishSample(MicroBatchId id);
  void EndDraw(MicroBatchId id);
  void PerformAll();
  absl::Status Perform(FinishStep& finish);
  void Withdraw(MicroBatchId id, StepId step);
  void Refuse(MicroBatchId id, StepId step, proto::StepStatus status, const absl::Status& why);
  // Grammars of the step are not compiled yet.
  void Postpone(MicroBatchId id, StepId step, std::vector<SequenceId> pending);
  absl::Status SendResult(const proto::StepResult& result);
  bool Sent(proto::StepResult& result);  // false: the scheduler has no room for it yet
  int SendUnsent();
  bool IsLate(MicroBatchId id) const;
  void NoteLate(MicroBatchId id);  // if payloads that were to be sent were not there
  int SendLate();                  // those, as far as they are there by now; draws behind the last
  void FailStep(MicroBatchId id, const absl::Status& status);

  const NodeId scheduler_;
  Trace* const trace_;
  ComputeSpans spans_;
  SamplingListsCache lists_;
  ComputeWorkerCore core_;
  kernels::Device& device_;
  const std::unique_ptr<DenseBackend> dense_;
  absl::Status health_;
  transport::Port& port_;
  Clock& clock_;
  GpuLinks links_;
  RankLinks rank_links_;
  RankReach rank_reach_;
  RankExchange rank_exchange_;
  EarlierRows earlier_rows_;
  SeamChoice seam_;
  std::vector<Timer> timers_;
  absl::Duration worked_;              // dense work, prompts and sampling of all steps
  std::vector<absl::Duration> waits_;  // the last ones, from q to a partial, in a ring
  size_t next_wait_ = 0;
  std::vector<Action> actions_;           // still to be performed
  std::deque<proto::StepResult> unsent_;  // in order: the scheduler has no room yet; one for each micro-batch at most
  std::vector<MicroBatchId> drawing_;     // whose Sample has begun, oldest first
  std::vector<MicroBatchId> late_;        // some of whose payloads wait for the device; Sample waits behind them
  std::vector<MicroBatchId> undrawn_;     // whose Sample does
};

}  // namespace dovetail::compute
