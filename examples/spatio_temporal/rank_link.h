#pragma once
#include <functional>
#include <utility>

#include "absl/time/time.h"
#include "base/status.h"
#include "sequence_parallel/switch_exchange.h"
#include "transport/waiter.h"

namespace dovetail::spatio_temporal {

// A rank's way to the others: does switches and measures them.
// Threads: the rank's thread only.
class RankLink {
 public:
  using LookAtPeers = std::function<void(sequence_parallel::SwitchExchange&)>;

  // All outlive it. `look_at_peers` tells the exchange of lost ones.
  RankLink(sequence_parallel::SwitchExchange& exchange, transport::Port& port, transport::Waiter& waiter,
           LookAtPeers look_at_peers)
      : exchange_(exchange), port_(port), waiter_(waiter), look_at_peers_(std::move(look_at_peers)) {}

  // The next switch of `step`. Blocks until it is done; errors of sequence_parallel::RunSwitch.
  absl::Status Run(StepId step, const proto::Switch& plan, transport::LentBytes source,
                   std::span<std::byte> destination);

  int rank() const { return exchange_.rank(); }
  int64_t bytes_sent() const { return exchange_.counters().bytes_sent; }
  absl::Duration in_exchange() const { return in_exchange_; }  // waiting for slower ranks included

 private:
  sequence_parallel::SwitchExchange& exchange_;
  transport::Port& port_;
  transport::Waiter& waiter_;
  const LookAtPeers look_at_peers_;
  sequence_parallel::SwitchId next_;
  absl::Duration in_exchange_;
};

}  // namespace dovetail::spatio_temporal
