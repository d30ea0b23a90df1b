#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace dovetail::kernels {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kMaxVocab = int64_t{1} << 24;

size_t RoundUp(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The pieces of the scratch. `scores` and `ids` are never needed together with each other's content
// across a step.
struct Workspace {
  float* z = nullptr;           // [vocab] processed logits
  float* scores = nullptr;      // [vocab]
  int32_t* ids = nullptr;       // [vocab] candidates
  float* chunk_max = nullptr;   // [vocab / 64 + 1]
  TokenLogprob* top = nullptr;  // [kMaxLogprobs]
};

absl::StatusOr<Workspace> LayOut(int64_t vocab, std::span<std::byte> scratch) {
  if (scratch.size() < SamplingScratchBytes(vocab)) {
    return ResourceExhausted("sampling: a scratch of ", scratch.size(), " bytes is too small for ", vocab,
                             " ids; it takes SamplingScratchBytes: ", SamplingScratchBytes(vocab));
  }
  Workspace work;
  std::byte* next = scratch.data();
  const auto take = [&](size_t bytes) {
    std::byte* p = next;
    next += RoundUp(bytes);
    return p;
  };
  work.z = reinterpret_cast<float*>(take(vocab * sizeof(float)));
  work.scores = reinterpret_cast<float*>(take(vocab * sizeof(float)));
  work.ids = reinterpret_cast<int32_t*>(take(vocab * sizeof(int32_t)));
  work.chunk_max = reinterpret_cast<float*>(take((vocab / 64 + 1) * sizeof(float)));
  work.top = reinterpret_cast<TokenLogprob*>(take(kMaxLogprobs * sizeof(TokenLogprob)));
  return work;
}

absl::Status CheckIds(const char* field, int32_t token, int64_t vocab) {
  if (token >= 0 && token < vocab) return absl::OkStatus();
  return InvalidArgument(field, ": token id ", token, " is outside 0..", vocab - 1);
}

absl::Status CheckParams(const SamplingParams& p, int64_t vocab) {
  if (!(p.temperature >= 0 && p.temperature <= 100))
    return InvalidArgument("temperature: ", p.temperature, " is outside 0..100");
  if (!(p.top_p > 0 && p.top_p <= 1)) return InvalidArgument("top_p: ", p.top_p, " is outside (0, 1]");
  if (!(p.min_p >= 0 && p.min_p <= 1)) return InvalidArgument("min_p: ", p.min_p, " is outside [0, 1]");
  if (!(p.repetition_penalty > 0) || std::isinf(p.repetition_penalty)) {
    return InvalidArgument("repetition_penalty: ", p.repetition_penalty, " must be a positive number");
  }
  if (!std::isfinite(p.presence_penalty))
    return InvalidArgument("presence_penalty: ", p.presence_penalty, " is not finite");
  if (!std::isfinite(p.frequency_penalty))
    return InvalidArgument("frequency_penalty: ", p.frequency_penalty, " is not finite");
  if (p.logprobs < -1 || p.logprobs > kMaxLogprobs) {
    return InvalidArgument("logprobs: ", p.logprobs, " is outside -1..", kMaxLogprobs);
  }
  for (const TokenBias& bias : p.logit_bias) {
    DT_RETURN_IF_ERROR(CheckIds("logit_bias", bias.token, vocab));
    if (std::isnan(bias.bias) || bias.bias == -kNegativeInfinity) {
      return InvalidArgument("logit_bias: ", bias.bias, " for token id ", bias.token, " is not a finite number");
    }
  }
  for (const int32_t token : p.allowed) DT_RETURN_IF_ERROR(CheckIds("allowed_token_ids", token, vocab));
  for (const int32_t token : p.banned) DT_RETURN_IF_ERROR(CheckIds("banned token ids", token, vocab));
  for (const TokenCount& seen : p.seen) DT_RETURN_IF_ERROR(CheckIds("penalties", seen.token, vocab));
  return absl::OkStatus();
}

absl::StatusOr<LogitStats> CheckedStats(const OpsTable& table, std::span<const float> logits) {
  if (logits.empty() || static_cast<int64_t>(logits.size()) > kMaxVocab) {
    return InvalidArgument("sampling: a row of ", logits.size(), " logits; 1..", kMaxVocab, " are supported");
  }
  const LogitStats stats = table.logit_stats(logits.data(), static_cast<int64_t>(logits.size()));
  if (stats.has_nan)
    return Internal(
        "sampling: a logit is not a number; the model's arithmetic overflowed or its weights are "
        "damaged");
  if (stats.max == -kNegativeInfinity)
    return Internal("sampling: a logit is infinite; the model's arithmetic overflowed");
  return stats;
}

bool HasPenalties(const SamplingParams& p) {
  return !p.seen.empty() && (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0);
}

bool ChangesLogits(const SamplingParams& p) {
  return !p.allowed.empty() || !p.banned.empty() || !p.logit_bias.empty() || HasPenalties(p);
}

// Steps 2 and 3, on z, a copy of the logits.
void ApplyBiasAndPenalties(const SamplingParams& p, std::span<const float> logits, float* z) {
  if (!p.allowed.empty()) {
    std::fill_n(z, logits.size(), kNegativeInfinity);
    for (const int32_t token : p.allowed) z[token] = logits[token];
  }
  for (const int32_t token : p.banned) z[token] = kNegativeInfinity;
  for (const TokenBias& bias : p.logit_bias) z[bias.token] += bias.bias;
  if (!HasPenalties(p)) return;
  for (const TokenCount& seen : p.seen) {
    float& x = z[seen.token];
    x = x > 0 ? x / p.repetition_penalty : x * p.repetition_penalty;
    if (seen.generated > 0) {
      x -= p.frequency_penalty * static_cast<float>(seen.generated);
      x -= p.presence_penalty;
    }
  }
}

// Larger first, then the lower id: a strict total order on ids.
struct ByValue {
  const float* z;
  bool operator()(int32_t a, int32_t b) const { return z[a] != z[b] ? z[a] > z[b] : a < b; }
};

// Collects into `ids` a superset of the k largest of z (all of which are >= some threshold), and
// returns its size. The k-th largest of the maxima of chunks of 64 is a lower bound of the k-th
// largest value, and rarely a bad one.
int64_t CollectTop(const OpsTable& table, const Workspace& work, const float* z, int64_t n, int64_t k) {
  const int64_t chunks = (n + 63) / 64;
  float threshold = kNegativeInfinity;
  if (k <= chunks) {
    table.chunk_max(z, n, work.chunk_max);
    std::nth_element(work.chunk_max, work.chunk_max + (k - 1), work.chunk_max + chunks, std::greater<float>());
    threshold = work.chunk_max[k - 1];
  }
  return table.collect_at_least(z, threshold, n, work.ids, n);
}

double LogSumExp(const OpsTable& table, std::span<const float> logits, float max) {
  return max + std::log(table.sum_exp(logits.data(), max, static_cast<int64_t>(logits.size())));
}

void FillLogprobs(const OpsTable& table, std::span<const float> logits, float max, int32_t token, int count,
                  const Workspace& work, SampleResult& result) {
  const auto n = static_cast<int64_t>(logits.size());
  const double normaliser = LogSumExp(table, logits, max);
  const auto entry = [&](int32_t id) {
    return TokenLogprob{.token = id, .logprob = static_cast<float>(logits[id] - normaliser), .rank = 0};
  };
  result.chosen = entry(token);
  result.chosen.rank = static_cast<int32_t>(table.count_at_least(logits.data(), logits[token], n));
  count = static_cast<int>(std::min<int64_t>(count, n));
  if (count <= 0) return;
  const int64_t candidates = CollectTop(table, work, logits.data(), n, count);
  std::partial_sort(work.ids, work.ids + count, work.ids + candidates, ByValue{logits.data()});
  for (int i = 0; i < count; ++i) {
    work.top[i] = entry(work.ids[i]);
    work.top[i].rank = i + 1;
  }
  result.top = {work.top, static_cast<size_t>(count)};
}

// Keeps, at the front of ids[0, n), the smallest set of largest z whose mass reaches `target`.
// Halves the range that holds the boundary until it is one id: linear in n on average.
int64_t KeepTopMass(const float* z, int32_t* ids, int64_t n, double target) {
  int64_t low = 0, high = n;  // the first `low` are kept, those from `high` on are not needed
  double kept = 0;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(ids + low, ids + middle, ids + high, ByValue{z});
    double mass = 0;
    for (int64_t i = low; i < middle; ++i) mass += std::exp(double{z[ids[i]]});
    if (kept + mass >= target) {
      high = middle;
    } else {
      kept += mass;
      low = middle;
    }
  }
  return std::max<int64_t>(high, 1);
}

// top_p over the whole row: bisects the threshold between too little and enough mass with vector
// passes, then decides inside the band that is left one by one. z <= 0, its largest is 0.
int64_t FilterByMass(const OpsTable& table, const SamplingParams& p, const Workspace& work, int64_t n) {
  constexpr float kDepth = 32;  // nothing deeper counts in f32
  constexpr int kHalvings = 14;
  table.exp(work.z, work.scores, n);
  const double target = p.top_p * table.mass_at_least(work.z, work.scores, std::numeric_limits<float>::lowest(), n);
  float enough = -kDepth, too_little = 1.0f;  // thresholds
  double mass_above = 0;
  if (table.mass_at_least(work.z, work.scores, enough, n) < target) enough = std::numeric_limits<float>::lowest();
  for (int i = 0; i < kHalvings && enough >= -kDepth; ++i) {
    const float middle = enough + (too_little - enough) / 2;
    const double mass = table.mass_at_least(work.z, work.scores, middle, n);
    if (mass >= target) {
      enough = middle;
    } else {
      too_little = middle;
      mass_above = mass;
    }
  }
  const int64_t count = table.collect_at_least(work.z, enough, n, work.ids, n);
  const float* z = work.z;
  const int64_t sure =
      std::partition(work.ids, work.ids + count, [&](int32_t id) { return z[id] >= too_little; }) - work.ids;
  if (sure == count) return count;
  return sure + KeepTopMass(z, work.ids + sure, count - sure, target - mass_above);
}

// Step 5. Leaves the kept ids in work.ids and returns their number, or -1 if no filter drops
// anything.
int64_t Filter(const OpsTable& table, const SamplingParams& p, const Workspace& work, int64_t n) {
  const float* z = work.z;
  const bool by_k = p.top_k > 0 && p.top_k < n;
  if (!by_k && p.min_p <= 0 && p.top_p >= 1) return -1;
  const float floor =
      p.min_p > 0 ? static_cast<float>(std::log(double{p.min_p})) : std::numeric_limits<float>::lowest();
  int64_t count = 0;
  if (by_k) {
    count = CollectTop(table, work, z, n, p.top_k);
    if (count > p.top_k) {
      std::nth_element(work.ids, work.ids + (p.top_k - 1), work.ids + count, ByValue{z});
      const float kth = z[work.ids[p.top_k - 1]];
      count = std::partition(work.ids + p.top_k, work.ids + count, [&](int32_t id) { return z[id] == kth; }) - work.ids;
    }
    count = std::partition(work.ids, work.ids + count, [&](int32_t id) { return z[id] >= floor; }) - work.ids;
  } else if (p.min_p > 0) {
    count = table.collect_at_least(z, floor, n, work.ids, n);
  }
  if (p.top_p >= 1) return count;
  if (count > 0) {
    double mass = 0;
    for (int64_t i = 0; i < count; ++i) mass += std::exp(double{z[work.ids[i]]});
    return KeepTopMass(z, work.ids, count, p.top_p * mass);
  }
  return FilterByMass(table, p, work, n);
}

uint32_t PhiloxWord(uint64_t seed, uint64_t position, int32_t token) {
  uint32_t c[4] = {static_cast<uint32_t>(token / 64 * 16 + token % 16), 0, static_cast<uint32_t>(position),
                   static_cast<uint32_t>(position >> 32)};
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c[0], b = uint64_t{0xcd9e8d57u} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
    std::memcpy(c, next, sizeof(c));
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c[token / 16 % 4];
}

int32_t ArgmaxWithNoise(const float* z, const int32_t* ids, int64_t count, uint64_t seed, int64_t position) {
  int32_t best = -1;
  double best_score = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double score = z[ids[i]] + GumbelNoise(seed, position, ids[i]);
    if (best < 0 || score > best_score || (score == best_score && ids[i] < best)) {
      best = ids[i];
      best_score = score;
    }
  }
  return best;
}

// Step 6. Over the whole row the vector pass finds the few ids that can win, and double precision
// decides between them.
int32_t Draw(const OpsTable& table, const SamplingParams& p, const Workspace& work, int64_t n, int64_t kept,
             int64_t position) {
  if (kept > n / 64) {  // so many that the vector pass over the row is cheaper than one by one
    std::fill_n(work.scores, n, kNegativeInfinity);
    for (int64_t i = 0; i < kept; ++i) work.scores[work.ids[i]] = work.z[work.ids[i]];
  }
  if (kept < 0 || kept > n / 64) {
    const float* z = kept < 0 ? work.z : work.scores;
    const float top = table.gumbel_scores(z, n, p.seed, static_cast<uint64_t>(position), work.scores);
    const float margin = 1e-4f + 1e-6f * std::abs(top);
    kept = table.collect_at_least(work.scores, top - margin, n, work.ids, n);
  }
  return ArgmaxWithNoise(work.z, work.ids, kept, p.seed, position);
}

}  // namespace

size_t SamplingScratchBytes(int64_t vocab) {
  return 3 * RoundUp(vocab * sizeof(float)) + RoundUp((vocab / 64 + 1) * sizeof(float)) +
         RoundUp(kMaxLogprobs * sizeof(TokenLogprob));
}

double GumbelNoise(uint64_t seed, int64_t position, int32_t token) {
  const double v = (PhiloxWord(seed, static_cast<uint64_t>(position), token) + 0.5) * 0x1p-32;
  return -std::log(-std::log1p(-v));
}

absl::StatusOr<SampleResult> SampleRow(const OpsTable& table, std::span<const float> logits,
                                       const SamplingParams& params, int64_t position, std::span<std::byte> scratch) {
  DT_ASSIGN_OR_RETURN(LogitStats stats, CheckedStats(table, logits));
  const auto n = static_cast<int64_t>(logits.size());
  DT_RETURN_IF_ERROR(CheckParams(params, n));
  DT_ASSIGN_OR_RETURN(const Workspace work, LayOut(n, scratch));
  const float raw_max = stats.max;
  const float* z = logits.data();
  if (ChangesLogits(params)) {
    std::memcpy(work.z, logits.data(), n * sizeof(float));
    ApplyBiasAndPenalties(params, logits, work.z);
    stats = table.logit_stats(work.z, n);
    z = work.z;
  }
  if (!std::isfinite(stats.max) || stats.has_nan) {
    return InvalidArgument("allowed_token_ids, banned ids and logit_bias leave no token to choose");
  }
  SampleResult result;
  if (params.greedy()) {
    result.token = stats.argmax;
  } else {
    table.shift_scale(z, stats.max, 1.0f / params.temperature, work.z, n);  // the largest is now 0
    result.token = Draw(table, params, work, n, Filter(table, params, work, n), position);
  }
  if (params.logprobs >= 0) FillLogprobs(table, logits, raw_max, result.token, params.logprobs, work, result);
  return result;
}

absl::StatusOr<SampleResult> RowLogprobs(const OpsTable& table, std::span<const float> logits, int32_t token, int top,
                                         std::span<std::byte> scratch) {
  DT_ASSIGN_OR_RETURN(const LogitStats stats, CheckedStats(table, logits));
  const auto n = static_cast<int64_t>(logits.size());
  DT_RETURN_IF_ERROR(CheckIds("prompt_logprobs", token, n));
  if (top < 0 || top > kMaxLogprobs) return InvalidArgument("prompt_logprobs: ", top, " is outside 0..", kMaxLogprobs);
  DT_ASSIGN_OR_RETURN(const Workspace work, LayOut(n, scratch));
  SampleResult result;
  result.token = token;
  FillLogprobs(table, logits, stats.max, token, top, work, result);
  return result;
}

}  // namespace dovetail::kernels
