#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "model/config.h"
#include "model/formats/json_file.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {

// What hybrids with linear states and models with experts add to config.json.
// Errors: as ConfigFromJson's.
// Threads: pure, except for `config`.

// The same config in the names that dense models use: text models inside multimodal ones, layer lists of other shapes,
// families that call a size something else.
absl::StatusOr<nlohmann::json> CommonSpelling(const std::string& file, const nlohmann::json& config);

// Whether layer_types means a linear state by this.
bool IsLinearLayer(Architecture architecture, std::string_view type);
// What comes in a layer of this type that has an MLP and nothing else; nullopt: it is another type.
std::optional<MlpKind> MlpOfLayer(Architecture architecture, std::string_view type);

// Fills in state, experts, residual and what else these families have; `config` has everything else.
absl::Status ReadHybrid(const JsonFields& fields, ModelConfig& config);

// Of these, Mamba-2 and the hybrids around it (config_json_mamba.cc).
absl::Status ReadMambaHybrid(const JsonFields& fields, ModelConfig& config);

absl::Status ReadExperts(const JsonFields& fields, ExpertConfig& experts, const char* count, const char* intermediate);
// Of routers after DeepSeek-V3: sigmoids, a bias to choose by, groups of which some are looked at (topk_group). What
// their fields are called.
struct SigmoidExpertNames {
  const char* count;
  const char* groups;
  const char* renormalise;
};
absl::Status ReadSigmoidExperts(const JsonFields& fields, ExpertConfig& experts, const SigmoidExpertNames& names);

void AllSparse(ModelConfig& config);

}  // namespace dovetail::model
