#include "examples/spatio_temporal/config.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dovetail::spatio_temporal {
namespace {

constexpr int64_t kMaxFrames = 4096, kMaxPositions = 1 << 20, kMaxChannels = 16384;
constexpr int kMaxPairs = 1024, kMaxSteps = 1 << 20;

struct Named {
  const char* name;
  Config config;
};
const Named kPresets[] = {
    {"tiny", {.frames = 6, .positions = 70, .channels = 48, .heads = 4, .pairs = 2}},
    {"small", {.frames = 16, .positions = 256, .channels = 384, .heads = 8, .pairs = 2}},
    {"64x4096", {.frames = 64, .positions = 4096, .channels = 1152, .heads = 16, .pairs = 28}},
    {"128x9216", {.frames = 128, .positions = 9216, .channels = 1152, .heads = 16, .pairs = 28}},
};

absl::Status CheckRange(const char* name, int64_t value, int64_t most) {
  if (value < 1 || value > most) return InvalidArgument(name, " ", value, " is outside 1..", most);
  return absl::OkStatus();
}

// What stays of a tensor of `unit` bytes for each (a, b), when a rank has the ranks' shares of a before, of b after.
absl::StatusOr<int64_t> Kept(int64_t a, int64_t b, int ranks, const char* a_name, const char* b_name) {
  if (ranks > a || ranks > b)
    return InvalidArgument(ranks, " ranks: at most ", std::min(a, b), ", so that each has some ", a_name, " and some ",
                           b_name);
  const auto share = [&](int64_t size, int64_t rank) {
    return (rank + 1) * (size / ranks) + (rank + 1) * (size % ranks) / ranks - rank * (size / ranks) -
           rank * (size % ranks) / ranks;
  };
  int64_t kept = 0;
  for (int rank = 0; rank < ranks; ++rank) kept += share(a, rank) * share(b, rank);
  return kept;
}

}  // namespace

int64_t Config::mlp() const { return (8 * channels / 3 + 31) / 32 * 32; }
int64_t Config::hidden_bytes() const { return frames * positions * channels * 2; }

proto::TensorShape Config::HiddenShape() const {
  proto::TensorShape shape;
  shape.axes = {{"T", frames}, {"S", positions}, {"C", channels}};
  shape.element_bytes = 2;
  return shape;
}

proto::TensorShape Config::HeadsShape() const {
  proto::TensorShape shape;
  shape.axes = {{"T", frames}, {"S", positions}, {"heads", heads}, {"dim", head_dim()}};
  shape.element_bytes = 2;
  return shape;
}

absl::Status Config::Validate() const {
  DT_RETURN_IF_ERROR(CheckRange("frames", frames, kMaxFrames));
  DT_RETURN_IF_ERROR(CheckRange("positions", positions, kMaxPositions));
  DT_RETURN_IF_ERROR(CheckRange("channels", channels, kMaxChannels));
  DT_RETURN_IF_ERROR(CheckRange("heads", heads, channels));
  DT_RETURN_IF_ERROR(CheckRange("pairs", pairs, kMaxPairs));
  DT_RETURN_IF_ERROR(CheckRange("steps", steps, kMaxSteps));
  if (channels % heads != 0 || head_dim() % 2 != 0 || head_dim() > 256)
    return InvalidArgument("channels ", channels, " and heads ", heads, ": channels / heads is even and at most 256");
  return absl::OkStatus();
}

std::string Config::DebugString() const {
  return absl::StrCat("T ", frames, ", S ", positions, ", C ", channels, ", ", heads, " heads, ", pairs, " pairs");
}

absl::StatusOr<Config> Preset(std::string_view name) {
  for (const Named& preset : kPresets)
    if (name == preset.name) return preset.config;
  return InvalidArgument("preset ", std::string(name), " is none of ", absl::StrJoin(PresetNames(), ", "));
}

std::vector<std::string> PresetNames() {
  std::vector<std::string> names;
  for (const Named& preset : kPresets) names.push_back(preset.name);
  return names;
}

absl::StatusOr<Way> ParseWay(std::string_view name) {
  if (name == "dsp") return Way::kDsp;
  if (name == "ulysses") return Way::kUlysses;
  return InvalidArgument("way ", std::string(name), " is neither dsp nor ulysses");
}

std::string_view NameOf(Way way) { return way == Way::kDsp ? "dsp" : "ulysses"; }

absl::StatusOr<int64_t> FormulaBytesOfPair(const Config& config, Way way, int ranks) {
  if (way == Way::kDsp) {
    DT_ASSIGN_OR_RETURN(const int64_t kept, Kept(config.frames, config.positions, ranks, "frames", "positions"));
    return 2 * (config.frames * config.positions - kept) * config.channels * 2;
  }
  DT_ASSIGN_OR_RETURN(const int64_t kept, Kept(config.frames, config.heads, ranks, "frames", "heads"));
  return 8 * (config.frames * config.heads - kept) * config.positions * config.head_dim() * 2;
}

}  // namespace dovetail::spatio_temporal
