#include "examples/spatio_temporal/rank_link.h"

#include "sequence_parallel/run_switch.h"

namespace dovetail::spatio_temporal {

absl::Status RankLink::Run(StepId step, const proto::Switch& plan, transport::LentBytes source,
                           std::span<std::byte> destination) {
  if (step != next_.step) next_ = {step, 0};
  const absl::Time begun = SystemClock().Now();
  const absl::Status done = sequence_parallel::RunSwitch(exchange_, port_, waiter_, look_at_peers_, next_, plan,
                                                         std::move(source), destination);
  in_exchange_ += SystemClock().Now() - begun;
  ++next_.index;
  return done;
}

}  // namespace dovetail::spatio_temporal
