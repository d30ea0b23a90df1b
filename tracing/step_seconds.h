#pragma once
#include <map>
#include <tuple>
#include <vector>

#include "base/span_sink.h"

namespace dovetail::tracing {

// Makes spans of steps: one for each second, parent and name.
// Threads: thread-compatible; a value; its size is bounded by the parts that come within kSpan, since those of
// before are taken out.
class StepSeconds {
 public:
  static constexpr absl::Duration kSpan = absl::Seconds(1);

  void Add(const StepPart& part);

  // Appends the spans whose second is over at `now`; all of them where `all`. In the order of their beginnings by
  // parent.
  void Take(absl::Time now, bool all, std::vector<Span>& out);

 private:
  struct Sum {
    StepPart first;  // begin and parent count
    absl::Time end;
    int64_t steps = 0, tokens = 0, dense_us = 0, attention_us = 0;
  };
  using Key = std::tuple<uint64_t, uint64_t, uint64_t, std::string>;  // trace, span, name

  static Span SpanOf(const Sum& sum);

  std::map<Key, Sum> sums_;
  std::vector<Span> full_;  // whose second was over when another part came
};

}  // namespace dovetail::tracing
