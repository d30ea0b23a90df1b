#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "attention_worker/attention_backend.h"
#include "attention_worker/attention_spans.h"
#include "attention_worker/core/attention_worker_core.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/trace.h"
#include "exchange/exchange_party.h"
#include "kernels/device.h"
#include "transport/fabric.h"

namespace dovetail::attention {

// An attention worker: core + device + port.
// Threads: reactor-owned; the event loop calls Poll().
class AttentionWorkerNode final : public transport::FrameHandler {
 public:
  // `device`, `port` and `clock` outlive the node. kInvalidArgument for options out of range, kResourceExhausted if the
  // KV arena does not fit. `shared_gpu`, `storage`: as MakeAttentionBackend says.
  static absl::StatusOr<std::unique_ptr<AttentionWorkerNode>> Create(const proto::AttentionTable& table,
                                                                     const AttentionWorkerOptions& options,
                                                                     kernels::Device& device, transport::Port& port,
                                                                     Clock& clock = SystemClock(),
                                                                     exchange::SharedGpu* shared_gpu = nullptr,
                                                                     KvStorage storage = KvStorage::kAsSent);

  // From now on compute workers may offer to exchange layers from GPU to GPU (exchange/), or are told why not. Before
  // the first Poll.
  void AllowExchange(const exchange::GpuExchangeMeans& means) {
    party_ = std::make_unique<exchange::ExchangeParty>(means);
  }
  // Puts something between the node and its backend, before the first Poll: for what watches or disturbs them.
  void WrapBackend(const std::function<std::unique_ptr<AttentionBackend>(std::unique_ptr<AttentionBackend>)>& wrap) {
    executor_ = wrap(std::move(executor_));
  }
  // A peer is lost. Before the port removes it, which unmaps what it has sent: its steps end, and what they hold of its
  // memory is not read again.
  void LosePeer(NodeId node);

  // Handles what has arrived, at most kFramesPerPoll frames; returns how many. Does not wait for frames; blocks for as
  // long as the attention that they start takes. What fails inside a step is logged here and answered with
  // kStepRefused.
  int Poll();

  void OnFrame(const transport::Delivery& delivery) override;

  // From now on what is done when goes there, too; outlives the node.
  void SetTrace(Trace* trace) { trace_ = trace; }
  // The same for sequences of sampled traces.
  void SetSpans(SpanSink* sink) { spans_.SetSink(sink); }

  // Not kOk once its device is lost (Device::Health()). Then frames are not handled: the process must go, and what it
  // held is rebuilt elsewhere.
  const absl::Status& Health() const { return health_; }

  const AttentionWorkerCore& core() const { return core_; }
  AttentionWorkerCore& core() { return core_; }

 private:
  static constexpr int kFramesPerPoll = 64;
  static constexpr size_t kMaxReports = 16384;  // as many as a scheduler leaves orders unread
  static constexpr int kLooksForKeyValues = 8;  // a few microseconds, while there is a q without k and v

  struct Query {  // of an op whose k and v are still to come
    MicroBatchId micro_batch;
    int op = 0;
    StepId step;
  };

  struct HeldAnswer {  // of an op whose gathered rows come first, or that is still under way on the device
    transport::LentBytes partial;
    absl::Duration busy;
  };
  struct Gathering {  // a payload of a move, on its way from the device
    SendMovedKeyValue send;
    StepId step;  // of the part
    transport::LentBytes rows;
  };
  struct Unanswered {  // an op that AppendAndFinish was asked for
    MicroBatchId micro_batch;
    int op = 0;
    StepId step;
    NodeId reply_to;
    HeldAnswer answer;
  };

  AttentionWorkerNode(const proto::AttentionTable& table, const AttentionWorkerOptions& options,
                      kernels::Device& device, transport::Port& port, Clock& clock, exchange::SharedGpu* shared_gpu)
      : options_(options),
        shared_gpu_(shared_gpu),
        core_(table, options),
        device_(device),
        port_(port),
        clock_(clock),
        query_busy_(options.micro_batches + proto::kMoveSlots),
        held_answers_(options.micro_batches + proto::kMoveSlots),
        party_(std::make_unique<exchange::ExchangeParty>(exchange::GpuExchangeMeans{})) {}

  void SendReports();
  void AttendEarlier();
  void OnLinkFrame(const transport::Delivery& delivery);
  void Send(std::vector<exchange::ExchangeParty::Frame>& frames);
  absl::Status CheckSeam(const transport::Delivery& delivery) const;
  exchange::Seam SeamOf(const PrepareStep& prepare) const;
  absl::Status Perform(const PrepareStep& prepare);
  absl::Status CheckRoom(MicroBatchId id, const exchange::GpuExchange& peer) const;
  absl::Status RunOps(MicroBatchId id, const exchange::GpuExchange& peer);
  void EndFailed(const transport::Delivery& delivery);
  absl::Status Perform(Action& action);
  absl::Status Perform(const AppendAndFinish& finish);
  absl::Status Perform(const GiveRows& give);
  absl::Status Answer(const Unanswered& op);
  void AnswerWhatIsDone();
  void SendWhatIsGathered();
  absl::Status SendGathered(const Gathering& rows);
  absl::Status PerformAll(std::vector<Action> actions);
  absl::Status CheckPayload(const transport::Delivery& delivery) const;
  absl::Status DigestSets(std::span<const BlockSetId> sets);
  void Note(const char* what, StepId step, MicroBatchId id, int op, absl::Time begin);
  int MoveSlotOf(const Action& action) const;  // -1: not of a move that goes out
  bool IsLost();
  void PoisonFreed();
  void FailMove(int slot, const absl::Status& status);
  void RefuseStep(const transport::Delivery& delivery, const absl::Status& status);

  const AttentionWorkerOptions options_;
  exchange::SharedGpu* const shared_gpu_;  // null: none
  AttentionWorkerCore core_;
  kernels::Device& device_;
  absl::Status health_;
  transport::Port& port_;
  Clock& clock_;
  Trace* trace_ = nullptr;
  AttentionSpans spans_;
  uint64_t damaged_told_ = 0;               // damaged sets that were logged
  std::vector<absl::Duration> query_busy_;  // of the op at hand, by micro-batch
  std::vector<HeldAnswer> held_answers_;    // likewise, until its gathered rows were sent
  std::vector<Query> queries_;              // taken, and not attended to yet
  std::vector<Unanswered> unanswered_;      // in the order of their ops
  std::vector<Gathering> gathering_;        // likewise
  std::unique_ptr<AttentionBackend> executor_;
  std::vector<Action> actions_;
  std::deque<SendFrame> reports_;  // of the cache, that found no room yet
  std::unique_ptr<exchange::ExchangeParty> party_;
};

}  // namespace dovetail::attention
