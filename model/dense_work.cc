#include "model/dense_work.h"

#include <string>

#include "model/families/checkpoint_tensors.h"

namespace dovetail::model {

double DenseFlopsPerToken(const ModelConfig& config) {
  double flops = 0;
  for (const TensorNeed& need : TensorsOf(config)) {
    const bool at_an_end = need.canonical == "embed.weight" || need.canonical == "lm_head.weight";
    if (need.cols == 0 || at_an_end) continue;
    const bool of_experts = need.canonical.find(".experts.") != std::string::npos && config.experts.has_value() &&
                            need.canonical.find("latent_") == std::string::npos;
    const double share =
        of_experts ? static_cast<double>(config.experts->chosen) / static_cast<double>(config.experts->experts) : 1;
    flops += 2 * share * static_cast<double>(need.rows) * static_cast<double>(need.cols);
  }
  return flops;
}

}  // namespace dovetail::model
