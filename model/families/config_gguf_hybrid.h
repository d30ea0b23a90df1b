#pragma once
#include <string>
#include <vector>

#include "model/config.h"
#include "model/formats/gguf.h"

namespace dovetail::model {

// What GGUF files of hybrids with linear states and of models with experts say differently: numbers by layer, where
// those of a layer without attention or MLP are 0, and the sizes of states and experts. Errors name file and key.
// Threads: pure, except for `config`.

// <prefix>.<suffix>, one number for all layers or one for each, none below 0; `missing` where the key is absent.
absl::StatusOr<std::vector<int64_t>> GgufPerLayer(const GgufFile& gguf, const std::string& key, size_t layers,
                                                  int64_t missing);

// Whether such a model is read by ReadHybridGguf.
bool IsHybridGguf(Architecture architecture);
// Whether files of general.architecture `name` may have expert layers.
bool MayHaveExperts(Architecture architecture, const std::string& name);

// Heads and sizes of the MLPs, and which layers have what; then states and experts. `config` has its architecture,
// sizes and layers, whose ropes are set; `prefix` is the architecture's name in keys.
absl::Status ReadHybridSizes(const GgufFile& gguf, const std::string& prefix, ModelConfig& config);
absl::Status ReadHybridGguf(const GgufFile& gguf, const std::string& prefix, ModelConfig& config);

}  // namespace dovetail::model
