#include "sequence_parallel/run_switch.h"

#include <utility>

namespace dovetail::sequence_parallel {
namespace {

constexpr int kFramesATurn = 64;
constexpr absl::Duration kLongestSleep = absl::Milliseconds(10);

}  // namespace

absl::Status RunSwitch(SwitchExchange& exchange, transport::Port& port, transport::Waiter& waiter,
                       absl::FunctionRef<void(SwitchExchange&)> look_at_peers, SwitchId id, const proto::Switch& plan,
                       transport::LentBytes source, std::span<std::byte> destination) {
  DT_RETURN_IF_ERROR(exchange.Begin(id, plan, std::move(source), destination));
  while (!exchange.done()) {
    const int frames = port.Poll(exchange, kFramesATurn);
    DT_RETURN_IF_ERROR(exchange.Progress());
    if (frames > 0 || exchange.done()) continue;
    look_at_peers(exchange);
    DT_RETURN_IF_ERROR(exchange.status());
    waiter.Wait(kLongestSleep);
  }
  return absl::OkStatus();
}

}  // namespace dovetail::sequence_parallel
