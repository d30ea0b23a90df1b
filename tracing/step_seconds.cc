#include "tracing/step_seconds.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace dovetail::tracing {

void StepSeconds::Add(const StepPart& part) {
  const Key key{part.parent.trace_high, part.parent.trace_low, part.parent.span, part.name};
  const auto [at, is_new] = sums_.try_emplace(key);
  Sum& sum = at->second;
  if (!is_new && part.begin >= sum.first.begin + kSpan) full_.push_back(SpanOf(std::exchange(sum, Sum{})));
  if (sum.steps == 0) {
    sum.first = part;
    sum.end = part.end;
  }
  sum.end = std::max(sum.end, part.end);
  ++sum.steps;
  sum.tokens += part.tokens;
  sum.dense_us += part.dense_us;
  sum.attention_us += part.attention_us;
}

Span StepSeconds::SpanOf(const Sum& sum) {
  Span span;
  span.parent = sum.first.parent;
  span.name = sum.first.name;
  span.begin = sum.first.begin;
  span.end = sum.end;
  span.attributes = {{"dovetail.steps", sum.steps}, {"dovetail.tokens", sum.tokens}};
  if (sum.dense_us > 0) span.attributes.push_back({"dovetail.dense_us", sum.dense_us});
  if (sum.attention_us > 0) span.attributes.push_back({"dovetail.attention_us", sum.attention_us});
  return span;
}

void StepSeconds::Take(absl::Time now, bool all, std::vector<Span>& out) {
  std::move(full_.begin(), full_.end(), std::back_inserter(out));
  full_.clear();
  for (auto it = sums_.begin(); it != sums_.end();) {
    if (!all && now < it->second.first.begin + kSpan) {
      ++it;
      continue;
    }
    out.push_back(SpanOf(it->second));
    it = sums_.erase(it);
  }
}

}  // namespace dovetail::tracing
