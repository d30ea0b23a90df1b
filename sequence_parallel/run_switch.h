#pragma once
#include "absl/functional/function_ref.h"
#include "sequence_parallel/switch_exchange.h"
#include "transport/waiter.h"

namespace dovetail::sequence_parallel {

// Does one switch and returns when it is done, or with what ended the group: for a thread that has nothing else to do
// meanwhile. `look_at_peers` tells the exchange of lost peers (PeerLost); it is called while nothing comes, at least
// every 10 ms. Frames of other kinds that reach the port meanwhile are dropped and counted.
// Errors: those of Begin and Progress.
// Threads: the thread that owns port and exchange; blocks.
absl::Status RunSwitch(SwitchExchange& exchange, transport::Port& port, transport::Waiter& waiter,
                       absl::FunctionRef<void(SwitchExchange&)> look_at_peers, SwitchId id, const proto::Switch& plan,
                       transport::LentBytes source, std::span<std::byte> destination);

}  // namespace dovetail::sequence_parallel
