#include "scheduler/stats_message.h"

#include <algorithm>

#include "proto/prefill_exchange.h"

namespace dovetail::scheduler {

namespace pb = control::v1;

void DescribeScheduler(const SchedulerStats& stats, pb::Stats& out) {
  out.set_running_sequences(stats.running_sequences);
  out.set_waiting_requests(stats.waiting_requests);
  out.set_paused_requests(stats.paused_requests);
  out.set_kv_usage(stats.kv_usage);
  out.set_preemptions(stats.preemptions);
  out.set_prompt_tokens(stats.prompt_tokens);
  out.set_generation_tokens(stats.generation_tokens);
  out.set_prefix_queries(stats.prefix_queries);
  out.set_prefix_hits(stats.prefix_hits);
  out.set_steps(stats.steps);
  out.set_late_events(stats.late_events);
  out.set_damaged(stats.damaged);
  out.set_longest_sequence(static_cast<uint64_t>(stats.longest_sequence));
  out.set_replays_same(stats.replays_same);
  out.set_replays_different(stats.replays_different);
  out.set_replays_unclear(stats.replays_unclear);
  out.set_prefill_groups(stats.prefill_groups);
  out.set_prefill_group_tokens(stats.prefill_group_tokens);
  out.set_shortened_chunks(stats.shortened_chunks);
  out.set_prefix_asked_bytes(stats.prefix_asked_bytes);
  out.set_prefix_gathered_bytes(stats.prefix_gathered_bytes);
  out.set_prefix_state_bytes(stats.prefix_state_bytes);
  out.set_prefix_chain_bytes(stats.prefix_chain_bytes);
  out.set_prefix_direct_bytes(stats.prefix_direct_bytes);
  out.set_prefix_ring_bytes(stats.prefix_ring_bytes);
  out.set_prefix_switch_bytes(stats.prefix_switch_bytes);
  out.set_prefix_pass_q_bytes(stats.prefix_pass_q_bytes);
  out.set_spilled_tokens(stats.spilled_tokens);
  out.set_fetched_tokens(stats.fetched_tokens);
  for (size_t e = 0; e < stats.prefill_times.size(); ++e) {
    const PrefillTimes& times = stats.prefill_times[e];
    if (times.measured_s <= 0) continue;
    auto& said = *out.add_prefill_times();
    said.set_exchange(NameOf(proto::WayAt(e)));
    said.set_predicted_s(times.predicted_s);
    said.set_measured_s(times.measured_s);
    said.set_next_best_s(times.next_best_s);
    said.set_had_other_s(times.had_other_s);
  }
}

void DescribeLoad(const Member& member, pb::WorkerLoad& load) {
  load.set_worker(member.request.name);
  load.set_role(control::NameOf(member.request.role));
  load.set_serving(member.state == MemberState::kServing);
  load.set_steps(member.last.steps);
  load.set_kv_blocks(member.ready.kv_blocks);
  load.set_kv_blocks_in_use(member.last.kv_blocks_in_use);
  const auto& links = member.last.links;
  load.set_certificate_end(member.last.certificate_end);
  load.set_host_links(static_cast<uint32_t>(std::count_if(
      links.begin(), links.end(), [](const control::Link& link) { return link.exchange.rfind("host", 0) == 0; })));
}

}  // namespace dovetail::scheduler
