#include "server/metrics/throughput_log.h"

#include <algorithm>
#include <cmath>

#include "base/log.h"

namespace dovetail::server {
namespace {

// The scheduler may be another one by now, which counts from 0.
double Grown(uint64_t now, uint64_t before) { return static_cast<double>(now - std::min(before, now)); }

double Rounded(double value) { return std::round(value * 10) / 10; }

}  // namespace

void ThroughputLog::Look(const scheduler::SchedulerStats& stats, absl::Time now) {
  MutexLock lock(mutex_);
  if (!began_) {
    began_ = true;
    last_time_ = now;
    last_ = stats;
    return;
  }
  if (now - last_time_ < kEvery) return;
  const double seconds = absl::ToDoubleSeconds(now - last_time_);
  const double prompt = Grown(stats.prompt_tokens, last_.prompt_tokens);
  const double output = Grown(stats.generation_tokens, last_.generation_tokens);
  const double asked = Grown(stats.prefix_queries, last_.prefix_queries);
  const double found = Grown(stats.prefix_hits, last_.prefix_hits);
  last_time_ = now;
  last_ = stats;
  if (prompt + output == 0 && stats.running_sequences + stats.waiting_requests == 0) return;
  LogFields fields = {{"prompt_tokens_per_s", Rounded(prompt / seconds)},
                      {"output_tokens_per_s", Rounded(output / seconds)},
                      {"running", int64_t{stats.running_sequences}},
                      {"waiting", int64_t{stats.waiting_requests}},
                      {"kv_used_percent", Rounded(stats.kv_usage * 100)}};
  if (asked > 0) fields.push_back({"prefix_hit_percent", Rounded(found / asked * 100)});
  LogLine(LogLevel::kInfo, "throughput", std::move(fields));
}

}  // namespace dovetail::server
