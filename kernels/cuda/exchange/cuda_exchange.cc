#include "kernels/cuda/exchange/cuda_exchange.h"

#include <algorithm>

namespace dovetail::kernels::cuda {
namespace {

constexpr int kMostPushBlocks = 1024;
constexpr uint64_t kVector = 16;
constexpr int64_t kSplitBytes = 8192;
constexpr int kMostSplits = 64;
constexpr int64_t kMostRunBytes = int64_t{1} << 35;  // 16 bytes each, numbered in 32 bits

absl::Status CheckOp(uint64_t op) {
  if (op + 1 < kExchangeOps) return absl::OkStatus();
  return InvalidArgument("exchange between GPUs: op ", op, " of at most ", kExchangeOps - 2);
}

absl::Status CheckEnd(const ExchangeEnd& end, uint64_t op) {
  if (end.own == nullptr || end.peer == nullptr) return InvalidArgument("exchange between GPUs: a pointer is null");
  return CheckOp(op);
}

template <typename Launch>
absl::Status Enqueue(CudaStream& stream, int (*function)(const Launch*, void*), const Launch& args) {
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(function(&args, stream.handle()), "exchange between GPUs");
}

}  // namespace

absl::Status ExchangeAwait(CudaStream& stream, const ExchangeAwaitLaunch& args) {
  DT_RETURN_IF_ERROR(CheckEnd(args.end, args.op));
  return Enqueue(stream, stream.device().library()->exchange_await, args);
}

absl::Status ExchangeGiveTurn(CudaStream& stream, const ExchangeGiveTurnLaunch& args) {
  if (args.own == nullptr && args.fan == nullptr) return InvalidArgument("exchange between GPUs: a pointer is null");
  return Enqueue(stream, stream.device().library()->exchange_give_turn, args);
}

absl::Status ExchangeSignal(CudaStream& stream, const ExchangeSignalLaunch& args) {
  DT_RETURN_IF_ERROR(CheckEnd(args.end, args.op));
  return Enqueue(stream, stream.device().library()->exchange_signal, args);
}

absl::Status ExchangePush(CudaStream& stream, const ExchangePushLaunch& args) {
  DT_RETURN_IF_ERROR(CheckEnd(args.end, args.op));
  if (args.blocks < 1 || args.blocks > kMostPushBlocks)
    return InvalidArgument("exchange between GPUs: ", args.blocks, " blocks are outside 1..", kMostPushBlocks);
  for (const ExchangePushLaunch::Part& part : args.parts) {
    const uint64_t all = reinterpret_cast<uint64_t>(part.from) | reinterpret_cast<uint64_t>(part.to) | part.bytes;
    if (all % kVector != 0 || (part.bytes > 0 && (part.from == nullptr || part.to == nullptr)))
      return InvalidArgument("exchange between GPUs: ", part.bytes, " bytes, or what they lie at, are odd or nowhere");
  }
  return Enqueue(stream, stream.device().library()->exchange_push, args);
}

absl::Status ExchangeAwaitAll(CudaStream& stream, const ExchangeAwaitAllLaunch& args) {
  if (args.fan == nullptr) return InvalidArgument("exchange between GPUs: a pointer is null");
  DT_RETURN_IF_ERROR(CheckOp(args.op));
  return Enqueue(stream, stream.device().library()->exchange_await_all, args);
}

absl::Status ExchangeGather(CudaStream& stream, const ExchangeGatherLaunch& args) {
  if (args.fan == nullptr || args.rows == nullptr || args.out == nullptr)
    return InvalidArgument("exchange between GPUs: a pointer is null");
  if (args.count < 0 || args.row_bytes < 0 ||
      (reinterpret_cast<uint64_t>(args.out) | static_cast<uint64_t>(args.row_bytes)) % kVector != 0)
    return InvalidArgument("exchange between GPUs: ", args.count, " rows of ", args.row_bytes,
                           " bytes; they are to be multiples of ", kVector);
  return Enqueue(stream, stream.device().library()->exchange_gather, args);
}

absl::Status ExchangeCopies(CudaStream& stream, const ExchangeCopiesLaunch& args) {
  if (args.count < 0 || args.splits < 1 || args.splits > kMostSplits || (args.count == 0 && args.fan != nullptr))
    return InvalidArgument("exchange between GPUs: ", args.count, " copies by ", args.splits, " blocks each");
  if (args.copies == nullptr) return InvalidArgument("exchange between GPUs: a pointer is null");
  DT_RETURN_IF_ERROR(CheckOp(args.op));
  return Enqueue(stream, stream.device().library()->exchange_copies, args);
}

absl::Status ExchangeJoins(CudaStream& stream, const ExchangeJoinsLaunch& args) {
  if (args.joins == nullptr || args.partials == nullptr)
    return InvalidArgument("exchange between GPUs: a pointer is null");
  const bool fits = args.count >= 1 && args.units >= 1 && args.units <= kMostJoinUnits && args.value_dim >= 2 &&
                    args.value_dim <= 256 && args.value_dim % 2 == 0 && args.o_row_step % 2 == 0;
  if (!fits)
    return InvalidArgument("exchange between GPUs: ", args.count, " joins of up to ", args.units, " rows and heads of ",
                           args.value_dim);
  return Enqueue(stream, stream.device().library()->exchange_joins, args);
}

int ExchangeSplits(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>((bytes + kSplitBytes - 1) / kSplitBytes, 1, kMostSplits));
}

absl::Status CopyRuns(CudaStream& stream, const CopyRunsLaunch& args) {
  const int64_t all = args.from_row_step | args.to_row_step | args.from_run_step | args.to_run_step | args.run_bytes;
  const int64_t of_row = static_cast<int64_t>(args.run_bytes) * args.runs;
  if (args.rows < 0 || args.runs < 1 || all < 0 || all % int64_t{kVector} != 0 || args.blocks < 1 ||
      args.blocks > kMostPushBlocks || of_row >= kMostRunBytes || (of_row > 0 && args.rows >= kMostRunBytes / of_row))
    return InvalidArgument("copy of runs on a GPU: ", args.rows, " rows of ", args.runs, " runs of ", args.run_bytes,
                           " bytes by ", args.blocks, " blocks; sizes and steps are multiples of ", kVector,
                           ", below 2^35 bytes in all, and 1..", kMostPushBlocks, " blocks copy them");
  if (args.rows == 0 || args.run_bytes == 0) return absl::OkStatus();
  const uint64_t places = reinterpret_cast<uint64_t>(args.from) | reinterpret_cast<uint64_t>(args.to);
  if (args.from == nullptr || args.to == nullptr || places % kVector != 0)
    return InvalidArgument("copy of runs on a GPU: a pointer is null or on no multiple of ", kVector);
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return stream.device().library().Check(stream.device().library()->copy_runs(&args, stream.handle()),
                                         stream.device().name() + ": copy of runs");
}

absl::StatusOr<void*> UcxPeerPointer(CudaDevice& device, void* list, unsigned index) {
  void* pointer = nullptr;
  const int error = device.library()->ucx_peer_pointer(device.index(), list, index, &pointer);
  if (error < 0) return FailedPrecondition(device.name(), ": kernels reach the peer's memory by no plain store");
  DT_RETURN_IF_ERROR(device.library().Check(error, device.name() + ": looking for the peer's memory"));
  return pointer;
}

absl::Status ExchangeStatus(uint64_t word) {
  const ExchangeFailure failure = DecodeFailure(word);
  switch (failure.reason) {
    case ExchangeReason::kNone: return absl::OkStatus();
    case ExchangeReason::kDeadline:
      return absl::UnavailableError(absl::StrCat("attention op ", failure.op, ": nothing came from the other GPU"));
    case ExchangeReason::kGivenUp:
      return absl::UnavailableError(absl::StrCat("attention op ", failure.op, ": the other GPU's worker is lost"));
    case ExchangeReason::kElsewhere:
      return absl::UnavailableError(
          absl::StrCat("attention op ", failure.op, ": another GPU of the step did not answer"));
  }
  return Internal("the exchange between GPUs failed for an unknown reason");
}

}  // namespace dovetail::kernels::cuda
