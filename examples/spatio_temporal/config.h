#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proto/token_layout.h"

namespace dovetail::spatio_temporal {

// A factorised spatio-temporal transformer, as OpenSora's STDiT has it, without conditioning (time steps, text): hidden
// [T, S, C] in bf16; each of the pairs is a spatial block (every position of a frame attends to that frame) and a
// temporal one (every frame of a position attends to that position), both with a gated MLP. Weights and input are
// random, from the seed.
// Threads: plain values and pure functions.
struct Config {
  int64_t frames = 0;     // T
  int64_t positions = 0;  // S, of a frame
  int64_t channels = 0;   // C; a multiple of heads
  int heads = 0;
  int pairs = 0;  // of blocks
  int steps = 1;  // how often all pairs run, as a sampler would have them
  uint64_t seed = 1;
  bool exchange_only = false;  // no block computes anything: what the switches alone take

  int64_t head_dim() const { return channels / heads; }
  int64_t mlp() const;                     // gate and up each: two thirds of 4 C, so that a block has 12 C^2 weights
  int64_t hidden_bytes() const;            // M
  proto::TensorShape HiddenShape() const;  // [T, S, C]
  proto::TensorShape HeadsShape() const;   // [T, S, heads, dim]: q, k, v and o
  absl::Status Validate() const;           // kInvalidArgument names the field and the limit
  std::string DebugString() const;
};

// "tiny" and "small" for tests, "64x4096" and "128x9216" at full size: 1152 channels, 16 heads, 28 pairs.
absl::StatusOr<Config> Preset(std::string_view name);
std::vector<std::string> PresetNames();

enum class Way {
  kDsp,      // hidden cut by frames in spatial blocks and by positions in temporal ones: two switches a pair
  kUlysses,  // hidden cut by frames; q, k, v to heads and o back in both blocks: eight switches a pair
};
absl::StatusOr<Way> ParseWay(std::string_view name);  // "dsp", "ulysses"
std::string_view NameOf(Way way);

// Bytes that all ranks together send for a pair, from the sizes of the cuts alone: 2 f M and 8 f M where P divides
// T, S and heads, f = (P - 1) / P. kInvalidArgument: more ranks than frames, positions or heads.
absl::StatusOr<int64_t> FormulaBytesOfPair(const Config& config, Way way, int ranks);

}  // namespace dovetail::spatio_temporal
