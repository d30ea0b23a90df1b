#include "server/metrics/worker_metrics.h"

#include <algorithm>

namespace dovetail::server {
namespace {

prometheus::Family<prometheus::Gauge>& MakeFamily(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(std::string("dovetail:") + name).Help(help).Register(registry);
}

}  // namespace

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry)
    : serving_(MakeFamily(registry, "workers_serving", "Workers that serve, by role.")),
      steps_(MakeFamily(registry, "worker_steps", "Steps that a worker took part in since it joined.")),
      blocks_(MakeFamily(registry, "worker_kv_blocks", "KV blocks of an attention worker.")),
      blocks_in_use_(MakeFamily(registry, "worker_kv_blocks_in_use", "KV blocks of live sequences on it.")),
      host_links_(MakeFamily(registry, "worker_host_links",
                             "Links of a compute worker with a GPU over which layers cross through the hosts.")),
      certificates_(MakeFamily(registry, "certificate_expiration_timestamp_seconds",
                               "When a certificate ends, in seconds since 1970: of a role on the control plane, and of "
                               "the HTTPS port (role https).")) {}

void WorkerMetrics::UpdateCertificate(const char* role, int64_t end) {
  if (end != 0) certificates_.Add({{"role", role}, {"worker", ""}}).Set(static_cast<double>(end));
}

void WorkerMetrics::Set(Series& series, Family& family, const engine::WorkerLoad& worker, double value) {
  prometheus::Gauge*& gauge = series.gauges[&family];
  if (gauge == nullptr) gauge = &family.Add({{"role", worker.role}, {"worker", worker.worker}});
  gauge->Set(value);
}

void WorkerMetrics::Update(const std::vector<engine::WorkerLoad>& workers) {
  any_ = any_ || !workers.empty();
  if (!any_) return;
  for (const char* role : {"attention", "compute"}) {
    const auto serves = [&](const engine::WorkerLoad& worker) { return worker.serving && worker.role == role; };
    const auto count = std::count_if(workers.begin(), workers.end(), serves);
    serving_.Add({{"role", role}}).Set(static_cast<double>(count));
  }
  for (auto& [key, series] : series_) series.here = false;
  for (const engine::WorkerLoad& worker : workers) {
    Series& series = series_[{worker.worker, worker.role}];
    series.here = true;
    Set(series, steps_, worker, static_cast<double>(worker.steps));
    Set(series, host_links_, worker, worker.host_links);
    if (worker.certificate_end != 0) Set(series, certificates_, worker, static_cast<double>(worker.certificate_end));
    if (worker.role != "attention") continue;
    Set(series, blocks_, worker, static_cast<double>(worker.kv_blocks));
    Set(series, blocks_in_use_, worker, static_cast<double>(worker.kv_blocks_in_use));
  }
  for (auto it = series_.begin(); it != series_.end();) {
    if (it->second.here) {
      ++it;
      continue;
    }
    for (const auto& [family, gauge] : it->second.gauges) family->Remove(gauge);
    it = series_.erase(it);
  }
}

}  // namespace dovetail::server
