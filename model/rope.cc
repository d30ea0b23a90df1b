#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace dovetail::model {
namespace {

// theta^(2i/r) in f32.
std::vector<float> Powers(double theta, int rotary_dims) {
  std::vector<float> powers(static_cast<size_t>(rotary_dims / 2));
  for (size_t i = 0; i < powers.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotary_dims);
    powers[i] = std::pow(static_cast<float>(theta), exponent);
  }
  return powers;
}

std::vector<float> PlainFrequencies(double theta, const RopeSpec& spec) {
  std::vector<float> inv_freq = Powers(theta, spec.rotary_dims);
  for (float& f : inv_freq) f = 1.0f / f;
  for (size_t i = 0; i < spec.divisors.size(); ++i) inv_freq[i] /= spec.divisors[i];
  return inv_freq;
}

double DynamicTheta(const RopeSpec& spec, int64_t length) {
  const double m = static_cast<double>(spec.max_positions),
               n = static_cast<double>(std::max(length, spec.max_positions));
  const double r = spec.rotary_dims;
  if (r <= 2) return spec.theta;  // one pair turns at 1 whatever theta is
  return spec.theta * std::pow(spec.factor * n / m - (spec.factor - 1.0), r / (r - 2.0));
}

void ScaleLlama3(const RopeSpec& spec, std::vector<float>& inv_freq) {
  const double o = static_cast<double>(spec.original_max_positions);
  const auto factor = static_cast<float>(spec.factor);
  const auto low_wavelength = static_cast<float>(o / spec.low_freq_factor);
  const auto high_wavelength = static_cast<float>(o / spec.high_freq_factor);
  for (float& f : inv_freq) {
    const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / f;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength) {
      f /= factor;
      continue;
    }
    const float smooth = (static_cast<float>(o) / wavelength - static_cast<float>(spec.low_freq_factor)) /
                         static_cast<float>(spec.high_freq_factor - spec.low_freq_factor);
    f = (1.0f - smooth) * f / factor + smooth * f;
  }
}

// The dimension whose wave turns `rotations` times within the original context.
double YarnDimension(const RopeSpec& spec, double rotations) {
  const double o = static_cast<double>(spec.original_max_positions);
  return spec.rotary_dims * std::log(o / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(spec.theta));
}

std::vector<float> YarnFrequencies(const RopeSpec& spec) {
  double low = YarnDimension(spec, spec.beta_fast), high = YarnDimension(spec, spec.beta_slow);
  if (spec.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, spec.rotary_dims - 1.0);
  if (low == high) high += 0.001;

  std::vector<float> powers = Powers(spec.theta, spec.rotary_dims);
  for (size_t i = 0; i < powers.size(); ++i) {
    const float extrapolated = 1.0f / powers[i];
    const float interpolated = 1.0f / (static_cast<float>(spec.factor) * powers[i]);
    const float ramp =
        std::clamp((static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    powers[i] = interpolated * (1.0f - keep) + extrapolated * keep;
  }
  for (size_t i = 0; i < spec.divisors.size(); ++i) powers[i] /= spec.divisors[i];
  return powers;
}

std::vector<float> LongRopeFrequencies(const RopeSpec& spec, int64_t length) {
  const std::vector<float>& factors = length > spec.original_max_positions ? spec.long_factor : spec.short_factor;
  std::vector<float> powers = Powers(spec.theta, spec.rotary_dims);
  DT_CHECK(factors.size() == powers.size());
  for (size_t i = 0; i < powers.size(); ++i) powers[i] = 1.0f / (factors[i] * powers[i]);
  return powers;
}

}  // namespace

std::string_view Name(RopeKind kind) {
  switch (kind) {
    case RopeKind::kDefault: return "default";
    case RopeKind::kLinear: return "linear";
    case RopeKind::kDynamic: return "dynamic";
    case RopeKind::kLlama3: return "llama3";
    case RopeKind::kYarn: return "yarn";
    case RopeKind::kLongRope: return "longrope";
  }
  return "unknown";
}

int64_t RopeLength(const RopeSpec& spec, RopeLengthRule rule, int64_t prompt_tokens) {
  if (rule == RopeLengthRule::kPrompt) return prompt_tokens;
  if (spec.kind != RopeKind::kDynamic) return spec.max_positions;
  return static_cast<int64_t>(static_cast<double>(spec.max_positions) * spec.factor);
}

int64_t RopeVariant(const RopeSpec& spec, int64_t length) {
  if (spec.kind == RopeKind::kDynamic) return std::max(length, spec.max_positions) - spec.max_positions;
  if (spec.kind == RopeKind::kLongRope) return length > spec.original_max_positions ? 1 : 0;
  return 0;
}

RopeTable MakeRopeTable(const RopeSpec& spec, int64_t length) {
  RopeTable table;
  table.multiplier = static_cast<float>(spec.attention_factor);
  switch (spec.kind) {
    case RopeKind::kDefault: table.inv_freq = PlainFrequencies(spec.theta, spec); break;
    case RopeKind::kLinear:
      table.inv_freq = PlainFrequencies(spec.theta, spec);
      for (float& f : table.inv_freq) f /= static_cast<float>(spec.factor);
      break;
    case RopeKind::kDynamic: table.inv_freq = PlainFrequencies(DynamicTheta(spec, length), spec); break;
    case RopeKind::kLlama3:
      table.inv_freq = PlainFrequencies(spec.theta, spec);
      ScaleLlama3(spec, table.inv_freq);
      break;
    case RopeKind::kYarn: table.inv_freq = YarnFrequencies(spec); break;
    case RopeKind::kLongRope: table.inv_freq = LongRopeFrequencies(spec, length); break;
  }
  return table;
}

void RopeCosSin(const RopeTable& table, Position position, float* cos, float* sin) {
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    const float angle = static_cast<float>(position) * table.inv_freq[i];
    cos[i] = std::cos(angle) * table.multiplier;
    sin[i] = std::sin(angle) * table.multiplier;
  }
}

double YarnMscale(double factor, double mscale) { return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

double LongRopeMultiplier(double factor, int64_t original_max_positions) {
  if (factor <= 1.0) return 1.0;
  return std::sqrt(1.0 + std::log(factor) / std::log(static_cast<double>(original_max_positions)));
}

}  // namespace dovetail::model
