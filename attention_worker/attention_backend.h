#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "attention_worker/core/attention_worker_core.h"
#include "base/kv_storage.h"
#include "base/status.h"
#include "exchange/seam.h"
#include "kernels/device.h"
#include "transport/lent_bytes.h"

namespace dovetail::attention {

using dovetail::KvStorage;

// What an AttentionWorkerCore asks for, done on a device over one arena of KV blocks. The per-op functions neither
// allocate nor lock once PrepareStep has grown the buffers.
// Threads: reactor-owned; the node calls it in the order of the core's actions.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  // Copies whole blocks, in order.
  virtual absl::Status Copy(std::span<const BlockCopy> copies) = 0;
  // A digest (block_digest.h) of the bytes of these blocks, in order, once all that was asked for before is done. Equal
  // bytes have equal digests within one backend.
  virtual absl::StatusOr<uint64_t> DigestOf(std::span<const KvBlockId> blocks) = 0;
  // Fills blocks with bytes that are NaN in every type of K and V.
  virtual absl::Status Poison(std::span<const KvBlockId> blocks) = 0;
  // Grows the micro-batch's scratch, partials and tables to what core.LayoutOf(micro_batch, ..) needs. `seam`: how the
  // step's payloads cross (exchange/seam.h, obligation 3).
  // kResourceExhausted: no memory.
  virtual absl::Status PrepareStep(MicroBatchId micro_batch, const exchange::Seam& seam) = 0;
  // The payload of the kPartial that answers the question for the states before an op, with its owner; unchanged until
  // AppendAndFinish of the op. kInternal: a block of them is not held.
  virtual absl::StatusOr<transport::LentBytes> GiveStates(MicroBatchId micro_batch, int op) = 0;
  // `query` and `key_value` are the payloads of kQuery and kKeyValue, laid out as core.LayoutOf says. `query` must stay
  // as it is until AppendAndFinish has returned. Errors: those of the kernels; kInternal for k and v without q.
  virtual absl::Status TakeQuery(MicroBatchId micro_batch, int op, std::span<const std::byte> query) = 0;
  // After TakeQuery, if k and v are still to come: attends to what needs none of them. Never needed; results have the
  // same bits. An op that is not at hand any more is left alone.
  virtual void AttendEarlier(MicroBatchId /*micro_batch*/, int /*op*/) {}
  // Returns the payload of kPartial, with its owner; unchanged until the next op of the micro-batch. Where no q was due
  // it is empty, and the op may still be under way (TakeAppended); `key_value` is not needed any more.
  virtual absl::StatusOr<transport::LentBytes> AppendAndFinish(MicroBatchId micro_batch, int op,
                                                               std::span<const std::byte> key_value) = 0;
  // The payload of the kEarlierRows of a piece (StepLayout::PieceAt), from the blocks, with its owner; unchanged until
  // the piece kGatherPiecesAhead after it. After AppendAndFinish of the op. kInternal: some tokens are not held.
  virtual absl::StatusOr<transport::LentBytes> GiveRows(MicroBatchId micro_batch, int op, int piece) = 0;
  // After the last op of a step without frames for its payloads: what was asked for runs (obligation 8).
  virtual absl::Status Launch(MicroBatchId) { return absl::OkStatus(); }
  // Whether the oldest op of the micro-batch of which AppendAndFinish gave an empty payload, and which was not told of
  // yet, is done: it may be answered. It is told of then. kInternal: the device is lost.
  virtual absl::StatusOr<bool> TakeAppended(MicroBatchId) { return true; }
  // Where the payload of kKeyValue of core.OutgoingMoveOf(slot) comes from the blocks, with its owner; it is there once
  // TakeGathered has told of it, and unchanged until so many as proto::kMoveOpsAhead of the slot came after it.
  // kResourceExhausted: no memory.
  virtual absl::StatusOr<transport::LentBytes> Gather(int slot, int op) = 0;
  // Whether the oldest payload of the slot that was not told of yet is there. kInternal: the device is lost.
  virtual absl::StatusOr<bool> TakeGathered(int /*slot*/) { return true; }
};

// On the CPU, or on the GPU that `device` is. `shared_gpu`: null unless steps may cross the seam on that GPU. `device`,
// `core` and `shared_gpu` outlive it. kResourceExhausted when the device has no room for kv_blocks blocks;
// kUnimplemented for a table that a GPU does not attend, and for a storage that the device does not have.
// `deterministic`: on a GPU, a row's bits depend on its query and on what it sees only (CudaAttention::Kernel);
// kFailedPrecondition for a device or heads, and kUnimplemented for a table with linear layers, of which that is not
// so.
//
// Threads: thread-safe; the backend that it returns is reactor-owned.
absl::StatusOr<std::unique_ptr<AttentionBackend>> MakeAttentionBackend(
    kernels::Device& device, AttentionWorkerCore& core, uint32_t kv_blocks, int micro_batches,
    exchange::SharedGpu* shared_gpu = nullptr, KvStorage storage = KvStorage::kAsSent, bool deterministic = false);

inline constexpr uint8_t kPoison = 0xff;

// Whether a worker can keep K and V so. `gpu`: the name of its GPU; empty: it runs on a CPU.
// Errors: kUnimplemented for int8 on a GPU and for 8 bits with linear states; kInvalidArgument for 8 bits on a CPU with
// another wire type than bfloat16.
// Threads: pure.
absl::Status CheckKvStorage(const proto::AttentionTable& table, KvStorage storage, std::string_view gpu);

// Of a KvBlock in such a backend, scales included.
size_t KvBlockBytes(const proto::AttentionTable& table, KvStorage storage);

}  // namespace dovetail::attention
