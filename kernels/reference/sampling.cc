#include "kernels/reference/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace dovetail::kernels::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void Penalise(const SamplingParams& p, std::vector<double>& z) {
  for (const TokenCount& seen : p.seen) {
    double& x = z[seen.token];
    x = x > 0 ? x / p.repetition_penalty : x * p.repetition_penalty;
    x -= double{p.frequency_penalty} * seen.generated + (seen.generated > 0 ? p.presence_penalty : 0.0f);
  }
}

// Keeps the ids, largest first, that min_p, top_k and top_p leave.
void Filter(const SamplingParams& p, const std::vector<double>& z, std::vector<int32_t>& ids) {
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return z[a] > z[b]; });
  const double max = z[ids[0]];
  std::erase_if(
      ids, [&](int32_t id) { return z[id] == -kInfinity || (p.min_p > 0 && z[id] < max + std::log(double{p.min_p})); });
  if (p.top_k > 0 && p.top_k < static_cast<int>(ids.size())) {
    const double kth = z[ids[p.top_k - 1]];
    std::erase_if(ids, [&](int32_t id) { return z[id] < kth; });
  }
  if (p.top_p >= 1) return;
  double mass = 0, before = 0;
  for (const int32_t id : ids) mass += std::exp(z[id] - max);
  size_t keep = 0;
  while (keep < ids.size() && before < p.top_p * mass) before += std::exp(z[ids[keep++]] - max);
  ids.resize(std::max<size_t>(keep, 1));
}

}  // namespace

Distribution Process(std::span<const float> logits, const SamplingParams& p) {
  Distribution d;
  d.z.assign(logits.begin(), logits.end());
  if (!p.allowed.empty()) {
    std::fill(d.z.begin(), d.z.end(), -kInfinity);
    for (const int32_t id : p.allowed) d.z[id] = logits[id];
  }
  for (const int32_t id : p.banned) d.z[id] = -kInfinity;
  for (const TokenBias& bias : p.logit_bias) d.z[bias.token] += bias.bias;
  Penalise(p, d.z);
  if (!p.greedy()) {
    for (double& x : d.z) x /= p.temperature;
  }
  d.kept.resize(logits.size());
  std::iota(d.kept.begin(), d.kept.end(), 0);
  if (!p.greedy()) Filter(p, d.z, d.kept);
  std::sort(d.kept.begin(), d.kept.end());
  return d;
}

int32_t Sample(std::span<const float> logits, const SamplingParams& p, int64_t position) {
  const Distribution d = Process(logits, p);
  int32_t best = -1;
  double best_score = 0;
  for (const int32_t id : d.kept) {
    const double score = d.z[id] + (p.greedy() ? 0.0 : GumbelNoise(p.seed, position, id));
    if (best < 0 || score > best_score) {
      best = id;
      best_score = score;
    }
  }
  return best;
}

std::vector<double> Logprobs(std::span<const float> logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - max);
  std::vector<double> out;
  for (const float x : logits) out.push_back(x - max - std::log(sum));
  return out;
}

}  // namespace dovetail::kernels::reference
