#include "server/metrics/tenant_metrics.h"

namespace dovetail::server {

const TenantMetrics::Series& TenantMetrics::SeriesOf(const std::string& tenant) {
  const bool room = series_.size() < kMostTenants - 1 || series_.contains(tenant);
  const std::string name = room ? tenant : "others";
  const auto [found, is_new] = series_.try_emplace(name);
  if (is_new) {
    const PairMaker::Labels label = {{"tenant", name}};
    found->second = {
        make_.Counter("tenant_requests_total", "", "Requests that ended, by tenant.", label),
        make_.Counter("tenant_prompt_tokens_total", "", "Prompt tokens of ended requests, by tenant.", label),
        make_.Counter("tenant_generation_tokens_total", "", "Tokens generated for ended requests, by tenant.", label)};
  }
  return found->second;
}

void TenantMetrics::Finished(const RequestRecord& record) {
  MutexLock lock(mutex_);
  const Series& series = SeriesOf(record.tenant);
  series.requests.Add(1);
  series.prompt_tokens.Add(static_cast<double>(record.prompt_tokens));
  series.generation_tokens.Add(static_cast<double>(record.generation_tokens));
}

}  // namespace dovetail::server
