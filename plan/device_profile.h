#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/kv_storage.h"
#include "base/status.h"

// What a device was measured to do: the input of every prediction in this folder.
// Threads: plain values and pure functions.

namespace dovetail::plan {

// What ToJson writes. Earlier versions are read as well: 1 has no rates of caches, 2 no overhead of linear layers.
inline constexpr int kProfileVersion = 3;

// All threads together read so many bytes a second from memory, past every cache.
struct ReadRate {
  int threads = 1;
  double bytes_per_s = 0;
};

// Products y [rows, n] = x [rows, k] W^T of one format of weights (kernels::Name of a PackedFormat), with W read from
// memory.
struct ProductRates {
  struct Point {
    int64_t rows = 1;
    double s_per_weight = 0;  // seconds of the product / (n k)
  };
  std::string weights;
  double bytes_per_weight = 0;  // in memory, scales included
  std::vector<Point> points;    // rows ascending, the first is 1
  // Of few rows, with W read from caches (DeviceProfile::cache_bytes); empty: not measured.
  std::vector<Point> cached_points;
};

// Softmax attention over K and V of `head_dim`, `group` query heads for each KV head.
struct AttentionRates {
  DType kv = DType::kBF16;
  int head_dim = 0;
  int group = 1;
  double decode_bytes_per_s = 0;  // of K and V, by one row a sequence
  double prompt_flops_per_s = 0;  // 4 head_dim for each query head and visible token
  KvStorage storage = KvStorage::kAsSent;
};

// As --kv-cache-dtype has it: "bfloat16", "int8".
std::string KvCacheDtype(DType kv, KvStorage storage);

// One linear operator; a value is an element of a head's state.
struct StateRates {
  int dim = 0;  // of keys and values
  bool delta = false;
  bool vector_decay = false;
  double decode_s_per_value = 0;  // a token of a sequence
  double prompt_s_per_value = 0;  // a token of a prompt
};

struct LinkRates {
  std::string lane;        // "shm", "tcp"
  double latency_s = 0;    // one way, of a small tensor
  double bytes_per_s = 0;  // one way
};

// What a step takes beyond its products and its attention.
struct StepOverhead {
  double step_s = 0;            // of each step: scheduler, frames, sampling
  double sequence_s = 0;        // and of each sequence in it
  double layer_s = 0;           // of each layer, the calls of its products and its attention included
  double layer_sequence_s = 0;  // of each layer and sequence
  double value_s = 0;           // of each value that a layer's products read or write: norms, rope, activations, copies
  double choice_s = 0;          // of each entry of the vocabulary, for each token that is drawn
  double linear_layer_s = 0;    // of each layer of linear attention, beyond layer_s: convolution, gates, norms
};

struct DeviceProfile {
  std::string name;    // as price tables call it
  std::string dated;   // "2026-11-26"
  std::string device;  // kernels::Device::arithmetic()
  std::string source;  // what measured it
  int threads = 1;     // that all rates but `reads` are of
  double memory_gb = 0;
  double cache_bytes = 0;  // that its threads read much faster than memory, however often; 0: not measured
  double load = 0;         // of the machine when the measurement began: processes that wanted a core, as uptime says
  std::vector<ReadRate> reads;
  std::vector<ProductRates> products;
  std::vector<AttentionRates> attention;
  std::vector<StateRates> states;
  std::vector<LinkRates> links;
  StepOverhead steps;

  bool on_gpu() const { return device.starts_with("GPU"); }

  // Seconds of one product of n k = `weights_count` weights, of which the share `cached` (0..1) is read from caches.
  // Between two measured numbers of rows the time is a line; beyond the last it grows with the rows. `rows` >= 1; it
  // need not be whole. A GPU has formats that were not measured there in 16 bits. kNotFound names the format that was
  // not measured and those that were.
  absl::StatusOr<double> ProductSeconds(const std::string& weights, double rows, double weights_count,
                                        double cached = 0) const;
  // The share of a model's weights that stays in caches from one step to the next: all of half of cache_bytes, since K,
  // V and activations pass through them as well; nothing of as much as they hold, for it pushes itself out.
  double CachedShare(double model_bytes) const;
  absl::StatusOr<double> BytesPerWeight(const std::string& weights) const;
  // The measured shape that is nearest: the same type in memory, then the nearest head_dim, then the nearest group.
  // kNotFound names the type.
  absl::StatusOr<AttentionRates> Attention(DType kv, int head_dim, int group,
                                           KvStorage storage = KvStorage::kAsSent) const;
  absl::StatusOr<StateRates> State(int dim, bool delta, bool vector_decay) const;
  absl::StatusOr<LinkRates> Link(const std::string& lane) const;
};

// kInvalidArgument names `name`, then the line of what is no JSON, or the field that is missing, unknown, negative, not
// finite or out of order. kUnimplemented: of a later version.
absl::StatusOr<DeviceProfile> ParseDeviceProfile(const std::string& text, const std::string& name);

// What ParseDeviceProfile reads, ending with a newline.
std::string ToJson(const DeviceProfile& profile);

}  // namespace dovetail::plan
