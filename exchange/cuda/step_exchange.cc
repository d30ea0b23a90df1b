#include "exchange/cuda/step_exchange.h"

#include <algorithm>

namespace dovetail::exchange {

void FillFan(StepPeers peers, MicroBatchId id, std::span<const int> part_rows, kernels::cuda::ExchangeFan& fan) {
  fan = {};
  fan.count = static_cast<int32_t>(peers.size());
  for (size_t p = 0; p < peers.size(); ++p) {
    std::byte* const slot = peers[p]->peer_slot(id);
    fan.peers[p] = {peers[p]->End(id), slot, slot + peers[p]->key_value_at(), peers[p]->own_slot(id), part_rows[p]};
  }
}

absl::Status StatusOf(StepPeers peers, MicroBatchId id, StepId step) {
  absl::Status status;
  for (const GpuExchange* peer : peers) {
    if (!peer->Fetched(id, step)) continue;
    const bool by_it = peer->FailedByPeer(id);
    if (status.ok() || by_it) status = peer->Status(id);
    if (by_it) break;
  }
  return status;
}

int Unanswered(StepPeers peers, MicroBatchId id, StepId step) {
  const auto by_it = [&](const GpuExchange* peer) { return peer->Fetched(id, step) && peer->FailedByPeer(id); };
  const auto late = [&](const GpuExchange* peer) { return by_it(peer) && peer->MissedDeadline(id); };
  auto it = std::find_if(peers.begin(), peers.end(), late);  // a peer that gave up may have done so for its sake
  if (it == peers.end()) it = std::find_if(peers.begin(), peers.end(), by_it);
  return it == peers.end() ? -1 : static_cast<int>(it - peers.begin());
}

// Kernels that wait for several peers, or for a turn, add all of it to the first's.
GpuExchange::Times TimesOf(StepPeers peers, MicroBatchId id) {
  GpuExchange::Times times{};
  for (const GpuExchange* peer : peers) {
    const GpuExchange::Times one = peer->TimesOf(id);
    times = {std::max(times.waited, one.waited), std::max(times.turn, one.turn),
             std::max(times.peer_busy, one.peer_busy)};
  }
  return times;
}

}  // namespace dovetail::exchange
