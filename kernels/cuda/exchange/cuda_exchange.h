#pragma once
#include "kernels/cuda/exchange/copy_runs_args.h"
#include "kernels/cuda/exchange/exchange_args.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// The kernels of exchange_args.h. All check, enqueue one kernel and return.
// Errors: kInvalidArgument for null pointers, ops beyond kExchangeOps and odd sizes, before anything runs.
// Threads: thread-safe on different streams.
// Memory: allocate nothing.
absl::Status ExchangeAwait(CudaStream& stream, const ExchangeAwaitLaunch& args);
absl::Status ExchangeGiveTurn(CudaStream& stream, const ExchangeGiveTurnLaunch& args);
absl::Status ExchangeSignal(CudaStream& stream, const ExchangeSignalLaunch& args);
absl::Status ExchangePush(CudaStream& stream, const ExchangePushLaunch& args);
absl::Status ExchangeAwaitAll(CudaStream& stream, const ExchangeAwaitAllLaunch& args);
absl::Status ExchangeGather(CudaStream& stream, const ExchangeGatherLaunch& args);
absl::Status ExchangeCopies(CudaStream& stream, const ExchangeCopiesLaunch& args);
absl::Status ExchangeJoins(CudaStream& stream, const ExchangeJoinsLaunch& args);
// How many thread blocks a copy of so many bytes should have.
int ExchangeSplits(int64_t bytes);

// Copies between what the stream's device reaches; the sides do not overlap. kInvalidArgument, before anything runs: a
// null pointer, a number that is negative or no multiple of 16, 2^35 bytes or more.
// Threads: thread-safe on different streams.
// Memory: allocates nothing.
absl::Status CopyRuns(CudaStream& stream, const CopyRunsLaunch& args);

// For transport/ucx/device_link.h: where kernels on `device` reach element `index` of a remote memory list. Blocks.
// kFailedPrecondition: by no plain store.
// Threads: thread-safe.
absl::StatusOr<void*> UcxPeerPointer(CudaDevice& device, void* list, unsigned index);

// OK, or kUnavailable: a step's exchange failed, at which op and why. `word`: ExchangeWords::failure.
absl::Status ExchangeStatus(uint64_t word);

}  // namespace dovetail::kernels::cuda
