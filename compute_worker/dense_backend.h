#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/last_rows.h"
#include "compute_worker/rank_memory.h"
#include "compute_worker/turn_choice.h"
#include "exchange/seam.h"
#include "proto/attention_spec.h"
#include "proto/step_plan.h"
#include "transport/lent_bytes.h"

namespace dovetail::compute {

// What a compute worker does on its device: the dense pieces of a step, the tensors at the seam, the end of the step.
// Threads: reactor-owned; the node calls it in the order of the core's actions, and micro-batches interleave.
class DenseBackend {
 public:
  virtual ~DenseBackend() = default;

  // The sequences of the plan whose grammars are not compiled yet: that is under way now, and the plan is not to be run
  // before. Does not wait.
  virtual std::vector<SequenceId> PendingGrammars(const proto::StepPlan& plan) = 0;

  // Makes the plan that `core` runs in this micro-batch ready: its tokens' embeddings, positions, buffers. `seam`: how
  // the step's payloads cross (exchange/seam.h, obligation 3).
  // kResourceExhausted: no memory; kInvalidArgument: a token outside the vocabulary. May allocate; nothing below does.
  virtual absl::Status PrepareStep(const ComputeWorkerCore& core, MicroBatchId id, const exchange::Seam& seam) = 0;

  // Runs piece `index` of the model's steps over all rows. It may still be under way on the device: what follows in the
  // same micro-batch is ordered behind it.
  virtual absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int index) = 0;

  // Attends the micro-batch's prompts, as far as they are attended here. As Run, it may still be under way.
  virtual absl::Status AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) = 0;

  // The next part of that in a ring of ranks (AttendShard). As Run, it may still be under way, for which it keeps the
  // rows. Of backends whose workers exchange K and V of prompts.
  virtual absl::Status AttendRankShard(const ComputeWorkerCore&, const AttendShard&) {
    return absl::UnimplementedError("this device has no ring of ranks");
  }

  // Of a head switch between ranks, of backends whose workers have that. After the op's q, k and v, and what is
  // gathered: those of the step's tokens and these KV heads, as kRankHeads has them (proto/rank_frames.h).
  virtual absl::StatusOr<transport::LentBytes> RankHeads(const ComputeWorkerCore&, MicroBatchId, int /*op*/,
                                                         const proto::HeadRange&) {
    return absl::UnimplementedError("this device exchanges no tokens for heads");
  }
  virtual absl::Status AttendRankHeads(const ComputeWorkerCore&, const AttendHeads&) {
    return absl::UnimplementedError("this device exchanges no tokens for heads");
  }
  // Of ranks that ask each other, of backends whose workers do. After the op's q: that of the step's first rows
  // (kRankHeads), and after its k and v: a later rank's queries over them.
  virtual absl::StatusOr<transport::LentBytes> RankQueries(MicroBatchId, int /*op*/, int64_t /*rows*/) {
    return absl::UnimplementedError("this device asks no other ranks");
  }
  virtual absl::Status AttendRankQueries(const ComputeWorkerCore&, const AttendQueries&) {
    return absl::UnimplementedError("this device answers no other ranks");
  }
  // After AttendRankHeads of another rank's tokens, or AttendRankQueries: what that gave (kRankOutputs), once.
  virtual absl::StatusOr<transport::LentBytes> TakeRankOutputs(const ComputeWorkerCore&, MicroBatchId) {
    return absl::UnimplementedError("this device attends to nothing for other ranks");
  }
  // What RankHeads, RankQueries or TakeRankOutputs lent is there; it stays until its owner goes.
  virtual absl::StatusOr<bool> GivenReady(std::span<const std::byte> /*lent*/) { return true; }
  virtual absl::Status PlaceOutputs(const ComputeWorkerCore&, const PlaceRankOutputs&) {
    return absl::UnimplementedError("this device gets nothing that other ranks attended to");
  }

  // Puts K and V of a later rank into the blocks of its prompt (KeepRankRows), for steps that begin from here on. They
  // lie behind all tokens of the step, which may be under way or have ended. As Run, it may still be under way, for
  // which it keeps keep.rows. Of backends whose workers give other ranks rows.
  virtual absl::Status KeepRankRows(const ComputeWorkerCore&, const compute::KeepRankRows&,
                                    const PromptScratch::Part&) {
    return absl::UnimplementedError("this device keeps no rows of later ranks");
  }

  // Whether the payloads of an op can be packed without waiting for the device. If not, the caller does other things
  // and packs them later, in the order in which it would have. kInternal: the device is lost.
  virtual absl::StatusOr<bool> PayloadsReady(MicroBatchId, int /*op*/) { return true; }

  // The payloads for part `p` of the micro-batch, unchanged until the next op's, k and v until they were answered. In
  // host memory, with its owner, unless all workers of this process hand each other device memory.
  virtual absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                         int op) = 0;
  virtual absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                            int op) = 0;

  // After AttendPrompts of a linear op whose state goes to the next rank of a group (StateEntry::passed_on): that state
  // (proto/rank_frames.h), once, as soon as RankStateReady says that it is there.
  virtual std::vector<std::byte> TakeRankState(MicroBatchId, int /*op*/) { return {}; }
  virtual absl::StatusOr<bool> RankStateReady(MicroBatchId, int /*op*/) { return true; }

  // After the op's k and v: those of the step's rows from first_row on, for a later rank of a group, as kRankRows has
  // them (proto/rank_frames.h). They are there once RankRowsReady says so of the op, and stay until their owner goes.
  virtual absl::StatusOr<transport::LentBytes> RankRows(MicroBatchId, int op, int64_t /*first_row*/) {
    return Unimplemented("attention op ", op, ": this device gives no rows to other ranks");
  }
  virtual absl::StatusOr<bool> RankRowsReady(MicroBatchId, int /*op*/) { return true; }
  // Where what this device gives other ranks may lie for them to read; null: it goes in frames.
  virtual RankMemory* rank_memory() { return nullptr; }
  // Rows, heads or outputs that another rank sent: a copy where this device uses them. Until RankRowsTaken, `rows` are
  // read and must stay as they are.
  virtual absl::StatusOr<RankTensor> TakeRankRows(std::span<const std::byte> rows) {
    return RankTensor(std::vector<std::byte>(rows.begin(), rows.end()));
  }
  virtual absl::StatusOr<bool> RankRowsTaken(const RankTensor&) { return true; }

  // Of K and V that TakeRankRows took, those from first_row on: for the next rank of a ring, as kRankRows has them.
  // They are there once HandOnReady says so, until when `rows` are kept by the caller, and stay until their owner goes.
  virtual absl::StatusOr<transport::LentBytes> HandOnRows(MicroBatchId, const proto::SoftmaxSpec& spec,
                                                          const RankTensor& rows, int64_t first_row) {
    const RankTensor last = first_row == 0 ? rows : RankTensor(LastRows(rows.bytes, spec, first_row));
    return transport::LentBytes{last.bytes, last.owner};
  }
  virtual absl::StatusOr<bool> HandOnReady(std::span<const std::byte> /*rows*/) { return true; }

  // A piece of earlier tokens' K and V from an attention worker (proto/gather_frames.h), which stays as it is until
  // more are asked for. As it came, or a copy of it under way, which RankRowsTaken tells the end of.
  virtual absl::StatusOr<RankTensor> TakeEarlierRows(std::span<const std::byte> rows) {
    return RankTensor(rows, nullptr);
  }
  // Puts it into the blocks of its prompt, before AttendPrompts of the op. As Run, it may still be under way, for which
  // it keeps keep.rows if they are a copy.
  virtual absl::Status KeepEarlierRows(const ComputeWorkerCore&, const compute::KeepEarlierRows& keep) {
    return Unimplemented("attention op ", keep.op, ": this device keeps no rows of earlier tokens");
  }

  // Final norm, head, choice of tokens, as far as that needs no waiting. True: Sample then only takes what was drawn,
  // and PrepareStep already takes plans whose tokens are what this step draws (proto/drawn_token.h). False: nothing was
  // done.
  virtual absl::StatusOr<bool> BeginSample(const proto::StepPlan&, MicroBatchId) { return false; }

  // Whether steps of several micro-batches that exchange layers from GPU to GPU take turns in the dense layers, for
  // steps that begin from here on. For measurements.
  virtual void SetTurns(TurnChoice::Policy) {}

  // Of a step that exchanged layers from GPU to GPU, or attended prompts on the GPU, after Sample: how long the GPU was
  // busy with it except attention to prompts, how long with that (`linear` of it in linear layers), and how long it
  // waited for attention workers and for rows of other ranks. Where their GPUs said so, how long those were busy. What
  // it waited for its turn on the GPU is in none of them. Nothing where times were not measured.
  struct GpuTimes {
    absl::Duration busy, prompts, waited, linear;
    std::optional<absl::Duration> attention;
  };
  virtual std::optional<GpuTimes> TimesOf(MicroBatchId) const { return std::nullopt; }
  // Run only enqueues, so the host's clock does not say how long layers take. Where TimesOf says nothing either, a step
  // teaches the scheduler no rates.
  virtual bool only_enqueues() const { return false; }

  // After BeginSample gave true. False: Sample would wait for the device, and the caller looks at its frames meanwhile.
  virtual bool Drawn(MicroBatchId) { return true; }

  // Fills result.entries, one per plan entry. Waits for the device. kUnavailable: the step's exchange failed.
  virtual absl::Status Sample(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) = 0;
};

// Weights that lie on a device, and can be computed with there. Outlives its backends.
// Threads: immutable.
class DenseBackendFactory {
 public:
  virtual ~DenseBackendFactory() = default;

  // How many blocks of 64 tokens, a KV head and an op a scratch of prompts has there (ComputeWorkerOptions::
  // prompt_blocks) in so many bytes; nothing: in as many as it takes by itself. 0: prompts are not attended there.
  virtual uint32_t PromptBlocks(const proto::AttentionTable&, int /*max_step_tokens*/,
                                std::optional<uint64_t> /*bytes*/) const {
    return 0;
  }
  // Whether the linear layers of prompts run there (ComputeWorkerOptions::linear_prompts). kUnimplemented,
  // kInvalidArgument: which do not, or why.
  virtual absl::Status RunsLinearPrompts(const proto::AttentionTable&) const {
    return absl::UnimplementedError("this device runs no linear layers of prompts");
  }
  // `shared_gpu`: null unless steps may cross the seam on it; outlives the backend.
  // kResourceExhausted when what the largest step needs does not fit: it is taken here.
  virtual absl::StatusOr<std::unique_ptr<DenseBackend>> Create(const proto::AttentionTable& table,
                                                               const ComputeWorkerOptions& options,
                                                               exchange::SharedGpu* shared_gpu) const = 0;
};

}  // namespace dovetail::compute
