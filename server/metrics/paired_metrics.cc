#include "server/metrics/paired_metrics.h"

namespace dovetail::server {

PairMaker::Labels PairMaker::With(const Labels& extra, bool alias) const {
  Labels labels = labels_;
  if (alias) labels["engine"] = "0";
  labels.insert(extra.begin(), extra.end());
  return labels;
}

CounterPair PairMaker::Counter(const std::string& name, const std::string& alias, const std::string& help,
                               const Labels& extra) {
  CounterPair pair;
  pair.native =
      &prometheus::BuildCounter().Name("dovetail:" + name).Help(help).Register(registry_).Add(With(extra, false));
  if (!alias.empty())
    pair.alias =
        &prometheus::BuildCounter().Name("vllm:" + alias).Help(help).Register(registry_).Add(With(extra, true));
  return pair;
}

GaugePair PairMaker::Gauge(const std::string& name, const std::string& alias, const std::string& help,
                           const Labels& extra) {
  GaugePair pair;
  pair.native =
      &prometheus::BuildGauge().Name("dovetail:" + name).Help(help).Register(registry_).Add(With(extra, false));
  if (!alias.empty())
    pair.alias = &prometheus::BuildGauge().Name("vllm:" + alias).Help(help).Register(registry_).Add(With(extra, true));
  return pair;
}

HistogramPair PairMaker::Histogram(const std::string& name, const std::string& alias, const std::string& help,
                                   const std::vector<double>& buckets) {
  HistogramPair pair;
  pair.native = &prometheus::BuildHistogram()
                     .Name("dovetail:" + name)
                     .Help(help)
                     .Register(registry_)
                     .Add(With({}, false), buckets);
  if (!alias.empty())
    pair.alias =
        &prometheus::BuildHistogram().Name("vllm:" + alias).Help(help).Register(registry_).Add(With({}, true), buckets);
  return pair;
}

}  // namespace dovetail::server
