#pragma once
#include <span>

#include "exchange/cuda/gpu_exchange.h"

namespace dovetail::exchange {

// The exchanges of one step of a micro-batch with all attention workers whose GPUs hold its sequences, in the order of
// the step's parts (compute_worker/row_spread.h); at most kernels::cuda::kMostExchangePeers. If one peer fails to
// answer, kernels end the step with all of them.
// Threads: reactor-owned, as are the functions below.
using StepPeers = std::span<GpuExchange* const>;

// What kernels are to know of them: part p has part_rows[p] rows.
void FillFan(StepPeers peers, MicroBatchId id, std::span<const int> part_rows, kernels::cuda::ExchangeFan& fan);

// Once GpuExchange::FetchStatus of all of them has run; where it has not, because the device failed, what is known of
// an earlier step does not count. kUnavailable: the step failed.
absl::Status StatusOf(StepPeers peers, MicroBatchId id, StepId step);
// Then also: the peer that this step failed by, as far as that is known; -1: none, or another step was fetched last.
int Unanswered(StepPeers peers, MicroBatchId id, StepId step);
// How long kernels waited for the last of the peers and for their turn, and how long the busiest was busy.
GpuExchange::Times TimesOf(StepPeers peers, MicroBatchId id);

}  // namespace dovetail::exchange
