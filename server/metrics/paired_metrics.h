#pragma once
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace dovetail::server {

// Metrics under a native name and, if there is one, under vLLM's. Writing to a pair writes to both. The registry
// outlives them and owns the metrics.
// Threads: writing is thread-safe; making pairs is thread-compatible.

template <typename Metric>
struct Paired {
  Metric* native = nullptr;
  Metric* alias = nullptr;
};

struct CounterPair : Paired<prometheus::Counter> {
  void Add(double amount) const {
    if (!(amount > 0)) return;  // a counter never falls
    native->Increment(amount);
    if (alias != nullptr) alias->Increment(amount);
  }
};
struct GaugePair : Paired<prometheus::Gauge> {
  void Set(double value) const {
    native->Set(value);
    if (alias != nullptr) alias->Set(value);
  }
};
struct HistogramPair : Paired<prometheus::Histogram> {
  void Observe(double value) const {
    native->Observe(value);
    if (alias != nullptr) alias->Observe(value);
  }
};

// Makes pairs. `name` goes behind "dovetail:", `alias` behind "vllm:" (empty: none).
class PairMaker {
 public:
  using Labels = std::map<std::string, std::string>;
  PairMaker(prometheus::Registry& registry, Labels labels) : registry_(registry), labels_(std::move(labels)) {}

  CounterPair Counter(const std::string& name, const std::string& alias, const std::string& help,
                      const Labels& extra = {});
  GaugePair Gauge(const std::string& name, const std::string& alias, const std::string& help, const Labels& extra = {});
  HistogramPair Histogram(const std::string& name, const std::string& alias, const std::string& help,
                          const std::vector<double>& buckets);

 private:
  Labels With(const Labels& extra, bool alias) const;

  prometheus::Registry& registry_;
  const Labels labels_;
};

}  // namespace dovetail::server
