#pragma once
#include "kernels/cuda/exchange/copy_runs_args.h"
#include "kernels/cuda/exchange/exchange_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t.
// Threads: any host thread, one at a time per stream.
int LaunchExchangeAwait(const ExchangeAwaitLaunch* launch, void* stream);
int LaunchExchangeGiveTurn(const ExchangeGiveTurnLaunch* launch, void* stream);
int LaunchExchangeSignal(const ExchangeSignalLaunch* launch, void* stream);
int LaunchExchangePush(const ExchangePushLaunch* launch, void* stream);
int LaunchExchangeAwaitAll(const ExchangeAwaitAllLaunch* launch, void* stream);
int LaunchExchangeGather(const ExchangeGatherLaunch* launch, void* stream);
int LaunchExchangeCopies(const ExchangeCopiesLaunch* launch, void* stream);
int LaunchCopyRuns(const CopyRunsLaunch* launch, void* stream);
int LaunchExchangeJoins(const ExchangeJoinsLaunch* launch, void* stream);

// Where this device sees element `index` of a remote memory list of UCX's device API (transport/ucx/device_link.h).
// Blocks. -1: memory that no plain store reaches, or a library built without UCX's device API.
// Threads: thread-safe; blocks.
int UcxPeerPointer(int device, void* list, unsigned index, void** pointer);

}  // namespace dovetail::kernels::cuda
