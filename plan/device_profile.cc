#include "plan/device_profile.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <tuple>

#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "plan/profile_json.h"

namespace dovetail::plan {

using Json = nlohmann::ordered_json;

static const std::vector<std::string>& TypeNames() {
  static const std::vector<std::string> names = {"float32", "float16", "bfloat16",  // by DType
                                                 "fp8_e4m3", "int8"};               // then by KvStorage, from kE4M3 on
  return names;
}
constexpr int kTypesAsSent = 3;

std::string KvCacheDtype(DType kv, KvStorage storage) {
  return std::string(storage == KvStorage::kAsSent ? Name(kv) : Name(storage));
}

// FieldsOf is found by its argument, so it is in no unnamed namespace.

template <typename Io>
void FieldsOf(Io& io, ReadRate& x) {
  io.Whole("threads", x.threads);
  io.Number("bytes_per_s", x.bytes_per_s);
}
template <typename Io>
void FieldsOf(Io& io, ProductRates::Point& x) {
  io.Whole("rows", x.rows);
  io.Number("s_per_weight", x.s_per_weight);
}
template <typename Io>
void FieldsOf(Io& io, ProductRates& x) {
  io.Text("weights", x.weights);
  io.Number("bytes_per_weight", x.bytes_per_weight);
  io.List("points", x.points, 1);
  io.OptionalList("cached_points", x.cached_points);
}
template <typename Io>
void FieldsOf(Io& io, AttentionRates& x) {
  int type = x.storage == KvStorage::kAsSent ? static_cast<int>(x.kv) : kTypesAsSent + static_cast<int>(x.storage) - 1;
  io.Choice("kv", type, TypeNames());
  x.kv = type < kTypesAsSent ? static_cast<DType>(type) : DType::kBF16;
  x.storage = type < kTypesAsSent ? KvStorage::kAsSent : static_cast<KvStorage>(type - kTypesAsSent + 1);
  io.Whole("head_dim", x.head_dim);
  io.Whole("group", x.group);
  io.Number("decode_bytes_per_s", x.decode_bytes_per_s);
  io.Number("prompt_flops_per_s", x.prompt_flops_per_s);
}
template <typename Io>
void FieldsOf(Io& io, StateRates& x) {
  io.Whole("dim", x.dim);
  io.Truth("delta", x.delta);
  io.Truth("vector_decay", x.vector_decay);
  io.Number("decode_s_per_value", x.decode_s_per_value);
  io.Number("prompt_s_per_value", x.prompt_s_per_value);
}
template <typename Io>
void FieldsOf(Io& io, LinkRates& x) {
  io.Text("lane", x.lane);
  io.Number("latency_s", x.latency_s, Least::kZero);
  io.Number("bytes_per_s", x.bytes_per_s);
}
template <typename Io>
void FieldsOf(Io& io, StepOverhead& x) {
  io.Number("step_s", x.step_s, Least::kZero);
  io.Number("sequence_s", x.sequence_s, Least::kZero);
  io.Number("layer_s", x.layer_s, Least::kZero);
  io.Number("layer_sequence_s", x.layer_sequence_s, Least::kZero);
  io.Number("value_s", x.value_s, Least::kZero);
  io.Number("choice_s", x.choice_s, Least::kZero);
  io.OptionalNumber("linear_layer_s", x.linear_layer_s);
}
template <typename Io>
void FieldsOf(Io& io, DeviceProfile& x) {
  io.Text("name", x.name);
  io.Text("dated", x.dated);
  io.Text("device", x.device);
  io.Text("source", x.source);
  io.Whole("threads", x.threads);
  io.Number("memory_gb", x.memory_gb);
  io.OptionalNumber("cache_bytes", x.cache_bytes);
  io.Number("load", x.load, Least::kZero);
  io.List("reads", x.reads, 1);
  io.List("products", x.products, 1);
  io.List("attention", x.attention);
  io.List("states", x.states);
  io.List("links", x.links);
  io.Object("steps", x.steps);
}

namespace {

using Points = std::vector<ProductRates::Point>;

absl::Status CheckPoints(const Points& points, const std::string& place) {
  if (points.front().rows != 1) return InvalidArgument(place, "[0]: rows: ", points.front().rows, " is not 1");
  for (size_t p = 1; p < points.size(); ++p)
    if (points[p].rows <= points[p - 1].rows)
      return InvalidArgument(place, "[", p, "]: rows: ", points[p].rows, " does not come after ", points[p - 1].rows);
  return absl::OkStatus();
}

absl::Status CheckPoints(const DeviceProfile& profile, const std::string& name) {
  for (size_t i = 0; i < profile.products.size(); ++i) {
    const ProductRates& rates = profile.products[i];
    const std::string place = absl::StrCat(name, ": products[", i, "]: ");
    DT_RETURN_IF_ERROR(CheckPoints(rates.points, place + "points"));
    if (!rates.cached_points.empty()) DT_RETURN_IF_ERROR(CheckPoints(rates.cached_points, place + "cached_points"));
  }
  return absl::OkStatus();
}

double SecondsAt(const Points& points, double rows) {
  const auto above = std::find_if(points.begin(), points.end(),
                                  [&](const auto& point) { return static_cast<double>(point.rows) >= rows; });
  if (above == points.end()) return points.back().s_per_weight * rows / static_cast<double>(points.back().rows);
  if (above == points.begin()) return points.front().s_per_weight;
  const auto& below = *(above - 1);
  const double part = (rows - static_cast<double>(below.rows)) / static_cast<double>(above->rows - below.rows);
  return below.s_per_weight + part * (above->s_per_weight - below.s_per_weight);
}

constexpr const char* kSixteenBits = "bf16";  // as kernels::Name has them

absl::StatusOr<const ProductRates*> Find(const DeviceProfile& profile, const std::string& weights) {
  std::vector<std::string> names;
  for (const ProductRates& rates : profile.products) {
    if (rates.weights == weights) return &rates;
    names.push_back(rates.weights);
  }
  if (profile.on_gpu() && weights != kSixteenBits) return Find(profile, kSixteenBits);
  return NotFound(profile.name, ": its profile has no products of ", weights, " weights; it has ",
                  absl::StrJoin(names, ", "));
}

}  // namespace

absl::StatusOr<double> DeviceProfile::ProductSeconds(const std::string& weights, double rows, double weights_count,
                                                     double cached) const {
  DT_ASSIGN_OR_RETURN(const ProductRates* rates, Find(*this, weights));
  const double from_memory = SecondsAt(rates->points, rows);
  // Beyond the few rows that were measured so, arithmetic decides.
  const Points& near = rates->cached_points;
  const bool few = !near.empty() && rows <= static_cast<double>(near.back().rows);
  const double from_caches = few ? std::min(from_memory, SecondsAt(near, rows)) : from_memory;
  return (cached * from_caches + (1 - cached) * from_memory) * weights_count;
}

double DeviceProfile::CachedShare(double model_bytes) const {
  return cache_bytes > 0 ? std::clamp(2 - 2 * model_bytes / cache_bytes, 0.0, 1.0) : 0;
}

absl::StatusOr<double> DeviceProfile::BytesPerWeight(const std::string& weights) const {
  DT_ASSIGN_OR_RETURN(const ProductRates* rates, Find(*this, weights));
  return rates->bytes_per_weight;
}

absl::StatusOr<AttentionRates> DeviceProfile::Attention(DType kv, int head_dim, int group, KvStorage storage) const {
  const AttentionRates* best = nullptr;
  const auto distance = [&](const AttentionRates& rates) {
    return std::tuple(std::abs(std::log2(static_cast<double>(rates.head_dim) / head_dim)),
                      std::abs(std::log2(static_cast<double>(rates.group) / group)));
  };
  for (const AttentionRates& rates : attention)
    if (rates.kv == kv && rates.storage == storage && (best == nullptr || distance(rates) < distance(*best)))
      best = &rates;
  if (best == nullptr)
    return NotFound(name, ": its profile has no attention over ", KvCacheDtype(kv, storage),
                    " K and V; where a CPU has them, `dovetail bench device` measures it");
  return *best;
}

absl::StatusOr<StateRates> DeviceProfile::State(int dim, bool delta, bool vector_decay) const {
  const StateRates* best = nullptr;
  const auto distance = [&](const StateRates& rates) {
    return std::abs(std::log2(static_cast<double>(rates.dim) / dim));
  };
  for (const StateRates& rates : states)
    if (rates.delta == delta && rates.vector_decay == vector_decay &&
        (best == nullptr || distance(rates) < distance(*best)))
      best = &rates;
  if (best == nullptr)
    return NotFound(name, ": its profile has no linear states with ", delta ? "the delta rule" : "plain updates",
                    " and ", vector_decay ? "a decay for each channel" : "one decay a head");
  return *best;
}

absl::StatusOr<LinkRates> DeviceProfile::Link(const std::string& lane) const {
  std::vector<std::string> names;
  for (const LinkRates& rates : links) {
    if (rates.lane == lane) return rates;
    names.push_back(rates.lane);
  }
  return NotFound(name, ": its profile has no link '", lane, "'; it has ",
                  names.empty() ? "none" : absl::StrJoin(names, ", "));
}

absl::StatusOr<DeviceProfile> ParseDeviceProfile(const std::string& text, const std::string& name) {
  Json parsed;
  try {
    parsed = Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument(name, ": is not JSON: ", error.what());
  }
  const auto version = parsed.is_object() ? parsed.find("dovetail_device_profile") : parsed.end();
  if (!parsed.is_object() || version == parsed.end() || !version->is_number_integer())
    return InvalidArgument(name,
                           ": dovetail_device_profile: has to be the profile's version, and is missing; "
                           "`dovetail bench device` writes profiles");
  if (version->get<int64_t>() < 1 || version->get<int64_t>() > kProfileVersion)
    return Unimplemented(name, ": dovetail_device_profile: version ", version->dump(), " is not 1..", kProfileVersion,
                         ", which this program reads; measure the device again");
  parsed.erase("dovetail_device_profile");
  DeviceProfile profile;
  FieldReader reader(parsed, name);
  FieldsOf(reader, profile);
  DT_RETURN_IF_ERROR(reader.Finish());
  absl::CivilDay day;
  if (!absl::ParseCivilTime(profile.dated, &day))
    return InvalidArgument(name, ": dated: '", profile.dated, "' is no day, as 2026-11-26");
  DT_RETURN_IF_ERROR(CheckPoints(profile, name));
  return profile;
}

std::string ToJson(const DeviceProfile& profile) {
  DeviceProfile copy = profile;
  FieldWriter writer;
  writer.json["dovetail_device_profile"] = kProfileVersion;
  FieldsOf(writer, copy);
  return writer.json.dump(1) + "\n";
}

}  // namespace dovetail::plan
